"""Runs that are killed and taken up again, each in a process of its own."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyheads.train.loop import checkpoint
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.loop.train_step import Updater
from tests.forked import forked
from tests.train.tiny import parse_run, tables, write_corpus

STEPS = 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_step(number: int) -> None:
    update = Updater.begin

    def begin(self: Updater, settings: Any, **more: Any) -> Any:
        if settings.number == number:
            die()
        return update(self, settings, **more)

    Updater.begin = begin  # type: ignore[assignment, method-assign]


def with_half_a_shard(nth: int) -> None:
    """The nth checkpoint gets a file that is cut off."""
    saves = iter(range(1, 99))
    save = checkpoint.save_sharded

    def cut(tensors: Any, **more: Any) -> Any:
        result = save(tensors, **more)
        if next(saves) == nth:
            folder = Path(more["storage_writer"].path)
            for file in folder.glob("*.safetensors"):
                os.truncate(file, file.stat().st_size // 2)
            die()
        return result

    checkpoint.save_sharded = cut


def before_its_name(nth: int) -> None:
    saves = iter(range(1, 99))
    finish = checkpoint._finish

    def unfinished(part: Path, state: Any) -> None:
        if next(saves) == nth:
            (part / checkpoint.STATE).write_text('{"step": 6, ')
            die()
        finish(part, state)

    checkpoint._finish = unfinished


def within_its_manifest(nth: int) -> None:
    """The nth checkpoint has half of its checksums, and no name yet."""
    saves = iter(range(1, 99))
    write = checkpoint.write_manifest

    def half(folder: Path) -> None:
        write(folder)
        if next(saves) == nth:
            os.truncate(folder / "manifest.json", 60)
            die()

    checkpoint.write_manifest = half


def while_a_damaged_one_is_replaced(place: Path) -> None:
    """The damaged checkpoint of step 6 is away, and the new one has no name yet."""
    rename = Path.rename

    def between(path: Path, target: Path) -> Path:
        result = rename(path, target)
        if path.name == "step-6" and target.name.endswith(checkpoint.PART):
            die()
        return result

    (place / "checkpoints/step-6").mkdir(parents=True)
    Path.rename = between  # type: ignore[method-assign, assignment]


def while_old_ones_go() -> None:
    drop = checkpoint.shutil.rmtree

    def half(place: Path, **more: Any) -> None:
        if place.name.endswith(checkpoint.PART) and (place / checkpoint.STATE).is_file():
            next(place.glob("*.safetensors")).unlink()
            die()
        drop(place, **more)

    checkpoint.shutil.rmtree = half  # type: ignore[assignment]


KILLS: dict[str, Callable[[Path], None]] = {
    "before the first step": lambda _: before_step(0),
    "before any checkpoint": lambda _: before_step(2),
    "just after a checkpoint": lambda _: before_step(4),
    "before the last step": lambda _: before_step(STEPS - 1),
    "with half a shard": lambda _: with_half_a_shard(2),
    "before its name": lambda _: before_its_name(2),
    "within its manifest": lambda _: within_its_manifest(2),
    "while a damaged one is replaced": while_a_damaged_one_is_replaced,
    "while old ones go": lambda _: while_old_ones_go(),
}


def go(place: Path, kill: Callable[[Path], None] | None = None) -> Callable[[], None]:
    def work() -> None:
        if kill is not None:
            kill(place)
        settings = tables(place.parent, dropout=0.1, steps=STEPS, keep=1)
        settings["model"]["change"]["layers"] = 1
        settings["data"] |= {"batch": 64, "micro_batch": 32}
        settings["run"]["folder"] = str(place)
        settings["data"]["store"] = str(place / "data")
        train(parse_run(settings), progress=False)

    return work


def losses(place: Path) -> list[float]:
    return [line["loss"] for line in MetricsLog(place / "metrics.jsonl").read()]


def kill_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Losses of a whole run, and of runs killed at several points and taken up again."""
    write_corpus(folder, documents=40)
    # In this process, which prepares for the others what a first run prepares.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    go(folder / "whole")()
    torch.set_num_threads(threads)
    result: dict[str, dict[str, Any]] = {"whole": {"losses": losses(folder / "whole"), "codes": []}}
    for name, kill in KILLS.items():
        place = folder / name.replace(" ", "-")
        codes = [forked(go(place, kill)), forked(go(place))]
        same = (place / "model/model.safetensors").read_bytes() == (
            folder / "whole/model/model.safetensors"
        ).read_bytes()
        result[name] = {"losses": losses(place), "codes": codes, "same": same}
    return result
