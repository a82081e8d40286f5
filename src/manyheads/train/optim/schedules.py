"""Schedules of the learning rate, as a factor on its peak, and of the batch size."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from manyheads.annotations import AtLeast, Between, NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError

Floor = Annotated[float, Between(0, 1, remedy="use a fraction of the peak")]
Shape = Literal["sqrt", "linear", "cosine"]


class RateSchedule(ABC):
    """A factor on the peak learning rate for every step."""

    __slots__ = ()

    def check(self, steps: int) -> None:
        """Raise if warmup and decay do not fit in this many steps."""
        parts = {name: getattr(self, name, 0) for name in ("warmup", "decay")}
        if sum(parts.values()) > steps:
            listed = [f"{name}={count}" for name, count in parts.items() if count]
            fit = "does not fit" if len(listed) == 1 else "do not fit"
            raise ConfigError(
                f"{' and '.join(listed)} {fit} in {steps} steps",
                "use more steps, or a shorter warmup and decay",
            )

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor at a step counted from zero, of `steps` steps."""

    def final_factor(self, steps: int) -> float:
        """The factor after the last step."""
        return self.factor(steps, steps)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Stable(RateSchedule):
    """The peak rate, after `warmup` steps of linear growth.

    >>> [Stable(warmup=4).factor(step, steps=10) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    warmup: NonNegativeInt = 0

    def factor(self, step: int, steps: int) -> float:
        del steps
        return _warmed(step, self.warmup)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Decay(RateSchedule):
    """From the peak rate down to `floor` of it; "sqrt" is 1 - sqrt(x) (arXiv 2405.18392).

    >>> [round(Decay().factor(step, steps=4), 2) for step in range(5)]
    [1.0, 0.5, 0.29, 0.13, 0.0]
    """

    shape: Shape = "sqrt"
    floor: Floor = 0.0

    def factor(self, step: int, steps: int) -> float:
        return _decayed(step / max(steps, 1), self.shape, self.floor)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(RateSchedule):
    """`warmup` steps of growth, then the peak rate, then `decay` steps down to `floor` of it.

    As in the code of arXiv 2405.18392 the first of the `decay` steps still has the peak rate, and
    the floor would be reached after the last one, so that no step has a rate of zero.

    >>> [round(WarmupStableDecay(decay=4).factor(step, steps=6), 2) for step in range(7)]
    [1.0, 1.0, 1.0, 0.5, 0.29, 0.13, 0.0]
    """

    warmup: NonNegativeInt = 0
    decay: Annotated[int, AtLeast(1, "use 1 or more, or Stable")]
    shape: Shape = "sqrt"
    floor: Floor = 0.0

    def factor(self, step: int, steps: int) -> float:
        if step < steps - self.decay:
            return _warmed(step, self.warmup)
        return _decayed((step - steps + self.decay) / self.decay, self.shape, self.floor)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(RateSchedule):
    """`warmup` steps of growth, then half a cosine down to `floor` (arXiv 1608.03983)."""

    warmup: NonNegativeInt = 0
    floor: Floor = 0.1

    def factor(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return _warmed(step, self.warmup)
        progress = (step - self.warmup) / max(steps - self.warmup, 1)
        return _decayed(progress, "cosine", self.floor)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(RateSchedule):
    """Linear growth, then the inverse square root of the step (arXiv 1706.03762).

    The peak of the paper is (width * warmup)^-0.5.

    >>> InverseSqrt(warmup=4).factor(15, steps=100)
    0.5
    """

    warmup: PositiveInt = 4000

    def factor(self, step: int, steps: int) -> float:
        del steps
        return min((step + 1) / self.warmup, math.sqrt(self.warmup / (step + 1)))


Schedule = Stable | Decay | WarmupStableDecay | Cosine | InverseSqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrowth:
    """Tokens per step grow from `first` to `last` by `by`, with equally many steps at each size.

    All sizes below the last use `over` tokens together, as for ModernBERT (arXiv 2412.13663):
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
                f"first={self.first} and last={self.last} do not grow", "use 0 < first < last"
            )
        if self.by < 1 or (self.last - self.first) % self.by:
            raise ConfigError(
                f"by={self.by} does not lead from {self.first} to {self.last}",
                f"use a divisor of {self.last - self.first}",
            )
        if self.over < sum(self.sizes):
            raise ConfigError(
                f"over={self.over} tokens are too few for one step at each size",
                f"use {sum(self.sizes)} or more",
            )

    @property
    def sizes(self) -> range:
        """The sizes before the last."""
        return range(self.first, self.last, self.by)

    @property
    def updates(self) -> int:
        """Steps at each size but the last."""
        return round(self.over / sum(self.sizes))

    def tokens(self, step: int) -> int:
        """Tokens of a step, counted from zero."""
        grown = step // self.updates
        return self.sizes[grown] if grown < len(self.sizes) else self.last

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""
        grown, rest = divmod(step, self.updates)
        if grown >= len(self.sizes):
            late = step - self.updates * len(self.sizes)
            return self.updates * sum(self.sizes) + late * self.last
        return self.updates * sum(self.sizes[:grown]) + rest * self.sizes[grown]

    def steps_for(self, tokens: int) -> int:
        """The number of steps for this many tokens."""
        step, used = 0, 0
        for size in self.sizes:
            needed = -(-(tokens - used) // size)
            if needed <= self.updates:
                return step + needed
            step, used = step + self.updates, used + self.updates * size
        return step + -(-(tokens - used) // self.last)


def _warmed(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _decayed(progress: float, shape: Shape, floor: float) -> float:
    progress = min(max(progress, 0.0), 1.0)
    match shape:
        case "sqrt":
            remaining = 1 - math.sqrt(progress)
        case "linear":
            remaining = 1 - progress
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
    return floor + (1 - floor) * remaining
