"""The scan over channels equals a loop over tokens, in one block or several."""

import pytest
import torch
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.mixers.recurrent import mamba
from manyheads.mixers.recurrent.mamba import Mamba, naive_selective_scan, scan_channels
from manyheads.ragged import Lengths

CHANNELS, STATES = 6, 4


def inputs(lengths: Lengths) -> list[Tensor]:
    total = lengths.total
    return [
        torch.randn(total, CHANNELS),
        torch.rand(total, CHANNELS),
        -4 * torch.rand(CHANNELS, STATES),
        torch.randn(total, STATES),
        torch.randn(total, STATES),
    ]


@pytest.mark.parametrize("channels", [CHANNELS, 4])
def test_the_scan_equals_the_loop_over_tokens(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = Lengths.of([290, 0, 7, 1, 17])
    monkeypatch.setattr(mamba, "BLOCK", {"cpu": channels * STATES * lengths.total})
    arguments, state = inputs(lengths), torch.randn(5, CHANNELS, STATES)
    leaves = [each.requires_grad_() for each in (*arguments, state)]
    result = scan_channels(*arguments, lengths, state)
    expected = naive_selective_scan(*arguments, lengths, state)
    with torch.no_grad():
        walked = scan_channels(*arguments, lengths, state)
    for one, other, same in zip(result, expected, walked, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(same, other, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(result[0])
    ways = [((out * weights).sum() + after.square().sum()) for out, after in (result, expected)]
    for one, other in zip(*(torch.autograd.grad(way, leaves) for way in ways), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_fast_decay_neither_overflows_nor_leaks() -> None:
    lengths = Lengths.of([100, 40])
    x, dt, rate, b, c = inputs(lengths)
    for leaf in (rate, rate.clone().requires_grad_()):
        together, _ = scan_channels(x, 1000 * dt, leaf, b, c, lengths)
        assert together.isfinite().all()
        bad = x.clone()
        bad[:100] = torch.nan
        again, _ = scan_channels(bad, 1000 * dt, leaf, b, c, lengths)
        assert torch.equal(again[100:], together[100:])


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"dt_rank.*0"):
        Mamba(width=8, inner=16, dt_rank=0)
