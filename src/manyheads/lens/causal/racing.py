"""A race of heads: measure each one only until it is certain whether it is among the best.

Heads are compared in pairs, on the same texts. All comparisons of a head of the true top with
another hold together at every look (the Bonferroni correction), so that a head can leave as soon as
its place is certain, as in the Hoeffding races of Maron and Moore (1994), with Student's t in the
place of a known range.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lgamma, pi
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.formatting import listed, percent, pluralise
from manyheads.lens.causal.evaluate import BatchValues

# The first look needs so many texts; each later one half as many again.
FIRST_LOOK, GROWTH = 8, 1.5
# So many texts, of equal weight, are the least that bounds are taken from.
MIN_TEXTS = 4
# A distribution with more degrees of freedom is normal for our purposes.
MAX_FREEDOM = 2000
UNTIL = re.compile(r"top\s+(\d+)(?:\s+at\s+(\d+(?:\.\d+)?)\s*%)?", re.IGNORECASE)

# Undecided heads that are named.
MAX_NAMES = 12

Floats = Float[np.ndarray, " h"]


@dataclass(frozen=True, slots=True)
class TopHeads:
    """Which heads to find: the `count` that matter most, right with this `confidence`.

    >>> TopHeads.parse("top 10 at 95 %")
    TopHeads(count=10, confidence=0.95)
    """

    count: int = 10
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"until: top {self.count} is no head", "use top 1 or more")
        if not 0.5 <= self.confidence < 1:
            raise InputError(
                f"until: the confidence must be from 50 to below 100 %, got {self}", "use 95 %"
            )

    @classmethod
    def parse(cls, text: str) -> "TopHeads":
        match = UNTIL.fullmatch(text.strip())
        if match is None:
            raise InputError(f"until={text!r} is not understood", 'write "top 10 at 95 %"')
        count, percent = match.groups()
        return cls(int(count), float(percent or 95) / 100)

    def __str__(self) -> str:
        return f"top {self.count} at {100 * self.confidence:g} %"


def look_sizes(texts: int) -> list[int]:
    """After how many texts the race looks at its intervals, the last time after all of them.

    >>> look_sizes(30), look_sizes(3)
    ([8, 12, 18, 27, 30], [3])
    """
    sizes, size = [], FIRST_LOOK
    while size < texts:
        sizes.append(size)
        size = int(size * GROWTH)
    return [*sizes, texts]


@lru_cache(maxsize=1)
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(100)


@lru_cache(maxsize=1024)
def student_quantile(tail: float, freedom: int) -> float:
    """The value that Student's t exceeds with probability `tail` below 0.5.

    >>> round(student_quantile(0.025, 9), 4), round(student_quantile(1e-5, 4), 3)
    (2.2622, 23.332)
    """
    freedom = min(freedom, MAX_FREEDOM)
    nodes, weights = _quadrature()
    scale = lgamma((freedom + 1) / 2) - lgamma(freedom / 2) - 0.5 * np.log(pi)

    def above(angle: float) -> float:
        # With t = sqrt(freedom) tan(angle) the density is a power of the cosine.
        half = (pi / 2 - angle) / 2
        cosines = np.cos(angle + half * (nodes + 1))
        return float(half * (weights * np.exp(scale + (freedom - 1) * np.log(cosines))).sum())

    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > tail else (low, middle)
    return float(np.sqrt(freedom) * np.tan(low))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weighted texts: their shares, the means of each head, and how far each value lies from them.

    `effective` is the number of texts of equal weight that would say as much (Kish).
    """

    shares: Float[np.ndarray, " b"]
    means: Floats
    away: Float[np.ndarray, "b h"]

    @classmethod
    def of(cls, values: Float[np.ndarray, "b h"], weights: Float[np.ndarray, " b"]) -> "Moments":
        shares = weights / weights.sum()
        means = shares @ values
        return cls(shares, means, values - means)

    @property
    def effective(self) -> float:
        return float(1 / np.square(self.shares).sum())

    def half_widths(
        self, errors: np.ndarray, spread: np.ndarray, third: np.ndarray, tail: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """How far the truth may lie below and above a mean; each fails with probability `tail`.

        The side of the longer tail is extended by the skewness of the values (the expansion of
        Cornish and Fisher for a studentized mean): rare large effects are missing from few texts.
        Infinite where there are too few texts.
        """
        count = self.effective
        if count < MIN_TEXTS:
            return np.full_like(errors, np.inf), np.full_like(errors, np.inf)
        skewness = third / np.fmax(spread, 1e-100) ** 1.5
        t = student_quantile(tail, int(count + 1e-9) - 1)
        extended = skewness * np.sqrt(count - 1) / (count - 2) * (2 * t**2 + 1) / 6
        return errors * (t + np.fmax(-extended, 0)), errors * (t + np.fmax(extended, 0))

    @property
    def _correction(self) -> float:
        count = int((self.shares > 0).sum())
        return count / max(1, count - 1)

    def intervals(self, tail: float) -> tuple[Floats, Floats]:
        """The lower and the upper bound of every head."""
        squares = self.away**2
        errors = np.sqrt(self.shares**2 @ squares * self._correction)
        below, above = self.half_widths(
            errors, self.shares @ squares, self.shares @ (squares * self.away), tail
        )
        return self.means - below, self.means + above

    def leads(self, tail: float) -> Float[np.ndarray, "h h"]:
        """By how much the first of two heads exceeds the second on the same texts, at least."""
        away, squares = self.away, self.away**2

        def of_differences(shares: Float[np.ndarray, " b"]) -> Float[np.ndarray, "h h"]:
            products = (shares[:, None] * away).T @ away
            own = np.diag(products)
            return np.fmax(own[:, None] + own[None] - 2 * products, 0)

        mixed, cubes = (self.shares[:, None] * squares).T @ away, self.shares @ (squares * away)
        third = cubes[:, None] - 3 * mixed + 3 * mixed.T - cubes[None]
        errors = np.sqrt(of_differences(self.shares**2) * self._correction)
        below, _ = self.half_widths(errors, of_differences(self.shares), third, tail)
        return self.means[:, None] - self.means[None] - below


class Race:
    """Which heads are certain to be among the best, and which still have to be measured.

    A larger value is better: the harm that the removal of a head does. If no comparison of a head
    of the true top with another is wrong, no decision is: a head is in once it exceeds all but the
    free places of the others, and out once as many exceed it.
    """

    def __init__(self, heads: int, texts: int, target: TopHeads) -> None:
        if target.count >= heads:
            raise InputError(
                f"until={str(target)!r} leaves nothing to find out: there are {heads} heads",
                f"use top {heads - 1} or fewer" if heads > 1 else "give several heads",
            )
        self.target, self.looks = target, look_sizes(texts)
        comparisons = target.count * (heads - target.count) * len(self.looks)
        self._tail = (1 - target.confidence) / comparisons
        self.means = np.full(heads, np.nan)
        self.low, self.high = np.full(heads, -np.inf), np.full(heads, np.inf)
        self.texts = np.zeros(heads, dtype=int)
        self.surely_in, self.surely_out = np.zeros(heads, dtype=bool), np.zeros(heads, dtype=bool)
        self._shortage = np.nan

    @property
    def decided(self) -> bool:
        return int(self.surely_in.sum()) == self.target.count

    @property
    def active(self) -> list[int]:
        """The heads that still have to be measured."""
        return [] if self.decided else np.flatnonzero(~self.surely_in & ~self.surely_out).tolist()

    def look(self, values: Float[np.ndarray, "b k"], weights: Float[np.ndarray, " b"]) -> None:
        """Take the values of the active heads on all texts so far, and decide what can be."""
        heads = np.array(self.active)
        moments = Moments.of(values, weights)
        self.means[heads], self.texts[heads] = moments.means, len(values)
        alone = (1 - self.target.confidence) / 2
        self.low[heads], self.high[heads] = moments.intervals(alone)
        leads = moments.leads(self._tail)
        exceeds = leads > 0
        free = self.target.count - int(self.surely_in.sum())
        self.surely_in[heads] = exceeds.sum(1) >= len(heads) - free
        self.surely_out[heads] = exceeds.sum(0) >= free
        # The pair at the border: how far its difference is from being certain.
        inside, outside = np.argsort(-moments.means, kind="stable")[free - 1 : free + 1]
        gap = moments.means[inside] - moments.means[outside]
        self._shortage = (gap - leads[inside, outside]) / gap if gap > 0 else np.inf

    @property
    def texts_needed(self) -> int | None:
        """About how many texts would separate the heads at the border; None if nobody can know."""
        if not np.isfinite(self._shortage):
            return None
        return int(np.ceil(self.texts.max() * self._shortage**2))

    def intervals(self, sign: float) -> dict[str, Floats]:
        """The interval of each head's change of the metric; NaN where there is none."""
        low, high = (self.low, self.high) if sign > 0 else (-self.high, -self.low)
        return {
            name: np.where(np.isfinite(bound), bound, np.nan)
            for name, bound in (("low", low), ("high", high))
        }

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """What was decided, as plain values; `names` are those of the heads."""
        order = np.argsort(-np.nan_to_num(self.means, nan=-np.inf), kind="stable").tolist()
        return {
            "until": str(self.target),
            "decided": self.decided,
            "top": [names[head] for head in order if self.surely_in[head]],
            "undecided": [names[head] for head in order if head in self.active],
            "texts_needed": None if self.decided else self.texts_needed,
        }


def verdict(race: Mapping[str, Any], texts: int) -> str:
    """The outcome of a race in a sentence, by its summary and the number of texts it has read."""
    top, rest = ", ".join(race["top"]), listed(race["undecided"], MAX_NAMES)
    if race["decided"]:
        return f"{race['until']}: {top} (measured {percent(race['measured'])} of heads x texts)"
    open_places = TopHeads.parse(race["until"]).count - len(race["top"])
    certain = f"{top} are certain, and " if top else ""
    needed = race["texts_needed"]
    about = "the heads at the border are equal" if needed is None else f"about {needed:,} would do"
    too_few = f"{pluralise(texts, 'text')} {'is' if texts == 1 else 'are'} too few"
    return (
        f"{too_few} for the {race['until']} ({about}): {certain}"
        f"{pluralise(len(race['undecided']), 'head')} compete for "
        f"{pluralise(open_places, 'place')}: {rest}"
    )


def as_target(until: TopHeads | str | None) -> TopHeads | None:
    """
    >>> as_target("top 3"), as_target(None)
    (TopHeads(count=3, confidence=0.95), None)
    """
    return TopHeads.parse(until) if isinstance(until, str) else until


def run_race(
    race: Race,
    batches: Sequence[range],
    measure: Callable[[range, list[int]], Iterator[BatchValues]],
    *,
    sign: float,
    seed: int,
) -> Iterator[BatchValues]:
    """Yield what `measure` gives for batches and the heads still in the race, until it is decided.

    Batches come in random order: the first texts of a file need not be like the rest. `sign` is 1
    where a larger value of the metric is worse, else -1.
    """
    parts: list[Float[np.ndarray, "b h"]] = []
    weights: list[Float[np.ndarray, " b"]] = []
    looks = list(race.looks)
    for index in np.random.default_rng(seed).permutation(len(batches)).tolist():
        active = race.active
        if not active:
            return
        texts = batches[index]
        harm = np.full((len(texts), len(race.means)), np.nan)
        for run in measure(texts, active):
            if not run.indices:
                baseline = run.values[0].numpy()
                weights.append(run.weights.numpy())
            else:
                harm[:, list(run.indices)] = sign * (run.values.numpy() - baseline).T
            yield run
        parts.append(harm)
        total = sum(map(len, parts))
        if total >= looks[0]:
            looks = [size for size in looks if size > total] or looks[-1:]
            race.look(np.concatenate(parts)[:, active], np.concatenate(weights))
