"""The steps of one phase: update, tell, validate, look at the heads, save."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from manyheads.data.stream import Step
from manyheads.errors import TrainingError
from manyheads.models.build import Model
from manyheads.train.distributed import Crew
from manyheads.train.interrupt import Stop
from manyheads.train.loop.checkpoint import Checkpoints, Skipped, Standing, tensors_of
from manyheads.train.loop.metrics_log import Board, Journal
from manyheads.train.loop.telemetry import HeadWatcher, Probe
from manyheads.train.loop.train_step import Asked, Outcome, Underway, Updater
from manyheads.train.loop.training_report import Display, Speed
from manyheads.train.loop.validation import Validation

# So many steps in a row without a number for a loss end a run.
MOST_SKIPPED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What is done every so many steps; 0 means never."""

    checkpoint_every: int = 0
    keep_every: int = 0
    validate_every: int = 0
    telemetry_every: int = 0
    log_every: int = 1

    @staticmethod
    def due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was begun, and the learning rate it has."""

    step: Step
    rate: float
    underway: Underway


@dataclass(slots=True, kw_only=True)
class Loop:
    """One phase of a run, from where it stands to its last step.

    `rate` sets the learning rates of a step and gives the one to report. `marked` are steps whose
    checkpoints are kept for good: the end of the phase, and the last step at the full rate.
    `stopped` is set once somebody asked to stop.
    """

    updater: Updater
    rate: Callable[[int], float]
    checkpoints: Checkpoints
    metrics: Journal
    telemetry: Journal
    board: Board | None
    display: Display
    validation: Validation | None
    probe: Probe | None
    habits: Habits
    marked: frozenset[int]
    stop: Stop
    crew: Crew
    operations: float
    peak: float
    stopped: bool = False

    def run(self, steps: Iterator[Asked], standing: Standing, end: int) -> Standing:
        """Train up to step `end`, or until somebody asks to stop, and leave a checkpoint."""
        speed = Speed()
        speed.add(0)
        self.updater.entrance.model.train()
        begun: deque[_Begun] = deque()
        self._catch_up(standing.step, end)
        while standing.step + len(begun) < end and not self.stopped:
            number = standing.step + len(begun) + 1
            asked, rate = next(steps), self.rate(number - 1)
            underway = self.updater.begin(asked, stop=self.stop.asked)
            begun.append(_Begun(asked.step, rate, underway))
            # The host reads what a step came to while the device is at the next, unless there is
            # something to do with the weights between them.
            left = 1 if self.updater.ahead and not self._pauses(number, end) else 0
            while len(begun) > left:
                standing, ends = self._settle(begun.popleft(), standing, speed)
                if ends:
                    self.stopped, left = True, 0
            if begun:
                continue
            self._look(standing.step, end)
            if self.stopped or standing.step == end or self._saves(standing.step):
                self.save(standing)
        self.checkpoints.wait()
        if self.board is not None:
            self.board.close()
        return standing

    def _settle(self, one: _Begun, standing: Standing, speed: Speed) -> tuple[Standing, bool]:
        """Where the run stands after a step, once its outcome is known, and whether to stop."""
        outcome = one.underway.outcome()
        standing = _after(standing, one.step, outcome)
        speed.add(one.step.tokens)
        self._tell(standing, outcome, one.rate, speed)
        self._check(standing)
        return standing, outcome.stop

    def save(self, standing: Standing) -> None:
        """A snapshot of everything, written while the work goes on."""
        tensors, numbers = self._state()
        kept = standing.step in self.marked or Habits.due(self.habits.keep_every, standing.step)
        self.checkpoints.save(tensors, replace(standing, kept=kept, numbers=numbers))

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return tensors_of(self.updater.entrance.model, self.updater.optimiser)

    def _saves(self, step: int) -> bool:
        habits = self.habits
        every = (habits.checkpoint_every, habits.keep_every)
        return step in self.marked or any(Habits.due(each, step) for each in every)

    def _pauses(self, step: int, end: int) -> bool:
        """Whether the weights after this step are looked at or kept."""
        habits = self.habits
        every = (habits.validate_every, habits.telemetry_every)
        return step == end or self._saves(step) or any(Habits.due(each, step) for each in every)

    def _tell(self, standing: Standing, outcome: Outcome, rate: float, speed: Speed) -> None:
        share = 0.0
        if self.peak:
            share = speed.tokens * self.operations / (self.peak * self.crew.world)
        self.display.step(standing.step, outcome.loss, speed, share)
        if not outcome.sound:
            self.display.say(f"no number at {standing.skipped[-1]}: nothing learnt from it")
        if not outcome.sound or Habits.due(self.habits.log_every, standing.step):
            line = {
                "step": standing.step,
                "tokens": standing.tokens,
                "loss": outcome.loss,
                "parts": dict(outcome.parts),
                "rate": rate,
                "norm": outcome.norm,
                "tokens_per_second": round(speed.tokens, 1),
            }
            if share:
                line["share_of_peak"] = round(share, 4)
            if not outcome.sound:
                line["skipped"] = list(outcome.broken)
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.metrics.write(line)
        if self.board is not None:
            self.board.write(line)

    def _check(self, standing: Standing) -> None:
        if standing.in_a_row < MOST_SKIPPED:
            return
        self.checkpoints.wait()
        last = ", ".join(map(str, standing.skipped[-MOST_SKIPPED:]))
        good = self.checkpoints.newest()
        remedy = "lower the rate, or look at the data there"
        if good is not None:
            remedy += f", and go on with --from {good.name}, which is whole"
        raise TrainingError(f"{MOST_SKIPPED} steps in a row gave no number: {last}", remedy)

    def _catch_up(self, step: int, end: int) -> None:
        """Look at what a run that was stopped had no time for, so that nothing is missing."""
        if not step:
            return
        validated, watched = self.crew.agree(
            (self.metrics.tells(step, "validation"), self.telemetry.tells(step))
        )
        if self._validates(step, end) and not validated:
            self._validate(step)
        if self._watches(step) and not watched and not self.stopped:
            self._watch(step)

    def _look(self, step: int, end: int) -> None:
        """Validate and watch the heads where it is time to, unless somebody asked to stop."""
        if self._validates(step, end) and not self.stopped:
            self._validate(step)
        if self._watches(step) and not self.stopped:
            self._watch(step)

    def _validates(self, step: int, end: int) -> bool:
        asked = Habits.due(self.habits.validate_every, step) or step == end
        return self.validation is not None and asked

    def _watches(self, step: int) -> bool:
        return self.probe is not None and Habits.due(self.habits.telemetry_every, step)

    def _validate(self, step: int) -> None:
        assert self.validation is not None
        found = self.validation.run(self.updater.entrance)
        if "share" in found:
            # Of some of the texts it would be another number, so all are seen when the run goes on.
            self.stopped = True
            return
        self._write({"step": step, "validation": found})
        said = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
        self.display.say(f"step {step:,}, validation {said}")

    def _watch(self, step: int) -> None:
        assert self.probe is not None
        probe, watcher = self.probe, HeadWatcher(self.probe)

        def work(model: Model) -> None:
            probe.run(model, watcher)

        self.updater.entrance.look(work)
        for line in watcher.lines():
            self.telemetry.write({"step": step, **line})


def _after(standing: Standing, step: Step, outcome: Outcome) -> Standing:
    """Where the run stands when a step is done, or skipped."""
    moved = replace(
        standing,
        step=standing.step + 1,
        tokens=standing.tokens + step.tokens,
        place=asdict(step.after),
    )
    if outcome.sound:
        return replace(moved, in_a_row=0)
    skipped = Skipped(moved.step, outcome.broken)
    return replace(moved, skipped=(*moved.skipped, skipped), in_a_row=moved.in_a_row + 1)
