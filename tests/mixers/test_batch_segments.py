"""A long batch in segments: the same outputs, states and gradients."""

import pytest
import torch

from manyheads.cache import StateCache, StateSlot
from manyheads.mixers import batch_segments
from manyheads.mixers.build import make_mixer
from manyheads.ragged import Ragged
from tests.mixers.mixer_configs import CAUSAL, WIDTH


@pytest.mark.parametrize("name", CAUSAL)
def test_segments_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixer = make_mixer(CAUSAL[name])
    if not mixer.carries_state:
        return
    x, more = (
        Ragged.from_list([torch.randn(length, WIDTH) for length in each])
        for each in ([40, 3, 1, 20, 16], [1, 33, 2, 1, 1])
    )
    whole, parts = StateSlot(StateCache()), StateSlot(StateCache())
    expected = [mixer(batch, cache=whole).values for batch in (x, more)]
    monkeypatch.setattr(batch_segments, "SEGMENT", 16)
    result = [batch_segments.mix(mixer, batch, cache=parts).values for batch in (x, more)]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.state, whole.state, atol=1e-5, rtol=1e-4)
    result[0].sum().backward()
    gradients = [each.grad for each in mixer.parameters()]
    mixer.zero_grad(set_to_none=True)
    expected[0].sum().backward()
    for got, each in zip(gradients, mixer.parameters(), strict=True):
        torch.testing.assert_close(got, each.grad, atol=1e-4, rtol=1e-3)
