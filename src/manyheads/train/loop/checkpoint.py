"""The whole state of a run in safetensors and JSON, written beside the work, whole or not at all.

torch.distributed.checkpoint writes and reads the tensors, each process its own shards, so that
another number of processes can read them again. Its own file format keeps a pickle in .metadata;
its safetensors storage keeps none and is the one used here. All else is in state.json.
"""

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.optim import Optimizer

from manyheads.errors import InputError, TrainingError
from manyheads.train.distributed import Crew

STATE = "state.json"
PART = ".part"
ANOTHER = "remove it to go on from the one before, or name another with --from"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step whose loss or gradient was no number, and where the loss was none."""

    step: int
    micro_batches: tuple[int, ...]

    def __str__(self) -> str:
        if not self.micro_batches:
            return f"step {self.step} (gradient)"
        listed = ", ".join(map(str, self.micro_batches))
        return f"step {self.step} (micro-batch {listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a run has come: all of its state that is no tensor.

    Random numbers are drawn from the seed, the step and the micro-batch, so there is no random
    state to keep. `place` is the place in the data that `data` describes, and `run` is the run
    file that it was made by.
    """

    step: int = 0
    tokens: int = 0
    skipped: tuple[Skipped, ...] = ()
    in_a_row: int = 0
    kept: bool = False
    place: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, float | int] = field(default_factory=dict)


def read_standing(checkpoint: Path) -> Standing:
    """What a checkpoint says of itself."""
    try:
        said = json.loads((checkpoint / STATE).read_text("utf-8"))
        skipped = [Skipped(each["step"], tuple(each["micro_batches"])) for each in said["skipped"]]
        return Standing(**(said | {"skipped": tuple(skipped)}))
    except (OSError, ValueError) as error:
        why = str(error)
    except (KeyError, TypeError):
        why = f"{STATE} does not say where it stands"
    raise InputError(f"{checkpoint} is no checkpoint of a run ({why})", ANOTHER)


