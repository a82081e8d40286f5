"""Sums by token: how much weight each token receives, and how active heads are at it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class TokenLift:
    """A token, its value as a multiple of what is expected, and how often it was seen."""

    token: int
    lift: float
    count: int


class TokenSums:
    """Sums of several columns for the tokens that occur, however large the vocabulary is."""

    def __init__(self, columns: int) -> None:
        self._places: dict[int, int] = {}
        self._sums: Float[np.ndarray, "capacity c"] = np.zeros((FIRST_CAPACITY, columns))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> Int[np.ndarray, " tokens"]:
        """The tokens in the order in which they were first seen."""
        return np.fromiter(self._places, dtype=np.int64, count=len(self._places))

    @property
    def sums(self) -> Float[np.ndarray, "tokens c"]:
        return self._sums[: len(self)]

    def add(self, ids: Int[np.ndarray, " n"], values: Float[np.ndarray, "n c"]) -> None:
        unique, inverse = np.unique(ids, return_inverse=True)
        for token in unique.tolist():
            self._places.setdefault(token, len(self._places))
        while len(self) > len(self._sums):
            self._sums = np.concatenate((self._sums, np.zeros_like(self._sums)))
        places = np.array([self._places[token] for token in unique.tolist()], dtype=np.int64)
        summed = np.zeros((len(unique), values.shape[1]))
        np.add.at(summed, inverse, values)
        self._sums[places] += summed

    def restore(self, ids: Int[np.ndarray, " tokens"], sums: Float[np.ndarray, "tokens c"]) -> None:
        """Go on from the sums of an earlier run."""
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._sums = np.concatenate((sums, np.zeros((FIRST_CAPACITY, sums.shape[1]))))


def top_lifts(
    ids: Int[np.ndarray, " tokens"],
    values: Float[np.ndarray, " tokens"],
    expected: Float[np.ndarray, " tokens"],
    counts: Float[np.ndarray, " tokens"],
    *,
    top: int,
    min_count: int,
) -> list[TokenLift]:
    """The tokens whose share of all values exceeds their share of what is expected the most.

    Tokens seen fewer than `min_count` times are left out, but count in both totals.

    >>> ids, counts = np.array([7, 8, 9]), np.array([5.0, 5.0, 1.0])
    >>> top_lifts(ids, np.array([3.0, 1.0, 4.0]), counts, counts, top=2, min_count=2)
    [TokenLift(token=7, lift=0.825, count=5), TokenLift(token=8, lift=0.275, count=5)]
    """
    total, expected_total = values.sum(), expected.sum()
    if total <= 0 or expected_total <= 0:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        lifts = (values / total) / (expected / expected_total)
    lifts = np.where((counts >= min_count) & (expected > 0), lifts, -np.inf)
    # Of equal lifts the smaller id comes first, in whatever order the tokens were seen.
    order = np.lexsort((ids, -lifts))[:top]
    return [
        TokenLift(int(ids[index]), round(float(lifts[index]), 6), int(counts[index]))
        for index in order
        if lifts[index] > 0
    ]
