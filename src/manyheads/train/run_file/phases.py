"""The phases of a run: each with its own text length, batch, data, rotary base and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import BatchGrowth, Schedule, Stable


@dataclass(frozen=True, slots=True)
class StepCount:
    """A number of optimiser steps."""

    count: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """As many optimiser steps as it takes to see this many tokens."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a run: texts of up to `length` tokens, `batch` tokens per step.

    `data` is a name; "same" continues with the data of the phase before. `rotary` is the base of
    the layers with global attention. The schedule's steps count from the start of the phase.
    """

    name: str
    length: int
    batch: int | BatchGrowth
    duration: StepCount | TokenCount
    data: str = "same"
    rotary: float | Literal["kept"] = "kept"
    schedule: Schedule = Stable()

    def __post_init__(self) -> None:
        smallest = self.batch if isinstance(self.batch, int) else self.batch.first
        if self.length < 1 or self.duration.count < 1:
            raise ConfigError(
                f"{self.called} has length={self.length} and duration={self.duration}",
                "use 1 or more of each",
            )
        if smallest < self.length:
            raise ConfigError(
                f"{self.called} has texts of {self.length} tokens and a batch of {smallest}",
                f"use a batch of {self.length} tokens or more",
            )
        if self.rotary != "kept" and self.rotary <= 1:
            raise ConfigError(
                f"{self.called} has rotary={self.rotary:g}", 'use a base above 1, or "kept"'
            )
        try:
            self.schedule.check(self.steps)
        except ConfigError as error:
            raise ConfigError(f"{self.called}: {error.problem}", error.remedy) from None

    @property
    def called(self) -> str:
        """Its name in error messages; the only phase of a run has none."""
        return f"phase {self.name!r}" if self.name else "the run"

    @property
    def steps(self) -> int:
        if isinstance(self.duration, StepCount):
            return self.duration.count
        if isinstance(self.batch, BatchGrowth):
            return self.batch.steps_for(self.duration.count)
        return -(-self.duration.count // self.batch)

    def tokens(self, step: int) -> int:
        """Tokens of a step, counted from the start of the phase."""
        return self.batch if isinstance(self.batch, int) else self.batch.tokens(step)

    def tokens_before(self, step: int) -> int:
        if isinstance(self.batch, int):
            return self.batch * step
        return self.batch.tokens_before(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStep:
    """A step of a run: `step` counts from the start of `phase`."""

    phase: Phase
    index: int
    step: int

    @property
    def rate_factor(self) -> float:
        """The factor on the peak learning rate."""
        return self.phase.schedule.factor(self.step, self.phase.steps)

    @property
    def tokens(self) -> int:
        """Tokens of this step."""
        return self.phase.tokens(self.step)

    @property
    def last(self) -> bool:
        """Whether the phase ends with this step."""
        return self.step == self.phase.steps - 1


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases one after another.

    >>> base = Phase(name="base", length=64, batch=512, duration=TokenCount(5120), data="web")
    >>> long = Phase(name="long", length=256, batch=512, duration=StepCount(5), rotary=160_000.0)
    >>> phases = Phases((base, long))
    >>> phases.steps, phases.at(12).phase.name, phases.at(12).step
    (15, 'long', 2)
    """

    each: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.each:
            raise ConfigError("a run needs at least one phase", "add a phase")
        names = [phase.name for phase in self.each]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} phases are called {name!r}", "rename one of them"
                )
        if self.each[0].data == "same":
            raise ConfigError(f"the first phase {names[0]!r} has no data", "set its data")
        for one, other in pairwise(self.each):
            _check_change(one, other)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.each)

    @property
    def tokens(self) -> int:
        return self.tokens_before(self.steps)

    def at(self, step: int) -> PhaseStep:
        """The phase of a step of the run, counted from zero."""
        starts = self.starts
        if not 0 <= step < self.steps:
            raise ConfigError(f"there is no step {step}", f"use 0 to {self.steps - 1}")
        index = sum(start <= step for start in starts) - 1
        return PhaseStep(phase=self.each[index], index=index, step=step - starts[index])

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""
        counts = [min(max(step - start, 0), phase.steps) for start, phase in self._started()]
        return sum(phase.tokens_before(n) for phase, n in zip(self.each, counts, strict=True))

    def data(self, index: int) -> str:
        """The name of the data of a phase."""
        return next(phase.data for phase in self.each[index::-1] if phase.data != "same")

    @property
    def starts(self) -> Sequence[int]:
        """The first step of each phase."""
        return [0, *accumulate(phase.steps for phase in self.each[:-1])]

    def _started(self) -> list[tuple[int, Phase]]:
        return list(zip(self.starts, self.each, strict=True))


def _check_change(one: Phase, other: Phase) -> None:
    """Raise if the learning rate jumps up between phases, which undoes a decay."""
    left, begins = one.schedule.final_factor(one.steps), other.schedule.factor(0, other.steps)
    if begins > max(2 * left, 0.5):
        raise ConfigError(
            f"phase {other.name!r} starts at {begins:.2g} of the peak learning rate, and "
            f"{one.name!r} ends at {left:.2g}",
            f"give {other.name!r} a warmup, or decay later",
        )
