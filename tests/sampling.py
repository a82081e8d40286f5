"""Fewer cases of a large product, always the same ones, that still hold every pair of values."""

import random
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])
Pair = tuple[int, Hashable, int, Hashable]


def pairs_of(cases: Iterable[tuple[Hashable, ...]]) -> set[Pair]:
    """Every two values that stand together in some case, each with the place where it stands."""
    return {
        (one, case[one], other, case[other])
        for case in cases
        for one, other in combinations(range(len(case)), 2)
    }


def cover(cases: Sequence[Case], *, every: Sequence[int] = (), seed: int = 0) -> list[Case]:
    """A sample of the cases that holds every pair of values that they hold.

    It also holds every combination of the columns named by `every` (a kernel, a mask and a bias,
    say). The order is that of the cases, so that a cache of neighbors still helps.
    """
    drawn = random.Random(seed).sample(range(len(cases)), len(cases))
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for index in drawn:
        groups.setdefault(tuple(cases[index][column] for column in every), []).append(index)
    missing, taken = pairs_of(cases), set()
    for group in groups.values():
        best = max(group, key=lambda index: len(missing & pairs_of([cases[index]])))
        taken.add(best)
        missing -= pairs_of([cases[best]])
    for index in drawn:
        if missing & (new := pairs_of([cases[index]])):
            taken.add(index)
            missing -= new
    return [cases[index] for index in sorted(taken)]