def tensors_of(model: nn.Module, optimiser: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of the state by name, and the numbers that the optimiser keeps as such."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    numbers: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimiser.state.get(parameter, {}).items():
            holder = tensors if isinstance(value, Tensor) else numbers
            holder[f"optimiser.{name}.{entry}"] = value
    return tensors, numbers


def check_stored(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """What the checkpoint has by name, if its weights are those of the model, each and all."""
    try:
        stored = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise InputError(f"{checkpoint} is damaged ({error})", ANOTHER) from None
    if not stored:
        raise InputError(f"{checkpoint} holds no weights", ANOTHER)
    same = "go on with the model and the regularisers that the run was started with"
    state = model.state_dict()
    for name, tensor in state.items():
        found = getattr(stored.get(f"model.{name}"), "size", None)
        if found is None or tuple(found) != tuple(tensor.shape):
            has = "nothing" if found is None else str(tuple(found))
            raise InputError(
                f"{checkpoint} has {has} for {name} and the model asks for {tuple(tensor.shape)}",
                same,
            )
    for name in (name.removeprefix("model.") for name in stored if name.startswith("model.")):
        if name not in state:
            raise InputError(f"{checkpoint} has {name}, for which the model has no place", same)
    return dict(stored)


def restore(
    checkpoint: Path, model: nn.Module, optimiser: Optimizer | None, crew: Crew
) -> Standing:
    """Bring model and optimiser to where the checkpoint found them, in place."""
    standing = read_standing(checkpoint)
    stored = check_stored(checkpoint, model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    entries = {} if optimiser is None else _room_for_entries(model, optimiser, stored)
    tensors |= {name: tensor for name, (_, _, tensor) in entries.items()}
    _silence()
    reader = HuggingFaceStorageReader(str(checkpoint))
    load_sharded(tensors, storage_reader=reader, process_group=crew.saving, no_dist=crew.alone)
    for parameter, entry, tensor in entries.values():
        assert optimiser is not None
        optimiser.state[parameter][entry] = tensor
    if optimiser is not None:
        _restore_numbers(model, optimiser, standing.numbers)
    return standing


def _room_for_entries(
    model: nn.Module, optimiser: Optimizer, stored: Mapping[str, Any]
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """Empty tensors for what the optimiser kept of each parameter, where it would keep them."""
    groups = {each: group for group in optimiser.param_groups for each in group["params"]}
    rooms = {}
    for name, parameter in model.named_parameters():
        prefix = f"optimiser.{name}."
        for key in (key for key in stored if key.startswith(prefix)):
            size, dtype = stored[key].size, stored[key].properties.dtype
            if tuple(size) == tuple(parameter.shape):
                room = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                # As torch's own: the count of steps is on the host unless the kernel reads it.
                group = groups[parameter]
                here = group.get("fused") or group.get("capturable")
                room = torch.empty(size, dtype=dtype, device=parameter.device if here else "cpu")
            rooms[key] = (parameter, key.removeprefix(prefix), room)
    return rooms


def _restore_numbers(model: nn.Module, optimiser: Optimizer, numbers: Mapping[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        prefix = f"optimiser.{name}."
        for key, number in numbers.items():
            if key.startswith(prefix):
                optimiser.state[parameter][key.removeprefix(prefix)] = number


class Checkpoints:
    """The checkpoints of a run: the last `keep`, and those marked to be kept.

    Saving takes a snapshot and writes it in a thread, to a folder that gets its name when whole.
    """

    def __init__(self, folder: Path, crew: Crew, keep: int) -> None:
        self.folder = folder
        self.crew = crew
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def clean(self) -> None:
        """Drop what a killed run left half written."""
        if self.crew.leads and self.folder.exists():
            for half in self.folder.glob(f"*{PART}"):
                shutil.rmtree(half)
        self.crew.meet()

    def all(self) -> dict[int, Path]:
        """Whole checkpoints by step, oldest first."""
        found = {}
        for place in self.folder.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", place.name)
            if match and (place / STATE).is_file():
                found[int(match[1])] = place
        return dict(sorted(found.items()))

    def newest(self) -> Path | None:
        every = list(self.all().values())
        found: Path | None = self.crew.agree(every[-1] if every else None)
        return found

    def save(self, tensors: Mapping[str, Tensor], standing: Standing) -> None:
        """Take a snapshot now, write it while the work goes on."""
        self.wait()
        if self.crew.agree(standing.step in self.all()):
            return
        snapshot = BlockingAsyncStager().stage(dict(tensors))
        part = self.folder / f"step-{standing.step}{PART}"
        if self.crew.leads:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.crew.meet()
        _silence()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, standing, part), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the last snapshot is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise self._told(error) from error

    def _write(self, snapshot: dict[str, Any], standing: Standing, part: Path) -> None:
        try:
            writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
            save_sharded(
                snapshot,
                storage_writer=writer,
                process_group=self.crew.saving,
                no_dist=self.crew.alone,
            )
            if self.crew.leads:
                _finish(part, standing)
                self._drop_old()
        # Whatever it is, it belongs to the thread that waits.
        except BaseException as error:
            self._error = error
            if self.crew.leads:
                shutil.rmtree(part, ignore_errors=True)

    def _told(self, error: BaseException) -> BaseException:
        """A disk that is full, or will not take a file, is no mistake of ours."""
        why = _first_of_the_system(error)
        if why is None:
            return error
        whole = list(self.all().values())
        remedy = "make room there, or mend it"
        if whole:
            remedy += f"; the same command goes on from {whole[-1].name}, which is whole"
        return TrainingError(f"{self.folder} took no checkpoint ({why.strerror or why})", remedy)

    def _drop_old(self) -> None:
        for old in list(self.all().values())[: -self.keep]:
            if not read_standing(old).kept:
                # Renamed first: half a checkpoint must not look like a whole one.
                shutil.rmtree(old.rename(old.with_name(old.name + PART)))


def _first_of_the_system(error: BaseException) -> OSError | None:
    """What the system refused; torch tells it by the process that met it."""
    if isinstance(error, CheckpointException):
        found = (_first_of_the_system(each) for each, _ in error.failures.values())
        return next(filter(None, found), None)
    return error if isinstance(error, OSError) else None


def _finish(part: Path, standing: Standing) -> None:
    """All shards are there: say what they are, and give the folder its name."""
    with (part / STATE).open("w", encoding="utf-8") as file:
        json.dump(asdict(standing), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.rename(part.with_name(part.name.removesuffix(PART)))
    opened = os.open(part.parent, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _silence() -> None:
    """Being alone is no mistake, and torch warns of it at every save and load."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
