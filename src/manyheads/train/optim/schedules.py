"""How fast to learn, as a share of the peak, and how many tokens a step, both by the step."""

import math
from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

Shape = Literal["sqrt", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stable:
    """The whole rate, after `warmup` steps of growth.

    >>> [Stable(warmup=4).share(step, steps=10) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self.warmup, 0.0)

    def check(self, steps: int) -> None:
        _check_fits(steps, warmup=self.warmup)

    def share(self, step: int, steps: int) -> float:
        """Of the peak, at a step counted from zero; `steps` is how many there are."""
        del steps
        return _warmed(step, self.warmup)

    def ends_at(self, steps: int) -> float:
        """The share that the last step leaves behind."""
        return self.share(steps, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """From the whole rate down to `floor` of it; "sqrt" is 1 - sqrt(x) (arXiv 2405.18392).

    >>> [round(Decay().share(step, steps=4), 2) for step in range(5)]
    [1.0, 0.5, 0.29, 0.13, 0.0]
    """

    shape: Shape = "sqrt"
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check(0, self.floor)

    def check(self, steps: int) -> None:
        del steps

    def share(self, step: int, steps: int) -> float:
        return _fallen(step / max(steps, 1), self.shape, self.floor)

    def ends_at(self, steps: int) -> float:
        return self.share(steps, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay:
    """`warmup` steps of growth, then the whole rate, then `decay` steps down to `floor` of it.

    As in the code of arXiv 2405.18392 the first of the `decay` steps has the whole rate once more
    and the floor is what would come after the last, so that no step is taken at a rate of zero.

    >>> [round(WarmupStableDecay(decay=4).share(step, steps=6), 2) for step in range(7)]
    [1.0, 1.0, 1.0, 0.5, 0.29, 0.13, 0.0]
    """

    warmup: int = 0
    decay: int
    shape: Shape = "sqrt"
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check(self.warmup, self.floor)
        if self.decay < 1:
            raise ConfigError(f"decay={self.decay} steps", "use 1 or more, or the schedule Stable")

    def check(self, steps: int) -> None:
        _check_fits(steps, warmup=self.warmup, decay=self.decay)

    def share(self, step: int, steps: int) -> float:
        if step < steps - self.decay:
            return _warmed(step, self.warmup)
        return _fallen((step - steps + self.decay) / self.decay, self.shape, self.floor)

    def ends_at(self, steps: int) -> float:
        return self.share(steps, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """`warmup` steps of growth, then half a cosine down to `floor` (arXiv 1608.03983)."""

    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check(self.warmup, self.floor)

    def check(self, steps: int) -> None:
        _check_fits(steps, warmup=self.warmup)

    def share(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return _warmed(step, self.warmup)
        gone = (step - self.warmup) / max(steps - self.warmup, 1)
        return _fallen(gone, "cosine", self.floor)

    def ends_at(self, steps: int) -> float:
        return self.share(steps, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt:
    """Growth, then the inverse square root of the step, as in 2017 (arXiv 1706.03762).

    The peak of 2017 is (width * warmup)^-0.5.

    >>> InverseSqrt(warmup=4).share(15, steps=100)
    0.5
    """

    warmup: int = 4000

    def __post_init__(self) -> None:
        _check(self.warmup, 0.0)
        if not self.warmup:
            raise ConfigError("warmup=0 has no peak to fall from", "use 1 or more, 4000 in 2017")

    def check(self, steps: int) -> None:
        _check_fits(steps, warmup=self.warmup)

    def share(self, step: int, steps: int) -> float:
        del steps
        return min((step + 1) / self.warmup, math.sqrt(self.warmup / (step + 1)))

    def ends_at(self, steps: int) -> float:
        return self.share(steps, steps)


Schedule = Stable | Decay | WarmupStableDecay | Cosine | InverseSqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrowth:
    """Tokens a step that grow from `first` to `last` by `by`, with equal updates at each size.

    All sizes below the last take `over` tokens together, as for ModernBERT (arXiv 2412.13663):
    from 768 sequences to 4608 over the first 50 billion tokens.

    >>> growth = BatchGrowth(first=2, last=6, by=2, over=12)
    >>> [growth.tokens(step) for step in range(6)], growth.updates
    ([2, 2, 4, 4, 6, 6], 2)
    """

    first: int
    last: int
    by: int
    over: int

    def __post_init__(self) -> None:
        if not 0 < self.first < self.last:
            raise ConfigError(
                f"first={self.first} and last={self.last} is no growth", "use 0 < first < last"
            )
        if self.by < 1 or (self.last - self.first) % self.by:
            raise ConfigError(
                f"by={self.by} does not lead from {self.first} to {self.last}",
                f"use a divisor of {self.last - self.first}",
            )
        if self.over < sum(self.sizes):
            raise ConfigError(
                f"over={self.over} tokens are less than one update at each size",
                f"use {sum(self.sizes)} or more",
            )

    @property
    def sizes(self) -> range:
        """The sizes before the last."""
        return range(self.first, self.last, self.by)

    @property
    def updates(self) -> int:
        """At each size but the last."""
        return round(self.over / sum(self.sizes))

    def tokens(self, step: int) -> int:
        """Of the step, counted from zero."""
        grown = step // self.updates
        return self.sizes[grown] if grown < len(self.sizes) else self.last

    def tokens_before(self, step: int) -> int:
        """Of all steps before this one."""
        grown, rest = divmod(step, self.updates)
        if grown >= len(self.sizes):
            late = step - self.updates * len(self.sizes)
            return self.updates * sum(self.sizes) + late * self.last
        return self.updates * sum(self.sizes[:grown]) + rest * self.sizes[grown]

    def steps_for(self, tokens: int) -> int:
        """How many steps it takes to see so many tokens."""
        step, seen = 0, 0
        for size in self.sizes:
            needed = -(-(tokens - seen) // size)
            if needed <= self.updates:
                return step + needed
            step, seen = step + self.updates, seen + self.updates * size
        return step + -(-(tokens - seen) // self.last)


def _warmed(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _fallen(gone: float, shape: Shape, floor: float) -> float:
    gone = min(max(gone, 0.0), 1.0)
    match shape:
        case "sqrt":
            left = 1 - math.sqrt(gone)
        case "linear":
            left = 1 - gone
        case "cosine":
            left = (1 + math.cos(math.pi * gone)) / 2
    return floor + (1 - floor) * left


def _check(warmup: int, floor: float) -> None:
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} steps", "use 0 or more")
    if not 0 <= floor <= 1:
        raise ConfigError(f"floor={floor:g} is no share of the peak", "use 0 to 1")


def _check_fits(steps: int, **taken: int) -> None:
    if sum(taken.values()) > steps:
        listed = [f"{name}={count}" for name, count in taken.items() if count]
        fit = "does not fit" if len(listed) == 1 else "do not fit"
        raise ConfigError(
            f"{' and '.join(listed)} {fit} in {steps} steps",
            "give more steps or less of the others",
        )
