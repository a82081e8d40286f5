"""A whole run: checked, started or taken up again, phase after phase, saved as a model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from manyheads.checkpoints.folder import Saved
from manyheads.data.prefetch import prefetched
from manyheads.data.stream import Position, Stream
from manyheads.devices import device_of
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model
from manyheads.train.distributed import Crew, crew
from manyheads.train.interrupt import Stop
from manyheads.train.loop.checkpoint import (
    Checkpoints,
    Standing,
    check_stored,
    read_standing,
    restore,
)
from manyheads.train.loop.loop import Habits, Loop
from manyheads.train.loop.metrics_log import Board, Journal
from manyheads.train.loop.model_setup import (
    check_fits,
    export,
    first_model,
    name_as,
    ranged,
    tell_habits,
    tokenizer_of,
)
from manyheads.train.loop.model_wrapper import Entrance, layers_of
from manyheads.train.loop.run_folder import RunFolder, check_same, check_space
from manyheads.train.loop.telemetry import SEQUENCES, Probe, make_probe
from manyheads.train.loop.train_step import Updater, goes_ahead
from manyheads.train.loop.train_step import asked as asked_of
from manyheads.train.loop.training_report import Display, advice, operations, peak, quiet
from manyheads.train.loop.validation import Validation
from manyheads.train.objectives import CausalLM, Contrastive, Objective
from manyheads.train.optim.param_groups import set_rate
from manyheads.train.regularisers import Regularised
from manyheads.train.run_file.data_config import Data, Fed, Texts, without_place
from manyheads.train.run_file.phases import Phases
from manyheads.train.run_file.run_config import Run, phases_of
from manyheads.train.tiling import raise_rotary, with_rotary

# How many times as fast a run may learn again before it is told.
JUMP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended: at its last step with a model saved, or earlier because it was asked to.

    Of several processes one `tells`.
    """

    standing: Standing
    saved: Saved | None
    code: int = 0
    tells: bool = True
    unit: str = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surgery:
    """What is done to a model before it is trained, and how it is left instead of saved whole."""

    open: Callable[[Model], Model]
    close: Callable[[Model, Path], Saved]


def train(
    run: Run,
    *,
    since: str = "",
    fresh: bool = False,
    shown: bool = True,
    surgery: Surgery | None = None,
) -> Finished:
    """Start a run, or go on with it where its newest checkpoint is.

    `since` names another checkpoint to go on from, of this run or a path to one of another; `fresh`
    begins anew. Whatever is in the way is set aside in the run's folder.
    """
    device = str(device_of(run.run.device, "run.device"))
    for data in run.data:
        data.check()
    quiet()
    with crew(run.run.distributed, device) as members, Stop() as stop:
        session = _Session(run, members, stop, shown and members.leads, surgery)
        return session.run(since, fresh)


