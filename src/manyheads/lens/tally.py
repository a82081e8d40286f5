"""Means and standard errors of many measures, added up batch by batch."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.addresses import Block

__all__ = ["Counted", "Tally", "summed_by"]


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Which values count, and to which of `sequences` sequences each belongs."""

    owner: Int[Tensor, " n"]
    sequences: int
    kept: Bool[Tensor, " n"] | Bool[Tensor, "n h"] | None = None


@dataclass(slots=True, eq=False)
class Tally:
    """Sums by attention and measure, from which means and errors follow; two tallies add up.

    Of the values x of N queries in sequences b with sums S_b of N_b values it keeps, in float64,
    N, sum x, sum x^2, the number of sequences, sum S_b^2, sum S_b N_b and sum N_b^2.
    """

    sums: dict[tuple[Block, str], Float[Tensor, "7 h"]] = field(default_factory=dict)

    def add(self, block: Block, name: str, values: Float[Tensor, "n h"], counted: Counted) -> None:
        """Values of one batch, one a query and head."""
        x = values.double()
        if counted.kept is None:
            weight = torch.ones_like(x)
        else:
            kept = counted.kept if counted.kept.dim() == 2 else counted.kept[:, None]
            weight = kept.double().expand_as(x)
            x = torch.where(kept, x, 0.0)
        by, number = summed_by(x, counted), summed_by(weight, counted)
        parts = (
            number.sum(0),
            by.sum(0),
            x.square().sum(0),
            (number > 0).double().sum(0),
            by.square().sum(0),
            (by * number).sum(0),
            number.square().sum(0),
        )
        self._put((block, name), torch.stack(parts))

    def merge(self, other: "Tally") -> None:
        for key, sums in other.sums.items():
            self._put(key, sums)

    def _put(self, key: tuple[Block, str], sums: Float[Tensor, "7 h"]) -> None:
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.sums))

    def means(self, blocks: tuple[Block, ...], name: str) -> Float[np.ndarray, " h"]:
        """Sum over number of all values that count; NaN for heads that have none."""
        return _joined([_mean(self._of(block, name)) for block in blocks])

    def errors(
        self, blocks: tuple[Block, ...], name: str, *, over_sequences: bool
    ) -> Float[np.ndarray, " h"]:
        """Standard errors of the means.

        Over sequences, queries of one sequence may depend on each other as they like (the ratio
        estimator for clusters); over queries, each is taken to be drawn by itself.
        """
        error = _error_over_sequences if over_sequences else _error_over_queries
        return _joined([error(self._of(block, name)) for block in blocks])

    def _of(self, block: Block, name: str) -> Float[Tensor, "7 h"]:
        none = torch.zeros(7, block.heads, dtype=torch.float64)
        return self.sums.get((block, name), none).cpu()


def summed_by(values: Float[Tensor, "n h"], counted: Counted) -> Float[Tensor, "b h"]:
    """The values of each sequence added up."""
    if counted.sequences == 1:
        # Adding row after row to one place, they would wait for each other on a GPU.
        return values.sum(0, keepdim=True)
    zeros = values.new_zeros(counted.sequences, values.shape[1])
    return zeros.index_add(0, counted.owner, values)


def _mean(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    return sums[1] / sums[0]


def _error_over_sequences(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    number, _, _, sequences, by, crossed, numbers = sums
    mean = _mean(sums)
    scatter = (by - 2 * mean * crossed + mean.square() * numbers).clamp(min=0)
    error = (scatter * sequences / (sequences - 1)).sqrt() / number
    return torch.where(sequences > 1, error, torch.nan)


def _error_over_queries(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    number, _, squares = sums[:3]
    scatter = (squares / number - _mean(sums).square()).clamp(min=0)
    return torch.where(number > 1, (scatter / (number - 1)).sqrt(), torch.nan)


def _joined(each: list[Float[Tensor, " _"]]) -> Float[np.ndarray, " h"]:
    joined = torch.cat(each) if each else torch.zeros(0, dtype=torch.float64)
    return joined.numpy()
