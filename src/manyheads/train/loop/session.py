"""A whole run: check it, start or resume it, train phase after phase, save the model."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manyheads.checkpoints.deferred.sharded_load import ShardedFolder
from manyheads.checkpoints.folder import Saved
from manyheads.data.batch import prefetch
from manyheads.data.stream import Stream, StreamPosition
from manyheads.devices import resolve_device
from manyheads.errors import ConfigError
from manyheads.models.build import Model
from manyheads.progress import InterruptHandler
from manyheads.renamed_keys import with_new_keys
from manyheads.train import tiling
from manyheads.train.distributed import ModelWrapper, ProcessGroup, join_processes
from manyheads.train.loop import model_setup, phase_trainer, reporting, run_checks
from manyheads.train.loop.checkpoint import (
    Checkpoints,
    RunFolder,
    TrainingState,
    check_resumable,
    check_weights,
    read_state,
    restore,
)
from manyheads.train.loop.evaluation import SEQUENCES, Probe, Validation, make_probe
from manyheads.train.loop.train_step import PreparedStep, Updater, can_run_ahead, prepare_steps
from manyheads.train.objectives import CausalLM, Objective
from manyheads.train.objectives.text_similarity import TextSimilarity
from manyheads.train.run_file.data_config import Data, Texts, without_store
from manyheads.train.run_file.data_sources import PhaseData, training_paths
from manyheads.train.run_file.run_config import Run, parse_phases

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A resumed run warns if its learning rate grows by more than this factor.
JUMP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended: at its last step with the model saved, or interrupted (`saved` is None).

    `exit_code` is what a shell expects of an interrupted program. `is_main` is true in one process
    of a distributed run: the one that should print the result.
    """

    state: TrainingState
    saved: Saved | None
    exit_code: int = 0
    is_main: bool = True
    unit: str = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHooks:
    """Functions that change the model before training and save it in place of a full export."""

    prepare: Callable[[Model], Model]
    save: Callable[[Model, Path], Saved]


def train(
    run: Run,
    *,
    resume_from: str = "",
    fresh: bool = False,
    progress: bool = True,
    hooks: ModelHooks | None = None,
) -> TrainResult:
    """Start a run, or resume it from its newest checkpoint.

    `resume_from` is another checkpoint: one of this run, or a path to one of another run. `fresh`
    starts again from step 0. Files that would be overwritten are moved to a folder before-N.
    """
    device = str(resolve_device(run.run.device, "run.device"))
    for data in run.data:
        data.check()
    reporting.silence_mkldnn_warning()
    with (
        join_processes(run.run.distributed, device, run.run.context_parallel) as processes,
        InterruptHandler() as stop,
    ):
        session = Session(run, processes, progress=progress, hooks=hooks)
        model = session.new_model()
        run_checks.check_run(run, model, processes)
        with session.folder.locked(processes):
            state, checkpoint = session.start(model, resume_from, fresh=fresh)
            first, stopped = session.first_phase(state.step), False
            for index in range(first, len(run.data)):
                if index > first:
                    # A phase starts from the last checkpoint of the one before it.
                    model, checkpoint = session.new_model(), session.checkpoints.path(state.step)
                phase, state = session.load(index, model, checkpoint, state, first=index == first)
                stopped = phase.catch_up(state.step)
                steps = () if stopped else phase.updater.run(phase.steps, phase.pauses, stop)
                for step, outcome in steps:
                    state, stopped = phase.record(state, step, outcome), outcome.stop
                    if phase.pauses(state.step):
                        stopped = stopped or phase.evaluate(state.step)
                        if phase.saves(state.step):
                            phase.save(state)
                        if stopped:
                            break
                phase.finish(state)
                if stopped:
                    break
            saved = None if stopped else session.save_model(phase.updater.wrapper)
            processes.barrier()
    return TrainResult(
        state=state,
        saved=saved,
        exit_code=stop.exit_code if stopped else 0,
        is_main=processes.is_main,
        unit=run.unit,
    )