class _Session:
    """What the phases of a run share."""

    def __init__(
        self, run: Run, crew: Crew, stop: Stop, shown: bool, surgery: Surgery | None
    ) -> None:
        self.asked, self.crew, self.stop, self.surgery = run, crew, stop, surgery
        self.objective = run.whole_objective
        self.folder = RunFolder(run.run.folder)
        self.checkpoints = Checkpoints(self.folder.checkpoints, crew, run.run.keep)
        self.display = Display(run.ends[-1], shown, run.unit)
        self.metrics = Journal(self.folder.metrics, writes=crew.leads)
        self.telemetry = Journal(self.folder.telemetry, writes=crew.leads)

    def run(self, since: str, fresh: bool) -> Finished:
        model = self._first_model()
        self._check(model)
        origin = self.folder.origin(since, self.checkpoints, fresh=fresh)
        standing = self._standing(origin, since, model)
        with self.folder.owned(self.crew):
            self._prepare(standing, fresh=fresh or bool(since))
            return self._to_the_end(model, origin, standing)

    def _to_the_end(self, model: Model, origin: Path | None, standing: Standing) -> Finished:
        if self.surgery is None:
            for line in advice(model, self.crew.device, half=self.asked.run.half):
                self.display.say(line)
        ends, first = self.asked.ends, self._first_phase(standing.step)
        for index in range(first, len(ends)):
            if index > first:
                # What one phase ended with is what the next starts with.
                model, origin = self._first_model(), self.checkpoints.newest()
            entrance, standing, stopped = self._phase(index, model, origin, standing)
            if stopped:
                code, tells = self.stop.code, self.crew.leads
                return Finished(standing=standing, saved=None, code=code, tells=tells)
        saved = self._saved(entrance)
        self.crew.meet()
        return Finished(standing=standing, saved=saved, tells=self.crew.leads, unit=self.asked.unit)

    def _first_phase(self, step: int) -> int:
        """The phase to go on with: also one that was stopped at its end, before validation."""
        ends, data = self.asked.ends, self.asked.data
        done = sum(end <= step for end in ends)
        if done and ends[done - 1] == step and data[done - 1].validation:
            done -= not self.crew.agree(self.metrics.tells(step, "validation"))
        return min(done, len(ends) - 1)

    def _first_model(self) -> Model:
        asked = self.asked
        model = first_model(asked.model, asked.run.seed, asked.objective.classified)
        return model if self.surgery is None else self.surgery.open(model)

    def _saved(self, entrance: Entrance) -> Saved | None:
        if self.surgery is None:
            tell_habits(entrance.model, self.asked.objective, self.asked.data[-1])
            return export(entrance, self.folder.model)
        return self.surgery.close(entrance.model, self.folder.place) if self.crew.leads else None

    def _check(self, model: Model) -> None:
        """All that can be known to be wrong before any work."""
        asked = self.asked
        for data in asked.data:
            tokenizer = tokenizer_of(data, model)
            check_fits(model, data, tokenizer)
            _check_shares(data, self.crew.world)
            # What an objective asks of a model may depend on its words.
            model.tokenizer = tokenizer
        attach(self.objective, model)
        self.objective.check(model)
        # A pattern that fits no parameter is refused.
        asked.optimiser.build(model)
        for phase in asked.phases.each:
            if phase.rotary != "kept":
                with_rotary(cast(Any, model.config), phase.rotary)
        _check_layers(asked, model)
        state = 3 * sum(each.numel() * each.element_size() for each in model.parameters())
        check_space(self.folder.place, state * (asked.run.keep + 1 + len(asked.data)))

    def _standing(self, origin: Path | None, since: str, model: Model) -> Standing:
        """Where the run stands; the weights themselves come with the phase."""
        if origin is None:
            return Standing(run=self.asked.tables)
        standing = read_standing(origin)
        self._check_end(origin, standing.step)
        if since:
            _check_rule(origin, standing.run, self.asked.tables)
        else:
            begun = sum(end <= standing.step for end in self.asked.ends) + 1
            check_same(standing, self.asked.tables, begun)
            self._tell_jump(standing)
        # Before anything is set aside for it.
        check_stored(origin, model)
        return replace(standing, run=self.asked.tables)

    def _check_end(self, origin: Path, step: int) -> None:
        end = self.asked.ends[-1]
        if step > end:
            raise ConfigError(
                f"the run file ends at step {end:,} and {origin} is at step {step:,}",
                "ask for more steps, or begin anew with --fresh",
            )

    def _tell_jump(self, standing: Standing) -> None:
        """A run made longer after its decay began would learn fast again, which few mean."""
        last = max(standing.step - 1, 0)
        began, asks = (each.at(last).share for each in (phases_of(standing.run), self.asked.phases))
        if asks > JUMP * began:
            rate = self.asked.optimiser.rate
            self.display.say(
                f"the run is longer than it was: at step {standing.step:,} its rate goes from "
                f"{rate * began:.2g} up to {rate * asks:.2g}; to go on from before its decay, "
                "name an earlier checkpoint with --from"
            )

    def _prepare(self, standing: Standing, *, fresh: bool) -> None:
        # Also the others wait here until the folder is there.
        self.checkpoints.clean()
        step = standing.step
        if fresh:
            self.folder.set_aside(self.checkpoints, step if step else -1, self.crew)
        for journal in (self.metrics, self.telemetry):
            journal.back_to(step)
        self.display.say(f"step {step:,} of {self.asked.ends[-1]:,}, in {self.folder.place}")

    def _phase(
        self, index: int, model: Model, origin: Path | None, standing: Standing
    ) -> tuple[Entrance, Standing, bool]:
        """Set a phase up, put the state of the checkpoint into it, and train to its end."""
        asked, data = self.asked, ranged(self.asked.data[index], model)
        # Kept is what the last phase that changed it has left.
        for phase in asked.phases.each[: index + 1]:
            if phase.rotary != "kept":
                raise_rotary(model, phase.rotary)
        model.tokenizer = tokenizer_of(data, model)
        described = json.loads(json.dumps(asdict(without_place(data))))
        seen = standing.data == described
        fed = self._fed(data, model, seen=seen)
        attach(self.objective, model)
        entrance = Entrance(
            model.to(self.crew.device),
            self.crew,
            distributed=asked.run.distributed,
            half=asked.run.half,
            recompute=asked.run.recompute,
            # Vectors of texts are made without the readout.
            partly=isinstance(asked.objective, Contrastive),
        )
        optimiser = asked.optimiser.build(model)
        if origin is not None:
            restore(origin, model, optimiser, self.crew)
        stream = Stream(
            fed.training,
            batch_tokens=data.room,
            micro_batches=data.micro_batches,
            seed=asked.run.seed,
        )
        place = Position(**standing.place) if seen else Position()
        standing = replace(standing, data=described, place=asdict(place))
        pin = self.crew.device.type == "cuda"
        steps = asked_of(
            stream.steps(place, rank=self.crew.rank, world=self.crew.world),
            self.objective,
            model,
            seed=asked.run.seed,
            first=standing.step,
        )
        loop = self._loop(index, entrance, optimiser, fed)
        if origin is not None and origin.parent != self.folder.checkpoints:
            # Killed before its first checkpoint, the run must not begin from nothing.
            loop.save(standing)
        standing = loop.run(prefetched(steps, pin=pin), standing, asked.ends[index])
        return entrance, standing, loop.stopped

    def _fed(self, data: Data, model: Model, *, seen: bool) -> Fed:
        """The first process tokenises, then all open what it wrote.

        Texts of which nothing was seen yet may have changed since they were tokenised.
        """
        if self.crew.leads:
            if isinstance(data, Texts) and not seen:
                data.renew(model.tokenizer, self.folder.data)
            fed = data.feed(model.tokenizer, self.folder.data, model.class_names)
        self.crew.meet()
        if not self.crew.leads:
            fed = data.feed(model.tokenizer, self.folder.data, model.class_names)
        name_as(model, fed.names)
        return fed

    def _loop(self, index: int, entrance: Entrance, optimiser: Optimizer, fed: Fed) -> Loop:
        asked, settings = self.asked, self.asked.run
        score = self.objective.score

        def rate(step: int) -> float:
            share = asked.phases.at(step).share
            set_rate(optimiser, share)
            return asked.optimiser.rate * share

        return Loop(
            updater=Updater(
                entrance=entrance,
                optimiser=optimiser,
                score=torch.compile(score) if settings.compile else score,
                crew=self.crew,
                seed=settings.seed,
                half=settings.half,
                clip=settings.clip,
                ahead=goes_ahead(optimiser),
            ),
            rate=rate,
            checkpoints=self.checkpoints,
            metrics=self.metrics,
            telemetry=self.telemetry,
            board=Board(self.folder.board) if settings.tensorboard and self.crew.leads else None,
            display=self.display,
            validation=self._validation(asked.data[index], fed),
            probe=self._probe(entrance.model, fed),
            habits=Habits(
                checkpoint_every=settings.checkpoint_every,
                keep_every=settings.keep_every,
                validate_every=settings.validate_every,
                telemetry_every=settings.telemetry_every,
                log_every=settings.log_every,
            ),
            marked=frozenset({asked.ends[index], *_plateau_end(asked.phases, index)}),
            stop=self.stop,
            crew=self.crew,
            operations=operations(entrance.model, asked.data[index].length),
            peak=peak(self.crew.device, half=settings.half),
        )

    def _validation(self, data: Data, fed: Fed) -> Validation | None:
        if fed.validation is None:
            return None
        asks_all = isinstance(self.asked.objective, CausalLM)
        return Validation(
            stream=Stream(fed.validation, batch_tokens=data.room, shuffle=False),
            objective=self.objective,
            crew=self.crew,
            seed=self.asked.run.seed,
            half=self.asked.run.half,
            bytes_a_token=fed.bytes_a_token if asks_all else 0.0,
        )

    def _probe(self, model: Model, fed: Fed) -> Probe | None:
        if not self.asked.run.telemetry_every:
            return None
        pieces = fed.training if fed.validation is None else fed.validation
        batch = pieces.batch(list(range(min(SEQUENCES, len(pieces)))))
        return make_probe(model, batch, self.asked.run.seed)


