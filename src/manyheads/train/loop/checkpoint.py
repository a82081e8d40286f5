"""Checkpoints of a run in safetensors and JSON, written atomically while training continues.

torch.distributed.checkpoint writes and reads the tensors, each process its own shards, so that
another number of processes can read them again. Its own file format has a pickle in .metadata; its
safetensors storage has none and is the one used here. Everything else is in state.json, and
manifest.json has the checksums of all files. A checkpoint is used only if they are right.
`RunFolder` has the paths of a run, finds the checkpoint to resume from, and locks the folder.
"""

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.optim import Optimizer

from manyheads.atomic_write import exclusive_lock
from manyheads.data.stream import StreamPosition
from manyheads.dataclass_codec import DataclassCodec
from manyheads.errors import ConfigError, InputError, ManyheadsError, TrainingError
from manyheads.renamed_keys import KEYS, new_tensor_name
from manyheads.train.distributed import ProcessGroup
from manyheads.train.loop.manifest import MANIFEST, find_damage, write_manifest

STATE = "state.json"
PART = ".part"
REMEDY = "choose another with --from"
CODEC = DataclassCodec("kind")


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step with a loss or gradient that is not finite, and the micro-batches with such a loss."""

    step: int
    micro_batches: tuple[int, ...]

    def __str__(self) -> str:
        if not self.micro_batches:
            return f"step {self.step} (gradient)"
        listed = ", ".join(map(str, self.micro_batches))
        return f"step {self.step} (micro-batch {listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The progress of a run: all of its state besides tensors.

    Random numbers depend on the seed, the step and the micro-batch, so there is no random state to
    save. `position` is the position in the data that `data` describes, `data_checksum` is that of
    its texts, and `run` is the run file.
    """

    step: int = 0
    tokens: int = 0
    skipped: tuple[SkippedStep, ...] = ()
    consecutive_skips: int = 0
    kept: bool = False
    position: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    data_checksum: int = 0
    run: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (self.step, self.tokens, self.consecutive_skips, *self.position.values())
        if min(counts) < 0:
            raise ConfigError(f"a count is {min(counts)}", "use 0 or more")
        if self.position and set(self.position) != set(StreamPosition.__slots__):
            raise ConfigError(f"position has {', '.join(self.position)}")

    def proves(self, step: int) -> bool:
        """Whether a finite step followed step `step`, so that the weights after it are sound."""
        return step < self.step and all(skip.step != step + 1 for skip in self.skipped)


def read_state(checkpoint: Path) -> TrainingState:
    """The state of a checkpoint, without its tensors."""
    file = checkpoint / STATE
    try:
        values = json.loads(file.read_bytes())
        state: TrainingState = CODEC.decode_table(TrainingState, values, STATE)
        # Earlier versions wrote no checksum of the data.
        missing = [entry.name for entry in fields(state) if entry.name not in values]
        if not set(missing) - {"data_checksum"}:
            return state
        why = f"it has no {missing[0]}"
    except ManyheadsError as error:
        why = error.problem
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    raise InputError(f"{file} is not the state of a run ({why})", REMEDY)


