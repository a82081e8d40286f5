"""Why scores are divided by sqrt(d): what happens to softmax with and without, measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError

__all__ = ["KEYS", "ROWS", "SIZES", "Measured", "Scaling", "mean_slope", "measure"]

SIZES = (8, 16, 32, 64, 128, 256, 512)
ROWS = 512
KEYS = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of one kind: their variance, and what softmax makes of a row of them."""

    variance: float
    largest_weight: float
    slope: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Heads of `size` channels: q.k as it is (`plain`), and divided by sqrt(size) (`scaled`)."""

    size: int
    plain: Measured
    scaled: Measured


def measure(
    sizes: Sequence[int] = SIZES, *, rows: int = ROWS, keys: int = KEYS, seed: int = 0
) -> tuple[Scaling, ...]:
    """Draw queries and keys of unit variance, `rows` of each size, and look at their scores.

    >>> (found,) = measure([64])
    >>> found.plain.variance > 50, found.scaled.variance < 1.2
    (True, True)
    """
    if any(size < 1 for size in sizes):
        raise InputError(f"sizes {tuple(sizes)} hold an empty head", "use 1 or more channels")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        query = torch.randn(rows, size, generator=generator)
        key = torch.randn(rows, keys, size, generator=generator)
        product = einsum(query, key, "n d, n s d -> n s")
        found.append(Scaling(size, _measured(product), _measured(product / size**0.5)))
    return tuple(found)


def mean_slope(weights: Float[Tensor, "n s"]) -> Float[Tensor, " n"]:
    """The mean of |dp_i / ds_j| over all pairs of a row.

    dp_i / ds_j is p_i (1 - p_i) where i = j and -p_i p_j elsewhere, so the s^2 of them add up in
    size to 2 (1 - sum of p^2).
    """
    return 2 * (1 - weights.square().sum(-1)) / weights.shape[-1] ** 2


def _measured(scores: Float[Tensor, "n s"]) -> Measured:
    weights = scores.double().softmax(-1)
    return Measured(
        variance=float(scores.var()),
        largest_weight=float(weights.amax(-1).mean()),
        slope=float(mean_slope(weights).mean()),
    )