def attach(objective: Objective, model: Model) -> None:
    """Give the model what regularisers train along with it."""
    if isinstance(objective, Regularised):
        objective.attach(model)


def _check_shares(data: Data, world: int) -> None:
    """Every process must have equally many micro-batches, since they wait for one another."""
    for size in data.sizes:
        count = size // data.room
        if count % world:
            raise ConfigError(
                f"a batch of {count} micro-batches cannot be shared among {world} processes",
                f"use a data.micro_batch that divides it by {world} or a multiple",
            )


def _check_layers(run: Run, model: Model) -> None:
    chosen, count = run.run.recompute, len(layers_of(model))
    wrong = [] if isinstance(chosen, str) else [each for each in chosen if not 0 <= each < count]
    if wrong:
        raise ConfigError(f"run.recompute names layer {wrong[0]}", f"use 0 to {count - 1}")
    held_out = all(data.validation for data in run.data)
    if run.run.validate_every and not held_out:
        raise ConfigError(
            f"run.validate_every={run.run.validate_every} and nothing is held out",
            "add data.validation, files or a share",
        )


def _plateau_end(phases: Phases, index: int) -> set[int]:
    """The step after the last one at the full rate, if the rate stays there for a while."""
    phase, start = phases.each[index], phases.starts[index]
    rates = [phase.schedule.share(step, phase.steps) for step in range(phase.steps)]
    full = [step for step, rate in enumerate(rates) if rate == max(rates)]
    return {start + full[-1] + 1} if len(full) > 1 else set()


def _check_rule(origin: Path, began: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Muon keeps other numbers of a weight than the rest do."""
    was, now = (each.get("optimiser", {}).get("kind", "AdamW") for each in (began, asked))
    if was != now and "Muon" in (was, now):
        raise InputError(
            f"{origin} has what {was} keeps of its weights, and {now} keeps something else",
            f'use optimiser.kind="{was}", or begin a run with the saved model as model.folder',
        )
