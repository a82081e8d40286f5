"""The convolution of S4D equals its recurrence, in one piece or several, in both directions."""

import pytest
import torch

from manyheads import Ragged
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.s4d import (
    S4D,
    Powers,
    S4DLayer,
    convolve_texts,
    last_states,
    naive_s4d,
)
from manyheads.ragged import Lengths

LENGTHS = Lengths.of([37, 0, 1, 16, 5])


def test_the_convolution_equals_the_recurrence() -> None:
    layer = S4DLayer(S4D(width=3, state_size=8))
    u = torch.randn(LENGTHS.total, 3, requires_grad=True)
    state = torch.randn(5, 3, 4, dtype=torch.complex64)
    step, c = layer.system()
    powers = Powers.of(step, 64)
    result = convolve_texts(u, powers, c, LENGTHS, state)
    after = last_states(u, powers, LENGTHS, state)
    texts = zip(LENGTHS.slices(), state, strict=True)
    expected = [naive_s4d(u[where], step, c[0], each) for where, each in texts]
    outputs = torch.cat([each for each, _ in expected])
    torch.testing.assert_close(result, outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        after, torch.stack([each for _, each in expected]), atol=1e-4, rtol=0
    )
    leaves = [u, layer.A_log, layer.A_imag, layer.dt_bias, layer.C]
    weights = torch.randn_like(outputs)
    ways = [
        torch.autograd.grad((way * weights).sum(), leaves, retain_graph=True)
        for way in (result, outputs)
    ]
    for one, other in zip(*ways, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_the_second_system_reads_from_the_end() -> None:
    layer = S4DLayer(S4D(width=3, state_size=8, causal=False))
    u = torch.randn(11, 3)
    with torch.no_grad():
        step, c = layer.system()
        result = convolve_texts(u, Powers.of(step, 16), c, Lengths.of([11]))
        start = torch.zeros(3, 4, dtype=torch.complex64)
        forwards, _ = naive_s4d(u, step, c[0], start)
        backwards, _ = naive_s4d(u.flip(0), step, c[1], start)
    expected = forwards + torch.cat([backwards.flip(0)[1:], torch.zeros(1, 3)])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_long_texts_stay_exact() -> None:
    layer, length = S4DLayer(S4D(width=2, state_size=64)), 5000
    with torch.no_grad():
        step, c = layer.system()
        impulse = torch.zeros(length, 2)
        impulse[0] = 1.0
        result = convolve_texts(impulse, Powers.of(step, 8192), c, Lengths.of([length]))
        exact = step.to(torch.complex128).unsqueeze(-1) * torch.arange(length)
        expected = 2 * (c[0].unsqueeze(-1) * exact.exp()).sum(1).real.T
    torch.testing.assert_close(
        result.double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=0
    )


def test_texts_of_a_batch_never_meet() -> None:
    layer, x = S4DLayer(S4D(width=3, state_size=4)), torch.randn(24, 3)
    batch = Ragged.from_list([x[:13], x[13:]])
    together = layer(batch).values
    x[:13] = torch.nan
    assert torch.equal(layer(batch.with_values(x)).values[13:], together[13:])


def test_states_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match=r"state_size.*7"):
        S4D(width=3, state_size=7)
