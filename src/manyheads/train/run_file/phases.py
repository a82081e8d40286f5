"""The phases of a run: each with its own data, length, rotary base and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import BatchGrowth, Schedule, Stable
from manyheads.train.run_file.data_config import Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a run: `steps` optimizer steps, or as many as it takes to see `tokens`.

    `rotary` is the rotary base of the layers with global attention. The steps of the schedule count
    from the start of the phase.
    """

    name: str = ""
    steps: int = 0
    tokens: int = 0
    data: Data
    schedule: Schedule = Stable()
    rotary: float | Literal["kept"] = "kept"

    def __post_init__(self) -> None:
        if bool(self.steps) == bool(self.tokens) or min(self.steps, self.tokens) < 0:
            raise ConfigError(
                f"a phase needs either steps or tokens, got steps={self.steps} and "
                f"tokens={self.tokens}",
                "set one of them, above 0",
            )
        if self.rotary != "kept" and self.rotary <= 1:
            raise ConfigError(
                f"rotary must be above 1, got {self.rotary:g}", 'use a larger base, or "kept"'
            )
        self.schedule.check(self.step_count)

    @property
    def step_count(self) -> int:
        """The number of optimizer steps."""
        batch = self.data.batch
        if self.steps:
            return self.steps
        if isinstance(batch, BatchGrowth):
            return batch.steps_for(self.tokens)
        return -(-self.tokens // batch)

    def lr_factor(self, step: int) -> float:
        """The factor on the peak learning rate, at a step counted from the start of the phase."""
        return self.schedule.factor(step, self.step_count)


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases one after another."""

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
        for before, after in pairwise(self.each):
            # A learning rate that jumps up between phases undoes a decay.
            end, start = before.schedule.final_factor(before.step_count), after.lr_factor(0)
            if start > max(2 * end, 0.5):
                raise ConfigError(
                    f"phase {after.name!r} starts at {start:.2g} of the peak learning rate, and "
                    f"{before.name!r} ends at {end:.2g}",
                    f"give {after.name!r} a warmup, or decay later",
                )

    @property
    def step_count(self) -> int:
        return sum(phase.step_count for phase in self.each)

    @property
    def starts(self) -> Sequence[int]:
        """The first step of each phase."""
        return [0, *accumulate(phase.step_count for phase in self.each[:-1])]

    def locate(self, step: int) -> tuple[Phase, int]:
        """The phase of a step of the run, and the number of the step in it, from zero."""
        if not 0 <= step < self.step_count:
            raise ConfigError(f"there is no step {step}", f"use 0 to {self.step_count - 1}")
        starts = self.starts
        index = sum(start <= step for start in starts) - 1
        return self.each[index], step - starts[index]

    def lr_factor(self, step: int) -> float:
        """The factor on the peak learning rate at a step of the run."""
        phase, step = self.locate(step)
        return phase.lr_factor(step)

    def milestones(self, index: int) -> frozenset[int]:
        """The end of a phase, and the end of its last plateau, if several steps are on it.

        The plateau is where the learning rate is at the phase's peak.
        """
        phase, start = self.each[index], self.starts[index]
        factors = [phase.lr_factor(step) for step in range(phase.step_count)]
        peak = max(factors)
        full = [step for step, factor in enumerate(factors) if factor == peak]
        plateau = {start + full[-1] + 1} if len(full) > 1 else set()
        return frozenset({start + phase.step_count, *plateau})
