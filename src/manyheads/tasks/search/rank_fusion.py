"""One ranking from several, by reciprocal ranks (Cormack, Clarke and Büttcher 2009)."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

# How little the first ranks differ from the next.
RANK_CONSTANT = 60

Item = TypeVar("Item", bound=Hashable)


def fuse_rankings(
    rankings: Sequence[Sequence[Item]], constant: int = RANK_CONSTANT
) -> list[tuple[Item, float]]:
    """Items and the sum of 1 / (constant + rank) over the rankings they are in, best first.

    Ranks count from 1. Equal sums keep the order of the first ranking.

    >>> [item for item, _ in fuse_rankings([["a", "b", "c"], ["b", "d"]])]
    ['b', 'a', 'd', 'c']
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, 1):
            scores[item] = scores.get(item, 0.0) + 1 / (constant + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
