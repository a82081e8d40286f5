"""One phase of a run, ready to train: what the loop of `train` does after each of its steps."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from manyheads.errors import TrainingError
from manyheads.train.loop import evaluation, reporting
from manyheads.train.loop.checkpoint import Checkpoints, SkippedStep, TrainingState, state_tensors
from manyheads.train.loop.train_step import MAX_SKIPPED, PreparedStep, StepOutcome, Updater
from manyheads.train.run_file.run_config import Run


@dataclass(slots=True, kw_only=True)
class PhaseTrainer:
    """A model with its optimizer and data, and the evaluations and checkpoints that are due.

    `steps` are the batches up to step `end` of the run; the checkpoints of `milestones` are kept.
    `peak_fraction` is the fraction of the device's peak speed at one token per second, 0 if the
    peak is unknown.
    """

    run: Run
    end: int
    milestones: frozenset[int]
    updater: Updater
    steps: Iterator[PreparedStep]
    validation: tuple[evaluation.Validation, ...]
    probe: evaluation.Probe | None
    reporter: reporting.Reporter
    checkpoints: Checkpoints
    peak_fraction: float
    speed: reporting.Speed = field(default_factory=reporting.Speed)

    def __post_init__(self) -> None:
        # The time of the first step counts from here.
        self.speed.add(0)

    def record(
        self, state: TrainingState, step: PreparedStep, outcome: StepOutcome
    ) -> TrainingState:
        """The state after a step, which is logged; an error if too many steps were not finite."""
        state = replace(
            state,
            step=state.step + 1,
            tokens=state.tokens + step.tokens,
            position=asdict(step.after),
            consecutive_skips=0 if outcome.finite else state.consecutive_skips + 1,
        )
        if not outcome.finite:
            skipped = SkippedStep(state.step, outcome.nonfinite)
            state = replace(state, skipped=(*state.skipped, skipped))
        self.speed.add(step.tokens)
        self._report(state, outcome, step.shares)
        if state.consecutive_skips >= MAX_SKIPPED:
            self._refuse(state)
        return state

    def _report(
        self, state: TrainingState, outcome: StepOutcome, shares: Mapping[str, float]
    ) -> None:
        utilization = self.speed.tokens * self.peak_fraction
        self.reporter.display.step(state.step, outcome.loss, self.speed, utilization)
        if not outcome.finite:
            self.reporter.display.message(
                f"loss or gradient not finite at {state.skipped[-1]}: the step is skipped"
            )
        elif state.step % self.run.run.log_every:
            return
        line = {
            "step": state.step,
            "tokens": state.tokens,
            "loss": outcome.loss,
            "parts": dict(outcome.parts),
            "rate": self.run.optimizer.lr * self.run.phases.lr_factor(state.step - 1),
            "norm": outcome.norm,
            "tokens_per_second": round(self.speed.tokens, 1),
        }
        if shares:
            line["shares"] = {name: round(share, 4) for name, share in shares.items()}
        if utilization:
            line["fraction_of_peak"] = round(utilization, 4)
        if not outcome.finite:
            line["skipped"] = list(outcome.nonfinite)
        self.reporter.write(line)

    def _refuse(self, state: TrainingState) -> None:
        self.checkpoints.wait()
        good = self.checkpoints.newest_good(state)
        remedy = "lower the learning rate, or check the data there"
        if good is not None:
            remedy += f", and resume with --from {good.name}, which a finite step followed"
        listed = ", ".join(map(str, state.skipped[-MAX_SKIPPED:]))
        raise TrainingError(
            f"loss or gradient not finite in {MAX_SKIPPED} consecutive steps: {listed}", remedy
        )

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept for good."""
        return step in self.milestones or _is_due(self.run.run.keep_every, step)

    def saves(self, step: int) -> bool:
        return self.keeps(step) or _is_due(self.run.run.checkpoint_every, step)

    def validates(self, step: int) -> bool:
        due = _is_due(self.run.run.validate_every, step) or step == self.end
        return bool(self.validation) and due

    def watches(self, step: int) -> bool:
        return self.probe is not None and _is_due(self.run.run.telemetry_every, step)

    def pauses(self, step: int) -> bool:
        """Whether the weights after this step are evaluated or saved."""
        return self.saves(step) or self.validates(step) or self.watches(step)

    def catch_up(self, step: int) -> bool:
        """Evaluate what an interrupted run had no time for, so that nothing is missing."""
        if not step:
            return False
        logged = self.reporter.metrics.has_entry(step, "validation")
        both = logged, self.reporter.telemetry.has_entry(step)
        validated, watched = self.updater.processes.broadcast(both)
        return self.evaluate(step, validated=validated, watched=watched)

    def evaluate(self, step: int, *, validated: bool = False, watched: bool = False) -> bool:
        """Validate and record telemetry when due; returns whether an interrupt ended it."""
        if self.validates(step) and not validated:
            results = {}
            for validation in self.validation:
                result = results[validation.name] = validation.run(self.updater.wrapper)
                if "fraction" in result:
                    # Only a part was validated: a resumed run validates all of it.
                    return True
            self.reporter.validation(step, results)
        if self.probe is not None and self.watches(step) and not watched:
            watcher = evaluation.HeadWatcher(self.probe)
            self.updater.wrapper.evaluate(lambda model: watcher.probe.run(model, watcher))
            for line in watcher.lines():
                self.reporter.write_heads({"step": step, **line})
        return False

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint in the background, unless there is one of this step."""
        tensors, numbers = state_tensors(self.updater.wrapper.model, self.updater.optimizer)
        self.checkpoints.save(tensors, replace(state, kept=self.keeps(state.step), numbers=numbers))

    def finish(self, state: TrainingState) -> None:
        """Save the last checkpoint, and wait until it is on the disk."""
        self.save(state)
        self.checkpoints.wait()
        self.reporter.flush()


def _is_due(every: int, step: int) -> bool:
    """Whether something is due that happens every so many steps; 0 means never."""
    return every > 0 and step % every == 0
