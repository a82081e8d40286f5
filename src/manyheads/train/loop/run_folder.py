"""The folder of a run: its files, where to resume, what may change when resuming."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.atomic_write import exclusive_lock
from manyheads.errors import ConfigError, InputError
from manyheads.train.distributed import ProcessGroup
from manyheads.train.loop.checkpoint import Checkpoints, TrainingState

# Settings that may change when a run is resumed, since they do not change what it learns.
CHANGEABLE = {
    *("run.folder", "run.steps", "run.tokens", "run.device", "run.distributed", "run.compile"),
    *("run.recompute", "run.checkpoint_every", "run.keep", "run.keep_every", "run.log_every"),
    *("run.validate_every", "run.telemetry_every", "run.tensorboard", "data.store"),
}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of checkpoints, metrics, telemetry, tokens and the final model of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def checkpoint_to_resume(
        self, resume_from: str, checkpoints: Checkpoints, *, fresh: bool
    ) -> Path | None:
        """The checkpoint to resume from: the requested one, or the newest, or none."""
        if fresh:
            if resume_from:
                raise ConfigError(
                    "--fresh starts again and --from resumes", "give only one of them"
                )
            return None
        if not resume_from:
            return checkpoints.newest()
        for place in (self.checkpoints / resume_from, Path(resume_from)):
            if (place / "state.json").is_file():
                return place
        there = ", ".join(f"step-{step}" for step in checkpoints.all()) or "none yet"
        raise InputError(
            f"there is no checkpoint {resume_from}", f"use one of {self.checkpoints}: {there}"
        )

    def set_aside(self, checkpoints: Checkpoints, after: int, processes: ProcessGroup) -> None:
        """Move what was written after a step to a folder before-N; nothing is deleted."""
        if processes.is_main:
            later = [place for step, place in checkpoints.all().items() if step > after]
            if later or (after < 0 and self.metrics.exists()):
                aside = self._unused()
                (aside / "checkpoints").mkdir(parents=True)
                for file in (self.metrics, self.telemetry):
                    if file.exists():
                        shutil.copy2(file, aside / file.name)
                for each in later:
                    each.rename(aside / "checkpoints" / each.name)
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

    def _unused(self) -> Path:
        number = 1
        while (self.path / f"before-{number}").exists():
            number += 1
        return self.path / f"before-{number}"


def check_resumable(state: TrainingState, tables: Mapping[str, Any], begun: int) -> None:
    """Raise if the run file changed in a way that would change the run.

    Phases after the first `begun` ones may change, and so may settings in CHANGEABLE.
    """
    before, now = dict(_flat(state.run)), dict(_flat(tables))
    changed = [
        key
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _free(key, begun)
    ]
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
        for key, each in value.items():
            yield from _flat(each, f"{before}.{key}" if before else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{before}.{index}")
    else:
        yield before, value


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise if the disk has no space for the checkpoints that are still to be written."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"run.folder={folder}: {there} is a file", "give the path of a folder")
    kept = RunFolder(folder).checkpoints.rglob("*")
    needed -= sum(file.stat().st_size for file in kept if file.is_file())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(
            f"the checkpoints take about {_size(needed)} and {there} has {_size(free)} free",
            "free some space, choose another run.folder, or lower run.keep",
        )


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
