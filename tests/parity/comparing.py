"""One sequence at a time there, a ragged batch of mixed lengths here: the same numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.ragged import Ragged

__all__ = ["LENGTHS", "TOLERANCE", "VOCABULARY", "assert_same", "each_alone", "texts"]

VOCABULARY = 61
LENGTHS = (7, 1, 23, 12, 2)
TOLERANCE = 1e-4


def texts(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def each_alone(model: Callable[..., Any], sequences: Sequence[Tensor], **more: Any) -> list[Tensor]:
    """Their logits, one sequence at a time."""
    with torch.no_grad():
        return [model(sequence[None], **more).logits[0] for sequence in sequences]


def assert_same(
    ours: Ragged | Tensor | None, peer: Sequence[Tensor], tolerance: float = TOLERANCE
) -> None:
    """Every number within the tolerance, and numbers that are worth comparing."""
    assert ours is not None
    result = ours.to_list() if isinstance(ours, Ragged) else list(ours)
    assert len(result) == len(peer)
    for one, other in zip(result, peer, strict=True):
        assert other.std() > 0.1
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