class Session:
    """What the phases of a run share: its configuration, processes, folder and logs."""

    def __init__(
        self, run: Run, processes: ProcessGroup, *, progress: bool, hooks: ModelHooks | None
    ) -> None:
        self.run, self.processes, self.hooks = run, processes, hooks
        self.source = model_setup.with_found_classes(run.model, run.data[0])
        self.folder = RunFolder(run.run.folder)
        self.checkpoints = Checkpoints(self.folder.checkpoints, processes, run.run.keep)
        self.reporter = reporting.Reporter(
            self.folder, run.ends[-1], run.unit, is_main=processes.is_main, progress=progress
        )
        # The folder of a model whose weights are read once it is sharded.
        self.unread: ShardedFolder | None = None
        # Of the data of the current phase.
        self.tokenizer: Tokenizer | None = None

    def new_model(self) -> Model:
        """The model before training; its weights may still be in its folder."""
        self.unread = model_setup.unread_model(self.run, self.processes, self.hooks is None)
        if self.unread is not None:
            return self.unread.model
        model = model_setup.initial_model(
            self.source, self.run.run.seed, self.run.objective.classified
        )
        model_setup.set_problem_type(model, self.run.objective)
        return model if self.hooks is None else self.hooks.prepare(model)

    def start(
        self, model: Model, resume_from: str, *, fresh: bool
    ) -> tuple[TrainingState, Path | None]:
        """The state to start from, and its checkpoint, whose weights are loaded with the phase."""
        checkpoint, warning = self.folder.checkpoint_to_resume(
            resume_from, self.checkpoints, fresh=fresh
        )
        state = TrainingState()
        if checkpoint is not None:
            state = self._read_state(checkpoint, resume_from)
            # Before any file is moved.
            check_weights(checkpoint, model)
            if checkpoint.parent == self.folder.checkpoints:
                self.checkpoints.known.add(state.step)
        display, end = self.reporter.display, self.run.ends[-1]
        if warning:
            display.warn(warning)
        # The other processes wait here until the folder exists.
        self.checkpoints.clean()
        if fresh or resume_from:
            self.folder.set_aside(self.checkpoints, state.step or -1, self.processes)
        self.reporter.open(state.step, tensorboard=self.run.run.tensorboard)
        if state.step:
            display.message(f"resuming at step {state.step:,} of {end:,} in {self.folder.path}")
        else:
            display.message(f"training for {end:,} steps in {self.folder.path}")
        if self.hooks is None:
            for line in reporting.performance_advice(
                model, self.processes.device, half=self.run.run.half
            ):
                display.message(line)
        return replace(state, run=self.run.tables), checkpoint

    def _read_state(self, checkpoint: Path, resume_from: str) -> TrainingState:
        state, end = read_state(checkpoint), self.run.ends[-1]
        if state.step > end:
            raise ConfigError(
                f"the run file ends at step {end:,} and {checkpoint} is at step {state.step:,}",
                "set more steps, or start again with --fresh",
            )
        if resume_from:
            run_checks.check_optimizer_state(checkpoint, state.run, self.run.tables)
            return state
        begun = sum(end <= state.step for end in self.run.ends) + 1
        check_resumable(state, self.run.tables, begun)
        # A run that was made longer after its decay began would jump up in its learning rate.
        last, lr = max(state.step - 1, 0), self.run.optimizer.lr
        before = parse_phases(state.run).lr_factor(last)
        now = self.run.phases.lr_factor(last)
        if now > JUMP * before:
            self.reporter.display.message(
                f"the run is longer than before: at step {state.step:,} its learning rate rises "
                f"from {lr * before:.2g} to {lr * now:.2g}; to resume from before the decay, "
                "choose an earlier checkpoint with --from"
            )
        return state

    def first_phase(self, step: int) -> int:
        """The phase to resume: also one that was interrupted at its end, before validation."""
        ends, data = self.run.ends, self.run.data
        done = sum(end <= step for end in ends)
        if done and ends[done - 1] == step and data[done - 1].validation:
            validated = self.reporter.metrics.has_entry(step, "validation")
            done -= not self.processes.broadcast(validated)
        return min(done, len(ends) - 1)

    def load(
        self,
        index: int,
        model: Model,
        checkpoint: Path | None,
        state: TrainingState,
        *,
        first: bool,
    ) -> tuple[phase_trainer.PhaseTrainer, TrainingState]:
        """A phase with its data, and with model and optimizer as in the checkpoint."""
        run, options, processes = self.run, self.run.run, self.processes
        run.full_objective.attach(model)
        # "kept" is the base of the last phase that changed it.
        for config in run.phases.each[: index + 1]:
            if config.rotary != "kept":
                tiling.set_rotary_base(model, config.rotary)
        data = self._data_for(run.data[index], model)
        self.tokenizer = model_setup.run_tokenizer(data, model)
        objective = run.full_objective.with_tokenizer(self.tokenizer)
        phase_data, state = self._resume_data(data, model, state)
        if first:
            # So that what is wrong with later data is reported now.
            for later in (self._data_for(later, model) for later in run.data[index + 1 :]):
                self._load_data(
                    later, model, model_setup.run_tokenizer(later, model), unchanged=False
                )
        if self.unread is None:
            model.to(processes.device)
        wrapper = ModelWrapper(
            model.train(),
            processes,
            distributed=options.distributed,
            half=options.half,
            recompute=options.recompute,
            # Sentence embeddings do not use the readout.
            find_unused=isinstance(run.objective, TextSimilarity),
            unread=None if self.unread is None else self.unread.read,
        )
        optimizer = run.optimizer.build(model)
        if checkpoint is not None:
            restore(checkpoint, model, optimizer, processes)
        phase = phase_trainer.PhaseTrainer(
            run=run,
            end=run.ends[index],
            milestones=run.phases.milestones(index),
            updater=Updater(
                wrapper=wrapper,
                optimizer=optimizer,
                score=torch.compile(objective.score) if options.compile else objective.score,
                lr_factor=run.phases.lr_factor,
                seed=options.seed,
                half=options.half,
                clip=options.clip,
                ahead=can_run_ahead(optimizer),
            ),
            steps=self._steps(data, phase_data, objective, model, state, run.ends[index]),
            validation=self._validation(data, phase_data, objective),
            probe=self._probe(model, phase_data),
            reporter=self.reporter,
            checkpoints=self.checkpoints,
            peak_fraction=reporting.peak_fraction(
                model, data.max_length, processes, half=options.half
            ),
        )
        if checkpoint is not None and checkpoint.parent != self.folder.checkpoints:
            # If the run is killed before its next checkpoint, it must not start from scratch.
            phase.save(state)
        return phase, state

    def _data_for(self, data: Data, model: Model) -> Data:
        """The data as the model reads them."""
        data = model_setup.with_image_preprocessing(data, model)
        return model_setup.with_late_roles(data, model, self.run.objective)

    def _resume_data(
        self, data: Data, model: Model, state: TrainingState
    ) -> tuple[PhaseData, TrainingState]:
        """The data of a phase, and the state with the position in them."""
        described = json.loads(json.dumps(asdict(without_store(data))))
        unchanged = with_new_keys(state.data, described) == described
        phase_data = self._load_data(data, model, self.tokenizer, unchanged=unchanged)
        if unchanged and state.data_checksum not in (0, phase_data.checksum):
            raise ConfigError(
                f"the texts of {', '.join(training_paths(data.train))} have changed since this run "
                "was started",
                "restore them, or start again with --fresh",
            )
        position = state.position if unchanged else asdict(StreamPosition())
        return phase_data, replace(
            state, data=described, data_checksum=phase_data.checksum, position=position
        )

    def _load_data(
        self, data: Data, model: Model, tokenizer: "Tokenizer | None", *, unchanged: bool
    ) -> PhaseData:
        """The main process tokenizes, then all processes open the result.

        Texts that were not trained on yet may have changed since they were tokenized.
        """
        if self.processes.is_main:
            if isinstance(data, Texts) and not unchanged:
                data.set_aside_stale(tokenizer, self.folder.data)
            phase_data = data.load(tokenizer, self.folder.data, model.class_names)
        self.processes.barrier()
        if not self.processes.is_main:
            phase_data = data.load(tokenizer, self.folder.data, model.class_names)
        model_setup.set_class_names(model, phase_data.names)
        run_checks.check_negatives(self.run.objective, data, phase_data)
        return phase_data

    def _steps(
        self,
        data: Data,
        phase_data: PhaseData,
        objective: Objective,
        model: Model,
        state: TrainingState,
        end: int,
    ) -> Iterator[PreparedStep]:
        """The batches from the state's position to the end of the phase, prepared in a thread."""
        processes, seed = self.processes, self.run.run.seed
        stream = Stream(
            phase_data.training,
            batch_tokens=data.micro_batch_size,
            micro_batches=data.micro_batches,
            seed=seed,
        )
        position = StreamPosition(**state.position)
        steps = stream.steps(position, rank=processes.data_rank, world_size=processes.data_size)
        remaining = islice(steps, end - state.step)
        prepared = prepare_steps(
            remaining, objective, model, seed=seed, first=state.step, processes=processes
        )
        return prefetch(prepared, pin=processes.device.type == "cuda")

    def _validation(
        self, data: Data, phase_data: PhaseData, objective: Objective
    ) -> tuple[Validation, ...]:
        predicts_all = isinstance(self.run.objective, CausalLM)
        return tuple(
            Validation(
                name=held.name,
                stream=Stream(held.chunks, batch_tokens=data.micro_batch_size, shuffle=False),
                objective=objective,
                processes=self.processes,
                seed=self.run.run.seed,
                half=self.run.run.half,
                bytes_per_token=held.bytes_per_token if predicts_all else 0.0,
            )
            for held in phase_data.validation
        )

    def _probe(self, model: Model, phase_data: PhaseData) -> Probe | None:
        if not self.run.run.telemetry_every:
            return None
        sets = phase_data.validation
        chunks = sets[0].chunks if sets else phase_data.training
        batch = chunks.batch(list(range(min(SEQUENCES, len(chunks)))))
        return make_probe(model, batch, self.run.run.seed)

    def save_model(self, wrapper: ModelWrapper) -> Saved | None:
        """Save the trained model with what its use needs; only the main process writes."""
        model = wrapper.model
        model_setup.record_inference_settings(
            model, self.run.objective, self.run.data[-1], self.tokenizer
        )
        if self.hooks is None:
            return model_setup.export(wrapper, self.folder.model)
        return self.hooks.save(model, self.folder.path) if self.processes.is_main else None
