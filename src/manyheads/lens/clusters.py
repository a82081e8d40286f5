"""Average linkage: groups of things that are alike, nearest first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError

__all__ = ["Merge", "average_linkage", "cut"]


@dataclass(frozen=True, slots=True)
class Merge:
    """Two groups that became one, and how alike they were: the mean over pairs across them."""

    one: tuple[int, ...]
    other: tuple[int, ...]
    likeness: float


def average_linkage(likeness: Float[np.ndarray, "h h"]) -> tuple[Merge, ...]:
    """Join the two groups most alike, again and again (UPGMA; Sokal and Michener 1958).

    Things that have no likeness (NaN) are never joined, nor groups that hold such a pair.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> [(merge.one, merge.other, round(merge.likeness, 3)) for merge in merges]
    [((0,), (1,), 0.9), ((0, 1), (2,), 0.2)]
    """
    count = len(likeness)
    if likeness.shape != (count, count):
        raise InputError(f"likeness of shape {likeness.shape} is of no pairs", "give h x h values")
    near = np.where(np.isnan(likeness), -np.inf, likeness).astype(np.float64)
    near = np.minimum(near, near.T)
    np.fill_diagonal(near, -np.inf)
    groups: dict[int, tuple[int, ...]] = {place: (place,) for place in range(count)}
    best = near.argmax(1) if count else np.zeros(0, dtype=int)
    merges = []
    while len(groups) > 1:
        left = int(near[np.arange(count), best].argmax())
        right = int(best[left])
        if near[left, right] == -np.inf:
            break
        left, right = sorted((left, right))
        merges.append(Merge(groups[left], groups[right], float(near[left, right])))
        sizes = len(groups[left]), len(groups[right])
        joined = (sizes[0] * near[left] + sizes[1] * near[right]) / sum(sizes)
        joined[left] = joined[right] = -np.inf
        near[left, :] = near[:, left] = joined
        near[right, :] = near[:, right] = -np.inf
        groups[left] = tuple(sorted(groups[left] + groups.pop(right)))
        # The joined group is to no other nearer than the nearer of its two: the rest keep theirs.
        stale = np.isin(best, (left, right)) | (np.arange(count) == left)
        best[stale] = near[stale].argmax(1)
    return tuple(merges)


def cut(merges: Sequence[Merge], above: float, count: int) -> tuple[tuple[int, ...], ...]:
    """The groups whose parts are at least so much alike, singles too, in order.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> cut(merges, 0.5, 3)
    ((0, 1), (2,))
    """
    groups: set[tuple[int, ...]] = {(place,) for place in range(count)}
    for merge in merges:
        if merge.likeness >= above and {merge.one, merge.other} <= groups:
            groups -= {merge.one, merge.other}
            groups.add(tuple(sorted(merge.one + merge.other)))
    return tuple(sorted(groups))
