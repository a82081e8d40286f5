"""Under autocast the recurrences stay in float32: their sums run over whole texts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.mixers.linear_attention import mix_both_ways
from manyheads.mixers.performer import featurized, orthogonal_features
from manyheads.mixers.recurrent.decay_recurrence import recur_in_chunks
from manyheads.mixers.recurrent.delta_recurrence import delta_in_chunks
from manyheads.mixers.recurrent.mamba import scan_channels
from manyheads.ragged import Lengths

LENGTHS = Lengths.of((70, 5))
TOKENS = LENGTHS.total


def decayed(x: Tensor) -> Any:
    return recur_in_chunks(x, x, x, -x[..., 0].abs(), LENGTHS)


def by_delta_rule(x: Tensor) -> Any:
    beta, decay = x[..., 0].sigmoid(), -x[..., 1].abs()
    return delta_in_chunks(x, x / x.norm(dim=-1, keepdim=True), x, beta, decay, LENGTHS)


def scanned(x: Tensor) -> Any:
    flat, rate = x.flatten(1), -torch.ones(24, 8)
    return scan_channels(flat, flat.abs(), rate, x[:, 0], x[:, 1], LENGTHS)


def random_features(x: Tensor) -> Any:
    features = orthogonal_features(3, 16, 8, torch.Generator().manual_seed(1))
    return featurized(x, x, features, LENGTHS, causal=True)


RECURRENCES: dict[str, Callable[[Tensor], Any]] = {
    "decay": decayed,
    "delta": by_delta_rule,
    "scan": scanned,
    "features": random_features,
    "both ways": lambda x: (mix_both_ways(x, x, x, LENGTHS),),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_stay_in_float32(name: str) -> None:
    x = torch.randn(TOKENS, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wide = RECURRENCES[name](x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = RECURRENCES[name](x)
    for one, other in zip(wide, cast, strict=True):
        assert torch.equal(one, other)