def state_tensors(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of model and optimizer by name, and the optimizer's plain numbers."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    numbers: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            holder = tensors if isinstance(value, Tensor) else numbers
            holder[f"optimizer.{name}.{entry}"] = value
    return tensors, numbers


def check_weights(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """The stored entries by today's names; an error if the weights do not match the model's."""
    try:
        reader = hf_storage.HuggingFaceStorageReader(str(checkpoint))
        entries = reader.read_metadata().state_dict_metadata
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{checkpoint} is damaged ({error})", REMEDY) from None
    stored = {new_tensor_name(name): entry for name, entry in entries.items()}
    if not stored:
        raise InputError(f"{checkpoint} has no weights", REMEDY)
    same = "resume with the model and the regularizers that the run was started with"
    state = model.state_dict()
    for name, tensor in state.items():
        result = getattr(stored.get(f"model.{name}"), "size", None)
        if result is None or tuple(result) != tuple(tensor.shape):
            has = "nothing" if result is None else str(tuple(result))
            raise InputError(
                f"{checkpoint} has {has} for {name}, and the model needs {tuple(tensor.shape)}",
                same,
            )
    for name in (name.removeprefix("model.") for name in stored if name.startswith("model.")):
        if name not in state:
            raise InputError(f"{checkpoint} has {name}, and the model has no such parameter", same)
    return stored


def restore(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer | None, processes: ProcessGroup
) -> TrainingState:
    """Load the tensors of a checkpoint into model and optimizer, in place."""
    state = read_state(checkpoint)
    stored = check_weights(checkpoint, model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    entries = {} if optimizer is None else _empty_optimizer_state(model, optimizer, stored)
    tensors |= {name: tensor for name, (_, _, tensor) in entries.items()}
    _ignore_single_process_warning()
    reader = hf_storage.HuggingFaceStorageReader(str(checkpoint))
    # Files of earlier versions have other names for some tensors.
    names = {new_tensor_name(name): name for name in reader.read_metadata().state_dict_metadata}
    load_sharded(
        {names[name]: tensor for name, tensor in tensors.items()},
        storage_reader=reader,
        process_group=processes.checkpoint_group,
        no_dist=processes.is_single,
    )
    if optimizer is not None:
        for parameter, entry, tensor in entries.values():
            optimizer.state[parameter][entry] = tensor
        parameters = dict(model.named_parameters())
        for key, number in state.numbers.items():
            name, _, entry = new_tensor_name(key).removeprefix("optimizer.").rpartition(".")
            if name in parameters:
                optimizer.state[parameters[name]][entry] = number
    return state


def _empty_optimizer_state(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any]
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """Empty tensors for the optimizer state of each parameter, on the device where it lives."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    entries = {}
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (key for key in stored if key.startswith(prefix)):
            size, dtype = stored[key].size, stored[key].properties.dtype
            if tuple(size) == tuple(parameter.shape):
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                # As in torch: the step count is on the host unless a fused kernel reads it.
                group = groups[parameter]
                on_device = group.get("fused") or group.get("capturable")
                tensor = torch.empty(
                    size, dtype=dtype, device=parameter.device if on_device else "cpu"
                )
            entries[key] = (parameter, key.removeprefix(prefix), tensor)
    return entries


class Checkpoints:
    """The checkpoints of a run: the last `keep`, those marked to be kept, and the last good one.

    Saving takes a snapshot and writes it in a thread, to a folder that is renamed when complete. A
    checkpoint is intact if its files have their checksums, and good if a finite step followed it.
    """

    def __init__(self, folder: Path, processes: ProcessGroup, keep: int) -> None:
        self.folder = folder
        self.processes = processes
        self.keep = keep
        # The steps whose checkpoints this process has verified or written.
        self.known: set[int] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def clean(self) -> None:
        """Remove incomplete checkpoints of a killed run."""
        if self.processes.is_main and self.folder.exists():
            for half in self.folder.glob(f"*{PART}"):
                _remove(half)
        self.processes.barrier()

    def all(self) -> dict[int, Path]:
        """Checkpoints by step, oldest first; some may be damaged."""
        result = {}
        for path in self.folder.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", path.name)
            if match and any((path / name).exists() for name in (STATE, MANIFEST)):
                result[int(match[1])] = path
        return dict(sorted(result.items()))

    def newest_intact(self) -> tuple[Path | None, dict[str, str]]:
        """The newest intact checkpoint, and what is wrong with newer ones, by their names."""
        damaged: dict[str, str] = {}
        result = self._newest_intact(damaged) if self.processes.is_main else None
        intact: tuple[Path | None, dict[str, str]] = self.processes.broadcast((result, damaged))
        return intact

    def newest_good(self, state: TrainingState) -> Path | None:
        """The newest intact checkpoint that a finite step followed, as the state tells."""
        newest = self._newest_good(state) if self.processes.is_main else None
        good: Path | None = self.processes.broadcast(newest)
        return good

    def _newest_intact(self, damaged: dict[str, str]) -> Path | None:
        for path in reversed(self.all().values()):
            why = find_damage(path)
            if not why:
                return path
            damaged[path.name] = why
        return None

    def _newest_good(self, state: TrainingState) -> Path | None:
        every = reversed(self.all().items())
        return next((p for step, p in every if state.proves(step) and not find_damage(p)), None)

    def save(self, tensors: Mapping[str, Tensor], state: TrainingState) -> None:
        """Take a snapshot now and write it in the background."""
        self.wait()
        if state.step in self.known:
            return
        snapshot = BlockingAsyncStager().stage(dict(tensors))
        part = self.folder / f"step-{state.step}{PART}"
        if self.processes.is_main:
            _remove(part)
            part.mkdir(parents=True)
        self.processes.barrier()
        _ignore_single_process_warning()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, state, part), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last snapshot is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise self._explain(error) from error

    def _write(self, snapshot: dict[str, Any], state: TrainingState, part: Path) -> None:
        try:
            writer = hf_storage.HuggingFaceStorageWriter(str(part), save_distributed=True)
            save_sharded(
                snapshot,
                storage_writer=writer,
                process_group=self.processes.checkpoint_group,
                no_dist=self.processes.is_single,
            )
            if self.processes.is_main:
                _finish(part, state)
            self.known.add(state.step)
            if self.processes.is_main:
                self._drop_old(state)
        # Any error is raised in the thread that waits.
        except BaseException as error:
            self._error = error
            if self.processes.is_main:
                shutil.rmtree(part, ignore_errors=True)

    def _explain(self, error: BaseException) -> BaseException:
        """An error of the file system, such as a full disk, becomes a TrainingError."""
        why = _find_os_error(error)
        if why is None:
            return error
        intact = self._newest_intact({})
        remedy = "free some space, or repair the disk"
        if intact is not None:
            remedy += f"; the same command resumes from {intact.name}, which is complete"
        return TrainingError(
            f"no checkpoint could be written to {self.folder} ({why.strerror or why})", remedy
        )

    def _drop_old(self, state: TrainingState) -> None:
        # Later ones are damaged, since the run did not resume from them; they will be replaced.
        older = [(step, path) for step, path in self.all().items() if step < state.step]
        good = self._newest_good(state)
        for _, path in older[: max(len(older) - self.keep + 1, 0)]:
            if path != good and not _is_marked(path):
                # Renamed first: a half removed checkpoint must not look complete.
                shutil.rmtree(path.rename(path.with_name(path.name + PART)))


def _is_marked(checkpoint: Path) -> bool:
    """Whether retention leaves a checkpoint: one to be kept, or one that cannot be read."""
    try:
        return read_state(checkpoint).kept
    except InputError:
        return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _find_os_error(error: BaseException) -> OSError | None:
    """The first OSError among the errors of all processes."""
    if isinstance(error, CheckpointException):
        result = (_find_os_error(failure) for failure, _ in error.failures.values())
        return next(filter(None, result), None)
    return error if isinstance(error, OSError) else None


def _finish(part: Path, state: TrainingState) -> None:
    """Write state and checksums once all shards are there, and rename the folder."""
    (part / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    write_manifest(part)
    final = part.with_name(part.name.removesuffix(PART))
    outdated = part.with_name(f"{final.name}.old{PART}")
    if final.exists():
        # A damaged checkpoint of this step, from before the run went back to an earlier one.
        final.rename(outdated)
    part.rename(final)
    opened = os.open(part.parent, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
    _remove(outdated)


def _ignore_single_process_warning() -> None:
    """torch warns at every save and load that there is only one process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


# Settings that may change when a run is resumed, since they do not change what it learns.
CHANGEABLE = {
    *("run.folder", "run.steps", "run.tokens", "run.device", "run.distributed", "run.compile"),
    *("run.recompute", "run.checkpoint_every", "run.keep", "run.keep_every", "run.log_every"),
    *("run.validate_every", "run.telemetry_every", "run.tensorboard", "data.store"),
    "run.context_parallel",
}


class RunFolder:
    """The paths of checkpoints, metrics, telemetry, tokens and the final model of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.tensorboard = path / "checkpoints", path / "tensorboard"
        self.data, self.model = path / "data", path / "model"
        self.metrics, self.telemetry = path / "metrics.jsonl", path / "telemetry.jsonl"

    def checkpoint_to_resume(
        self, resume_from: str, checkpoints: Checkpoints, *, fresh: bool
    ) -> tuple[Path | None, str]:
        """The checkpoint to resume from, if any, and a warning if newer ones are damaged.

        It is the requested one, which must be intact, or the newest intact one.
        """
        if fresh:
            if resume_from:
                raise ConfigError("--fresh starts again and --from resumes", "give only one")
            return None, ""
        if resume_from:
            return self._requested(resume_from, checkpoints)
        intact, damaged = checkpoints.newest_intact()
        if not damaged:
            return intact, ""
        listed = ", ".join(f"{name} ({why})" for name, why in damaged.items())
        if intact is None:
            raise InputError(
                f"{self.checkpoints} has no intact checkpoint: {listed}",
                "restore one, or start again with --fresh; --from accepts one that only has no "
                f"{MANIFEST}, as in earlier versions",
            )
        return intact, f"damaged in {self.checkpoints}: {listed}; using {intact.name} instead"

    def _requested(self, name: str, checkpoints: Checkpoints) -> tuple[Path, str]:
        paths = [path for path in (self.checkpoints / name, Path(name)) if path.is_dir()]
        if not paths:
            names = ", ".join(path.name for path in checkpoints.all().values()) or "none yet"
            raise InputError(
                f"there is no checkpoint {name}", f"use one of {self.checkpoints}: {names}"
            )
        if not (paths[0] / MANIFEST).exists():
            return paths[0], f"{paths[0]} has no {MANIFEST}, so it may be damaged"
        if why := find_damage(paths[0]):
            raise InputError(f"{paths[0]} is damaged ({why})", REMEDY)
        return paths[0], ""

    def set_aside(self, checkpoints: Checkpoints, after: int, processes: ProcessGroup) -> None:
        """Move what was written after a step to a folder before-N; nothing is deleted."""
        if processes.is_main:
            later = [path for step, path in checkpoints.all().items() if step > after]
            if later or (after < 0 and self.metrics.exists()):
                unused = (self.path / f"before-{number}" for number in count(1))
                aside = next(path for path in unused if not path.exists())
                (aside / "checkpoints").mkdir(parents=True)
                for file in (self.metrics, self.telemetry):
                    if file.exists():
                        shutil.copy2(file, aside / file.name)
                for checkpoint in later:
                    checkpoint.rename(aside / "checkpoints" / checkpoint.name)
        processes.barrier()

    @contextmanager
    def locked(self, processes: ProcessGroup) -> Iterator[None]:
        """Create the folder, and lock it until this run ends."""
        if not processes.is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path / "lock", self._refuse):
            yield

    def _refuse(self) -> None:
        raise InputError(
            f"another run is using {self.path}",
            "wait for it, stop it, or choose another run.folder",
        )


def check_resumable(state: TrainingState, tables: Mapping[str, Any], begun: int) -> None:
    """Raise if the run file changed in a way that would change the run.

    Phases after the first `begun` ones may change, and so may settings in CHANGEABLE.
    """
    before, now = dict(_flat(state.run)), dict(_flat(tables))
    different = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    changed = sorted(key for key in different if not _free(key, begun))
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{', '.join(changed)} changed since this run was started ({key} was "
            f"{before.get(key)!r} and is {now.get(key)!r})",
            f"change it back, resume from a checkpoint with --from step-{state.step}, "
            "or start again with --fresh",
        )


def _free(key: str, begun: int) -> bool:
    if key in CHANGEABLE or key.endswith((".steps", ".tokens")):
        return True
    section, _, rest = key.partition(".")
    return section == "phase" and int(rest.partition(".")[0]) >= begun


def _flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # Earlier versions had other names for some keys.
            path = KEYS.get(str(key), str(key))
            yield from _flat(item, f"{before}.{path}" if before else path)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{before}.{index}")
    else:
        yield before, value


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise if the disk has no space for the checkpoints that are still to be written."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"run.folder={folder}: {existing} is a file", "give the path of a folder")
    files = RunFolder(folder).checkpoints.rglob("*")
    needed -= sum(file.stat().st_size for file in files if file.is_file())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"the checkpoints take about {_size(needed)} and {existing} has {_size(free)} free",
            "free some space, choose another run.folder, or lower run.keep",
        )


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
