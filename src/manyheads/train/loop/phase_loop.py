"""The steps of one phase: update, log, validate, record telemetry, save checkpoints."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from manyheads.data.stream import StreamStep
from manyheads.errors import TrainingError
from manyheads.models.build import Model
from manyheads.train.distributed import ProcessGroup
from manyheads.train.interrupt import InterruptHandler
from manyheads.train.loop.checkpoint import Checkpoints, SkippedStep, TrainingState, state_tensors
from manyheads.train.loop.evaluation import HeadWatcher, Probe, Validation
from manyheads.train.loop.reporting import Display, MetricsLog, Speed, TensorBoardWriter
from manyheads.train.loop.train_step import (
    MAX_SKIPPED,
    PendingOutcome,
    PreparedStep,
    StepOutcome,
    Updater,
)
from manyheads.train.run_file.run_config import RunOptions


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step that was started, and its learning rate."""

    step: StreamStep
    rate: float
    pending: PendingOutcome


@dataclass(slots=True, kw_only=True)
class Loop:
    """One phase of a run, from its current step to its last.

    `rate` sets the learning rates of a step and returns the one to log. `milestones` are steps
    whose checkpoints are always kept: the end of the phase, and the last step at the full rate.
    `stopped` is true after an interrupt.
    """

    updater: Updater
    rate: Callable[[int], float]
    checkpoints: Checkpoints
    metrics: MetricsLog
    telemetry: MetricsLog
    board: TensorBoardWriter | None
    display: Display
    validation: Validation | None
    probe: Probe | None
    options: RunOptions
    milestones: frozenset[int]
    stop: InterruptHandler
    processes: ProcessGroup
    flops_per_token: float
    peak_flops: float
    stopped: bool = False

    def run(self, steps: Iterator[PreparedStep], state: TrainingState, end: int) -> TrainingState:
        """Train up to step `end` or an interrupt, and save a checkpoint."""
        speed = Speed()
        speed.add(0)
        self.updater.wrapper.model.train()
        pending: deque[_PendingStep] = deque()
        self._catch_up(state.step, end)
        while state.step + len(pending) < end and not self.stopped:
            number = state.step + len(pending) + 1
            prepared, rate = next(steps), self.rate(number - 1)
            outcome_of = self.updater.begin(prepared, stop=self.stop.requested)
            pending.append(_PendingStep(prepared.step, rate, outcome_of))
            # The host reads the outcome of a step while the device computes the next one, unless
            # the weights are needed in between.
            left = 1 if self.updater.ahead and not self._pauses(number, end) else 0
            while len(pending) > left:
                state, ends = self._finish_step(pending.popleft(), state, speed)
                if ends:
                    self.stopped, left = True, 0
            if pending:
                continue
            self._evaluate(state.step, end)
            if self.stopped or state.step == end or self._saves(state.step):
                self.save(state)
        self.checkpoints.wait()
        if self.board is not None:
            self.board.close()
        return state

    def _finish_step(
        self, one: _PendingStep, state: TrainingState, speed: Speed
    ) -> tuple[TrainingState, bool]:
        """Log a step once its outcome is known; returns the new state and whether to stop."""
        outcome = one.pending.outcome()
        state = _after(state, one.step, outcome)
        speed.add(one.step.tokens)
        self._report(state, outcome, one.rate, speed)
        self._check(state)
        return state, outcome.stop

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint in the background."""
        tensors, numbers = self._state()
        kept = state.step in self.milestones or _is_due(self.options.keep_every, state.step)
        self.checkpoints.save(tensors, replace(state, kept=kept, numbers=numbers))

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return state_tensors(self.updater.wrapper.model, self.updater.optimizer)

    def _saves(self, step: int) -> bool:
        options = self.options
        every = (options.checkpoint_every, options.keep_every)
        return step in self.milestones or any(_is_due(each, step) for each in every)

    def _pauses(self, step: int, end: int) -> bool:
        """Whether the weights after this step are evaluated or saved."""
        options = self.options
        every = (options.validate_every, options.telemetry_every)
        return step == end or self._saves(step) or any(_is_due(each, step) for each in every)

    def _report(
        self, state: TrainingState, outcome: StepOutcome, rate: float, speed: Speed
    ) -> None:
        utilization = 0.0
        if self.peak_flops:
            utilization = (
                speed.tokens * self.flops_per_token / (self.peak_flops * self.processes.world_size)
            )
        self.display.step(state.step, outcome.loss, speed, utilization)
        if not outcome.finite:
            self.display.message(
                f"loss or gradient not finite at {state.skipped[-1]}: the step is skipped"
            )
        if not outcome.finite or _is_due(self.options.log_every, state.step):
            line = {
                "step": state.step,
                "tokens": state.tokens,
                "loss": outcome.loss,
                "parts": dict(outcome.parts),
                "rate": rate,
                "norm": outcome.norm,
                "tokens_per_second": round(speed.tokens, 1),
            }
            if utilization:
                line["fraction_of_peak"] = round(utilization, 4)
            if not outcome.finite:
                line["skipped"] = list(outcome.nonfinite)
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.metrics.write(line)
        if self.board is not None:
            self.board.write(line)

    def _check(self, state: TrainingState) -> None:
        if state.consecutive_skips < MAX_SKIPPED:
            return
        self.checkpoints.wait()
        last = ", ".join(map(str, state.skipped[-MAX_SKIPPED:]))
        good = self.checkpoints.newest_good(state)
        remedy = "lower the learning rate, or check the data there"
        if good is not None:
            remedy += f", and resume with --from {good.name}, which a finite step followed"
        raise TrainingError(
            f"loss or gradient not finite in {MAX_SKIPPED} consecutive steps: {last}", remedy
        )

    def _catch_up(self, step: int, end: int) -> None:
        """Evaluate what an interrupted run had no time for, so that nothing is missing."""
        if not step:
            return
        validated, watched = self.processes.broadcast(
            (self.metrics.has_entry(step, "validation"), self.telemetry.has_entry(step))
        )
        if self._validates(step, end) and not validated:
            self._validate(step)
        if self._watches(step) and not watched and not self.stopped:
            self._watch(step)

    def _evaluate(self, step: int, end: int) -> None:
        """Validate and record telemetry when due, unless interrupted."""
        if self._validates(step, end) and not self.stopped:
            self._validate(step)
        if self._watches(step) and not self.stopped:
            self._watch(step)

    def _validates(self, step: int, end: int) -> bool:
        due = _is_due(self.options.validate_every, step) or step == end
        return self.validation is not None and due

    def _watches(self, step: int) -> bool:
        return self.probe is not None and _is_due(self.options.telemetry_every, step)

    def _validate(self, step: int) -> None:
        assert self.validation is not None
        result = self.validation.run(self.updater.wrapper)
        if "fraction" in result:
            # Only a part was validated: a resumed run validates all of it.
            self.stopped = True
            return
        self._write({"step": step, "validation": result})
        listed = ", ".join(
            f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.items()
        )
        self.display.message(f"step {step:,}, validation {listed}")

    def _watch(self, step: int) -> None:
        assert self.probe is not None
        probe, watcher = self.probe, HeadWatcher(self.probe)

        def work(model: Model) -> None:
            probe.run(model, watcher)

        self.updater.wrapper.evaluate(work)
        for line in watcher.lines():
            self.telemetry.write({"step": step, **line})
            if self.board is not None:
                self.board.write_heads({"step": step, **line})


def _is_due(every: int, step: int) -> bool:
    """Whether something is due that happens every so many steps; 0 means never."""
    return every > 0 and step % every == 0


def _after(state: TrainingState, step: StreamStep, outcome: StepOutcome) -> TrainingState:
    """The state after a step, taken or skipped."""
    moved = replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + step.tokens,
        position=asdict(step.after),
    )
    if outcome.finite:
        return replace(moved, consecutive_skips=0)
    skipped = SkippedStep(moved.step, outcome.nonfinite)
    return replace(
        moved, skipped=(*moved.skipped, skipped), consecutive_skips=moved.consecutive_skips + 1
    )
