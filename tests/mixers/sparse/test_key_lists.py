"""Attention of blocks to lists of keys, a few blocks at a time."""

import pytest
import torch

from manyheads import Ragged
from manyheads.mixers.build import MixerConfig, make_mixer
from manyheads.mixers.sparse import key_lists
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL, WIDTH

LISTED = {
    name: (CAUSAL | BOTH_WAYS)[name] for name in ("segments", "knn", "longformer", "big_bird")
}


@pytest.mark.parametrize("config", LISTED.values(), ids=LISTED)
def test_a_few_blocks_at_a_time_give_the_same(
    config: MixerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mixer, tokens = make_mixer(config), torch.randn(140, WIDTH)
    result = []
    for largest in (2**22, 1):
        monkeypatch.setattr(key_lists, "LARGEST_ON_CPU", largest)
        x = tokens.clone().requires_grad_()
        mixer.zero_grad()
        mixed = mixer(Ragged.from_list([x[:100], x[100:]])).values
        mixed.sin().sum().backward()
        result.append([mixed.detach(), x.grad, *(each.grad.clone() for each in mixer.parameters())])
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", LISTED.values(), ids=LISTED)
def test_nan_stays_in_its_text(config: MixerConfig) -> None:
    torch.manual_seed(0)
    mixer, tokens = make_mixer(config).eval(), torch.randn(100, WIDTH)
    with torch.no_grad():
        clean = mixer(Ragged.from_list([tokens[:30], tokens[30:]])).values
        tokens[:30] = torch.nan
        spoilt = mixer(Ragged.from_list([tokens[:30], tokens[30:]])).values
    assert torch.equal(spoilt[30:], clean[30:])
