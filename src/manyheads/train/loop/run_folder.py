"""The folder of a run: what is in it, where to go on from, and what is set aside."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.data.file_lock import held
from manyheads.errors import ConfigError, InputError
from manyheads.train.distributed import Crew
from manyheads.train.loop.checkpoint import Checkpoints, Standing

# What may change between two starts of a run without changing what it learns next.
FREE = {
    *("run.folder", "run.steps", "run.tokens", "run.device", "run.distributed", "run.compile"),
    *("run.recompute", "run.checkpoint_every", "run.keep", "run.keep_every", "run.log_every"),
    *("run.validate_every", "run.telemetry_every", "run.tensorboard", "data.store"),
}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its checkpoints, metrics, telemetry and tokens, and leaves its model."""

    place: Path

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.place / "metrics.jsonl"

    @property
    def telemetry(self) -> Path:
        return self.place / "telemetry.jsonl"

    @property
    def board(self) -> Path:
        return self.place / "tensorboard"

    @property
    def data(self) -> Path:
        return self.place / "data"

    @property
    def model(self) -> Path:
        return self.place / "model"

    def origin(self, since: str, checkpoints: Checkpoints, *, fresh: bool) -> Path | None:
        """The checkpoint to go on from: the one asked for, or the newest, or none."""
        if fresh:
            if since:
                raise ConfigError("--fresh begins anew and --from does not", "give one of both")
            return None
        if not since:
            return checkpoints.newest()
        for place in (self.checkpoints / since, Path(since)):
            if (place / "state.json").is_file():
                return place
        there = ", ".join(f"step-{step}" for step in checkpoints.all()) or "none yet"
        raise InputError(
            f"there is no checkpoint {since}", f"use one of {self.checkpoints}: {there}"
        )

    def set_aside(self, checkpoints: Checkpoints, after: int, crew: Crew) -> None:
        """Move what lies after a step out of the way of the new steps; nothing is lost."""
        if crew.leads:
            later = [place for step, place in checkpoints.all().items() if step > after]
            if later or (after < 0 and self.metrics.exists()):
                aside = self._unused()
                (aside / "checkpoints").mkdir(parents=True)
                for file in (self.metrics, self.telemetry):
                    if file.exists():
                        shutil.copy2(file, aside / file.name)
                for each in later:
                    each.rename(aside / "checkpoints" / each.name)
        crew.meet()

    @contextmanager
    def owned(self, crew: Crew) -> Iterator[None]:
        """Make the folder, and keep other runs out of it until this one ends."""
        if not crew.leads:
            yield
            return
        self.place.mkdir(parents=True, exist_ok=True)
        with held(self.place / "lock", self._refuse):
            yield

    def _refuse(self) -> None:
        raise InputError(
            f"another run is at work in {self.place}",
            "wait for it, stop it, or name another run.folder",
        )

    def _unused(self) -> Path:
        number = 1
        while (self.place / f"before-{number}").exists():
            number += 1
        return self.place / f"before-{number}"


def check_same(standing: Standing, tables: Mapping[str, Any], begun: int) -> None:
    """Refuse to go on with a run file that asks for another run.

    Phases that are not `begun` may change, and so may what does not touch the weights.
    """
    before, now = dict(_flat(standing.run)), dict(_flat(tables))
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
            f"change it back, go on from a checkpoint with --from step-{standing.step}, "
            "or begin anew with --fresh",
        )


def _free(key: str, begun: int) -> bool:
    if key in FREE or key.endswith((".steps", ".tokens")):
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


def check_space(folder: Path, needed: int) -> None:
    """Refuse a run whose checkpoints the disk cannot hold, besides those that it has."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"run.folder={folder}: {there} is a file", "name a folder")
    kept = RunFolder(folder).checkpoints.rglob("*")
    needed -= sum(file.stat().st_size for file in kept if file.is_file())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(
            f"the checkpoints take about {_size(needed)} and {there} has {_size(free)} free",
            "make room, name another run.folder, or keep fewer with run.keep",
        )


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
