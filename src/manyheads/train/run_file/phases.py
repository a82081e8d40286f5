"""A run in phases: each with its own length of text, batch, data, rotary base and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import BatchGrowth, Schedule, Stable


@dataclass(frozen=True, slots=True)
class Steps:
    """So many updates."""

    count: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """As many updates as it takes to see so many tokens."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a run: texts of up to `length` tokens, `batch` tokens a step.

    `data` names what is read; "same" goes on with the data of the phase before. `rotary` is the
    base of the layers that see the whole text. The schedule's steps count from the phase's start.
    """

    name: str
    length: int
    batch: int | BatchGrowth
    lasts: Steps | Tokens
    data: str = "same"
    rotary: float | Literal["kept"] = "kept"
    schedule: Schedule = Stable()

    def __post_init__(self) -> None:
        smallest = self.batch if isinstance(self.batch, int) else self.batch.first
        if self.length < 1 or self.lasts.count < 1:
            raise ConfigError(
                f"{self.called} has length={self.length} and lasts {self.lasts}",
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
        """As errors call it: the only phase of a run is the run, and has no name."""
        return f"phase {self.name!r}" if self.name else "the run"

    @property
    def steps(self) -> int:
        if isinstance(self.lasts, Steps):
            return self.lasts.count
        if isinstance(self.batch, BatchGrowth):
            return self.batch.steps_for(self.lasts.count)
        return -(-self.lasts.count // self.batch)

    def tokens(self, step: int) -> int:
        """Of a step, counted from the phase's start."""
        return self.batch if isinstance(self.batch, int) else self.batch.tokens(step)

    def tokens_before(self, step: int) -> int:
        if isinstance(self.batch, int):
            return self.batch * step
        return self.batch.tokens_before(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standpoint:
    """Where a step of the run lies: `step` counts from the start of `phase`."""

    phase: Phase
    index: int
    step: int

    @property
    def share(self) -> float:
        """Of the peak learning rate."""
        return self.phase.schedule.share(self.step, self.phase.steps)

    @property
    def tokens(self) -> int:
        """Of this step."""
        return self.phase.tokens(self.step)

    @property
    def last(self) -> bool:
        """Whether the phase ends with this step."""
        return self.step == self.phase.steps - 1


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases one after another.

    >>> base = Phase(name="base", length=64, batch=512, lasts=Tokens(5120), data="web")
    >>> long = Phase(name="long", length=256, batch=512, lasts=Steps(5), rotary=160_000.0)
    >>> phases = Phases((base, long))
    >>> phases.steps, phases.at(12).phase.name, phases.at(12).step
    (15, 'long', 2)
    """

    each: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.each:
            raise ConfigError("a run without phases has nothing to do", "give one phase")
        names = [phase.name for phase in self.each]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{names.count(name)} phases are called {name!r}", "rename one")
        if self.each[0].data == "same":
            raise ConfigError(
                f"the first phase {names[0]!r} has no data to go on with", "give its data"
            )
        for one, other in pairwise(self.each):
            _check_change(one, other)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.each)

    @property
    def tokens(self) -> int:
        return self.tokens_before(self.steps)

    def at(self, step: int) -> Standpoint:
        """Where this step of the run lies, counted from zero."""
        starts = self.starts
        if not 0 <= step < self.steps:
            raise ConfigError(f"there is no step {step}", f"use 0 to {self.steps - 1}")
        index = sum(start <= step for start in starts) - 1
        return Standpoint(phase=self.each[index], index=index, step=step - starts[index])

    def tokens_before(self, step: int) -> int:
        """Tokens asked for by all steps before this one."""
        asked = [min(max(step - start, 0), phase.steps) for start, phase in self._started()]
        return sum(phase.tokens_before(n) for phase, n in zip(self.each, asked, strict=True))

    def data(self, index: int) -> str:
        """What the phase of this index reads."""
        return next(phase.data for phase in self.each[index::-1] if phase.data != "same")

    @property
    def starts(self) -> Sequence[int]:
        """The first step of each phase."""
        return [0, *accumulate(phase.steps for phase in self.each[:-1])]

    def _started(self) -> list[tuple[int, Phase]]:
        return list(zip(self.starts, self.each, strict=True))


def _check_change(one: Phase, other: Phase) -> None:
    """Refuse a leap of the learning rate, which spoils what a decay has won."""
    left, begins = one.schedule.ends_at(one.steps), other.schedule.share(0, other.steps)
    if begins > max(2 * left, 0.5):
        raise ConfigError(
            f"phase {other.name!r} begins at {begins:.2g} of the rate where {one.name!r} "
            f"has ended at {left:.2g}",
            f"give {other.name!r} a warmup, or decay later",
        )
