"""A whole run: check it, start or resume it, train phase after phase, save the model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from manyheads.checkpoints.folder import Saved
from manyheads.data.batch import prefetch
from manyheads.data.stream import Stream, StreamPosition
from manyheads.devices import resolve_device
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model
from manyheads.train.distributed import ModelWrapper, ProcessGroup, join_processes, model_layers
from manyheads.train.interrupt import InterruptHandler
from manyheads.train.loop.checkpoint import (
    Checkpoints,
    RunFolder,
    TrainingState,
    check_disk_space,
    check_resumable,
    check_weights,
    read_state,
    restore,
)
from manyheads.train.loop.evaluation import SEQUENCES, Probe, Validation, make_probe
from manyheads.train.loop.model_setup import (
    check_fits,
    check_negatives,
    export,
    initial_model,
    record_inference_settings,
    run_tokenizer,
    set_class_names,
    set_problem_type,
    with_found_classes,
    with_image_preprocessing,
    with_late_roles,
)
from manyheads.train.loop.phase_loop import Loop
from manyheads.train.loop.reporting import (
    Display,
    MetricsLog,
    TensorBoardWriter,
    peak_flops,
    performance_advice,
    silence_mkldnn_warning,
    training_flops,
)
from manyheads.train.loop.train_step import Updater, can_run_ahead, prepare_steps
from manyheads.train.objectives import CausalLM
from manyheads.train.objectives.text_similarity import TextSimilarity
from manyheads.train.optim.param_groups import set_learning_rate
from manyheads.train.run_file.data_config import Data, PhaseData, Texts, without_store
from manyheads.train.run_file.phases import Phases
from manyheads.train.run_file.run_config import Run, parse_phases
from manyheads.train.tiling import set_rotary_base, with_rotary_base

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
    silence_mkldnn_warning()
    with join_processes(run.run.distributed, device) as processes, InterruptHandler() as stop:
        session = _Session(run, processes, stop, progress and processes.is_main, hooks)
        return session.run(resume_from, fresh)


class _Session:
    """What the phases of a run share."""

    def __init__(
        self,
        run: Run,
        processes: ProcessGroup,
        stop: InterruptHandler,
        progress: bool,
        hooks: ModelHooks | None,
    ) -> None:
        self.config, self.processes, self.stop, self.hooks = run, processes, stop, hooks
        self.objective = run.full_objective
        self.source = with_found_classes(run.model, run.data[0])
        self.folder = RunFolder(run.run.folder)
        self.checkpoints = Checkpoints(self.folder.checkpoints, processes, run.run.keep)
        self.display = Display(run.ends[-1], progress, run.unit, warnings=processes.is_main)
        self.metrics = MetricsLog(self.folder.metrics, enabled=processes.is_main)
        self.telemetry = MetricsLog(self.folder.telemetry, enabled=processes.is_main)

    def run(self, resume_from: str, fresh: bool) -> TrainResult:
        model = self._initial_model()
        self._check(model)
        with self.folder.locked(self.processes):
            origin, warning = self.folder.checkpoint_to_resume(
                resume_from, self.checkpoints, fresh=fresh
            )
            state = self._initial_state(origin, resume_from, model)
            if warning:
                self.display.warn(warning)
            self._prepare(state, fresh=fresh or bool(resume_from))
            return self._train_phases(model, origin, state)

    def _train_phases(self, model: Model, origin: Path | None, state: TrainingState) -> TrainResult:
        if self.hooks is None:
            for line in performance_advice(model, self.processes.device, half=self.config.run.half):
                self.display.message(line)
        ends, first = self.config.ends, self._first_phase(state.step)
        for index in range(first, len(ends)):
            if index > first:
                # The next phase starts from the last checkpoint of this one.
                model, origin = self._initial_model(), self.checkpoints.path(state.step)
            wrapper, state, stopped = self._phase(index, model, origin, state, first=index == first)
            if stopped:
                exit_code, is_main = self.stop.exit_code, self.processes.is_main
                return TrainResult(state=state, saved=None, exit_code=exit_code, is_main=is_main)
        saved = self._save_model(wrapper)
        self.processes.barrier()
        return TrainResult(
            state=state, saved=saved, is_main=self.processes.is_main, unit=self.config.unit
        )

    def _first_phase(self, step: int) -> int:
        """The phase to resume: also one that was interrupted at its end, before validation."""
        ends, data = self.config.ends, self.config.data
        done = sum(end <= step for end in ends)
        if done and ends[done - 1] == step and data[done - 1].validation:
            done -= not self.processes.broadcast(self.metrics.has_entry(step, "validation"))
        return min(done, len(ends) - 1)

    def _initial_model(self) -> Model:
        config = self.config
        model = initial_model(self.source, config.run.seed, config.objective.classified)
        set_problem_type(model, config.objective)
        return model if self.hooks is None else self.hooks.prepare(model)

    def _save_model(self, wrapper: ModelWrapper) -> Saved | None:
        if self.hooks is None:
            record_inference_settings(wrapper.model, self.config.objective, self.config.data[-1])
            return export(wrapper, self.folder.model)
        return self.hooks.save(wrapper.model, self.folder.path) if self.processes.is_main else None

    def _check(self, model: Model) -> None:
        """Check everything that can be checked before training."""
        config, own = self.config, model.tokenizer
        self.objective.attach(model)
        for data in config.data:
            model.tokenizer = run_tokenizer(data, model)
            check_fits(model, data, model.tokenizer)
            _check_micro_batches(data, self.processes.world_size)
            # Its checks may depend on the tokenizer.
            self.objective.check(model)
            model.tokenizer = own
        # This also checks the patterns of learning-rate factors.
        config.optimizer.build(model)
        for phase in config.phases.each:
            if phase.rotary != "kept":
                _check_rotary(phase.rotary, model)
        _check_layers(config, model)
        _check_parts(config, self.processes)
        state = 3 * sum(each.numel() * each.element_size() for each in model.parameters())
        check_disk_space(self.folder.path, state * (config.run.keep + 1 + len(config.data)))

    def _initial_state(self, origin: Path | None, resume_from: str, model: Model) -> TrainingState:
        """The state to start from; the weights are loaded with the phase."""
        if origin is None:
            return TrainingState(run=self.config.tables)
        state = read_state(origin)
        self._check_end(origin, state.step)
        if resume_from:
            _check_optimizer(origin, state.run, self.config.tables)
        else:
            begun = sum(end <= state.step for end in self.config.ends) + 1
            check_resumable(state, self.config.tables, begun)
            self._warn_of_rate_jump(state)
        # Before any file is moved.
        check_weights(origin, model)
        if origin.parent == self.folder.checkpoints:
            self.checkpoints.known.add(state.step)
        return replace(state, run=self.config.tables)

    def _check_end(self, origin: Path, step: int) -> None:
        end = self.config.ends[-1]
        if step > end:
            raise ConfigError(
                f"the run file ends at step {end:,} and {origin} is at step {step:,}",
                "set more steps, or start again with --fresh",
            )

    def _warn_of_rate_jump(self, state: TrainingState) -> None:
        """Warn if a run was made longer after its decay began: its learning rate would jump up."""
        last = max(state.step - 1, 0)
        before, now = (
            each.rate_factor(last) for each in (parse_phases(state.run), self.config.phases)
        )
        if now > JUMP * before:
            rate = self.config.optimizer.rate
            self.display.message(
                f"the run is longer than before: at step {state.step:,} its rate rises from "
                f"{rate * before:.2g} to {rate * now:.2g}; to resume from before the decay, "
                "choose an earlier checkpoint with --from"
            )

    def _prepare(self, state: TrainingState, *, fresh: bool) -> None:
        # The other processes wait here until the folder exists.
        self.checkpoints.clean()
        step = state.step
        if fresh:
            self.folder.set_aside(self.checkpoints, step if step else -1, self.processes)
        for log in (self.metrics, self.telemetry):
            if warning := log.truncate_after(step):
                self.display.warn(warning)
        end, folder = self.config.ends[-1], self.folder.path
        if step:
            self.display.message(f"resuming at step {step:,} of {end:,} in {folder}")
        else:
            self.display.message(f"training for {end:,} steps in {folder}")

    def _phase(
        self, index: int, model: Model, origin: Path | None, state: TrainingState, *, first: bool
    ) -> tuple[ModelWrapper, TrainingState, bool]:
        """Set up a phase, load the checkpoint, and train to the end of the phase."""
        config, own = self.config, model.tokenizer
        self.objective.attach(model)
        data = self._data_for(config.data[index], model)
        # "kept" is the base of the last phase that changed it.
        for phase in config.phases.each[: index + 1]:
            if phase.rotary != "kept":
                set_rotary_base(model, phase.rotary)
        model.tokenizer = run_tokenizer(data, model)
        described = json.loads(json.dumps(asdict(without_store(data))))
        seen = state.data == described
        phase_data = self._load_data(data, model, seen=seen)
        if seen and state.data_checksum not in (0, phase_data.checksum):
            raise ConfigError(
                f"the texts of {', '.join(data.train)} have changed since this run was started",
                "restore them, or start again with --fresh",
            )
        if first:
            self._check_later_data(index, model, own)
        wrapper = ModelWrapper(
            model.to(self.processes.device),
            self.processes,
            distributed=config.run.distributed,
            half=config.run.half,
            recompute=config.run.recompute,
            # Sentence embeddings do not use the readout.
            find_unused=isinstance(config.objective, TextSimilarity),
        )
        optimizer = config.optimizer.build(model)
        if origin is not None:
            restore(origin, model, optimizer, self.processes)
        stream = Stream(
            phase_data.training,
            batch_tokens=data.micro_batch_size,
            micro_batches=data.micro_batches,
            seed=config.run.seed,
        )
        position = StreamPosition(**state.position) if seen else StreamPosition()
        state = replace(
            state,
            data=described,
            data_checksum=phase_data.checksum,
            position=asdict(position),
        )
        pin = self.processes.device.type == "cuda"
        steps = prepare_steps(
            stream.steps(position, rank=self.processes.rank, world_size=self.processes.world_size),
            self.objective,
            model,
            seed=config.run.seed,
            first=state.step,
        )
        loop = self._loop(index, wrapper, optimizer, phase_data)
        if origin is not None and origin.parent != self.folder.checkpoints:
            # If the run is killed before its next checkpoint, it must not start from scratch.
            loop.save(state)
        state = loop.run(prefetch(steps, pin=pin), state, config.ends[index])
        return wrapper, state, loop.stopped

    def _data_for(self, data: Data, model: Model) -> Data:
        """The data as the model reads them."""
        data = with_image_preprocessing(data, model)
        return with_late_roles(data, model, self.objective)

    def _check_later_data(self, index: int, model: Model, own: Any) -> None:
        """Read the data of later phases, so that what is wrong with them is told now."""
        here = model.tokenizer
        for later in self.config.data[index + 1 :]:
            data = self._data_for(later, model)
            model.tokenizer = own
            model.tokenizer = run_tokenizer(data, model)
            self._load_data(data, model, seen=False)
        model.tokenizer = here

    def _load_data(self, data: Data, model: Model, *, seen: bool) -> PhaseData:
        """The main process tokenizes, then all processes open the result.

        Texts that were not trained on yet may have changed since they were tokenized.
        """
        if self.processes.is_main:
            if isinstance(data, Texts) and not seen:
                data.set_aside_stale(model.tokenizer, self.folder.data)
            phase_data = data.load(model.tokenizer, self.folder.data, model.class_names)
        self.processes.barrier()
        if not self.processes.is_main:
            phase_data = data.load(model.tokenizer, self.folder.data, model.class_names)
        set_class_names(model, phase_data.names)
        check_negatives(self.config.objective, data, phase_data)
        return phase_data

    def _loop(
        self, index: int, wrapper: ModelWrapper, optimizer: Optimizer, phase_data: PhaseData
    ) -> Loop:
        config, settings = self.config, self.config.run
        score = self.objective.score

        def rate(step: int) -> float:
            factor = config.phases.rate_factor(step)
            set_learning_rate(optimizer, factor)
            return config.optimizer.rate * factor

        return Loop(
            updater=Updater(
                wrapper=wrapper,
                optimizer=optimizer,
                score=torch.compile(score) if settings.compile else score,
                processes=self.processes,
                seed=settings.seed,
                half=settings.half,
                clip=settings.clip,
                ahead=can_run_ahead(optimizer),
            ),
            rate=rate,
            checkpoints=self.checkpoints,
            metrics=self.metrics,
            telemetry=self.telemetry,
            board=TensorBoardWriter(self.folder.tensorboard)
            if settings.tensorboard and self.processes.is_main
            else None,
            display=self.display,
            validation=self._validation(config.data[index], phase_data),
            probe=self._probe(wrapper.model, phase_data),
            options=settings,
            milestones=frozenset({config.ends[index], *_plateau_end(config.phases, index)}),
            stop=self.stop,
            processes=self.processes,
            flops_per_token=training_flops(wrapper.model, config.data[index].length),
            peak_flops=peak_flops(self.processes.device, half=settings.half),
        )

    def _validation(self, data: Data, phase_data: PhaseData) -> Validation | None:
        if phase_data.validation is None:
            return None
        predicts_all = isinstance(self.config.objective, CausalLM)
        return Validation(
            stream=Stream(phase_data.validation, batch_tokens=data.micro_batch_size, shuffle=False),
            objective=self.objective,
            processes=self.processes,
            seed=self.config.run.seed,
            half=self.config.run.half,
            bytes_per_token=phase_data.bytes_per_token if predicts_all else 0.0,
        )

    def _probe(self, model: Model, phase_data: PhaseData) -> Probe | None:
        if not self.config.run.telemetry_every:
            return None
        chunks = phase_data.training if phase_data.validation is None else phase_data.validation
        batch = chunks.batch(list(range(min(SEQUENCES, len(chunks)))))
        return make_probe(model, batch, self.config.run.seed)


def _check_micro_batches(data: Data, world_size: int) -> None:
    """Every process must have the same number of micro-batches."""
    for size in data.sizes:
        count = size // data.micro_batch_size
        if count % world_size:
            raise ConfigError(
                f"{count} micro-batches per step cannot be divided among {world_size} processes",
                f"choose data.micro_batch so that their number is a multiple of {world_size}",
            )


def _check_rotary(base: float, model: Model) -> None:
    try:
        with_rotary_base(cast(Any, model.config), base)
    except ConfigError as error:
        raise ConfigError(f"phase.rotary={base:g}: {error.problem}", "leave it out") from None


def _check_layers(run: Run, model: Model) -> None:
    chosen, count = run.run.recompute, len(model_layers(model))
    wrong = [] if isinstance(chosen, str) else [each for each in chosen if not 0 <= each < count]
    if wrong:
        raise ConfigError(f"run.recompute has layer {wrong[0]}", f"use 0 to {count - 1}")
    held_out = all(data.validation for data in run.data)
    if run.run.validate_every and not held_out:
        raise ConfigError(
            f"run.validate_every={run.run.validate_every} needs validation data",
            "set data.validation to files or a fraction",
        )


def _check_parts(run: Run, processes: ProcessGroup) -> None:
    """FSDP gathers weights for every part, and processes may have different numbers of parts."""
    cached = isinstance(run.objective, TextSimilarity) and run.objective.cache_tokens
    if cached and run.run.distributed == "fsdp" and not processes.is_single:
        raise ConfigError(
            "objective.cache_tokens cannot be used with FSDP on several processes",
            'set run.distributed="ddp", or cache_tokens to 0',
        )


def _plateau_end(phases: Phases, index: int) -> set[int]:
    """The step after the last one at the full rate, if the rate stays there for several steps."""
    phase, start = phases.each[index], phases.starts[index]
    rates = [phase.rate_factor(step) for step in range(phase.step_count)]
    full = [step for step, rate in enumerate(rates) if rate == max(rates)]
    return {start + full[-1] + 1} if len(full) > 1 else set()


def _check_optimizer(origin: Path, before: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Muon's optimizer state differs from that of the others."""
    was, now = (each.get("optimizer", {}).get("kind", "AdamW") for each in (before, tables))
    if was != now and "Muon" in (was, now):
        raise InputError(
            f"{origin} has the optimizer state of {was}, which {now} cannot use",
            f'use optimizer.kind="{was}", or start a run with the saved model as model.folder',
        )
