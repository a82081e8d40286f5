"""A constant rate with a decay at the end, batches that grow, and curves read backwards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from manyheads.train import BatchGrowth
from studies.training import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantThenDecay(Recipe):
    """The rate rises, stays, and falls to zero in the last `decay` steps by 1 - sqrt."""

    decay: int = 0

    def rate(self, step: int) -> float:
        late = max(0, step - (self.steps - self.decay)) / max(1, self.decay)
        return self.lr * min((step + 1) / self.warm_up, 1 - late**0.5)


def growing(
    batches: Iterator[Tensor], growth: BatchGrowth, length: int
) -> Iterator[tuple[int, Tensor]]:
    """The first rows of every batch, as many as the growth allows, with the bytes up to there."""
    used = 0
    for step, batch in enumerate(batches):
        rows = growth.tokens(step) // length
        used += rows * length
        yield used, batch[:rows]


def reached(cost: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost at which a curve first comes down to a loss, between two points by a line.

    >>> reached([0, 10, 20], [3.0, 2.0, 1.0], 1.5)
    15.0
    """
    points = list(zip(cost, losses, strict=True))
    for (start, high), (end, low) in pairwise(points):
        if low <= target:
            share = 1.0 if high <= low else (high - target) / (high - low)
            return start + (end - start) * min(1.0, max(0.0, share))
    return None
