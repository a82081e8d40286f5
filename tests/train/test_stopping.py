"""Asked to stop, a run stops soon whatever it is doing, and goes on later as if it had not."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manyheads.data import writing
from manyheads.data.store import Index
from manyheads.train import feeding
from manyheads.train.entrance import Entrance
from manyheads.train.journal import Journal
from manyheads.train.run import Run, run_of
from manyheads.train.session import train
from manyheads.train.stopping import Stop, Stopped, at_once, stop_asked
from tests.train.tiny import tables, write_corpus


def ask() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_only_what_may_be_broken_off_is() -> None:
    assert not stop_asked()
    with Stop() as stop:
        ask()
        assert stop_asked()
        with pytest.raises(Stopped, match="stopped while reading"), at_once("reading"):
            pytest.fail("it was asked before")
    assert stop.code == 130
    assert not stop_asked()


def test_a_second_signal_ends_at_once() -> None:
    with Stop():
        ask()
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_without_a_run_nothing_is_broken_off_but_by_python_itself() -> None:
    with at_once("reading"):
        assert Stop.current is None


def held_out(folder: Path) -> Run:
    asked = tables(folder, steps=6, validate_every=2)
    asked["data"] |= {"validation": 0.5, "micro_batch": 16, "batch": 64}
    return run_of(asked)


def losses(folder: Path) -> dict[int, float]:
    lines = Journal(folder / "out/metrics.jsonl").read()
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def counted(function: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """The function, in whose nth call somebody asks to stop."""

    def call(*given: Any, **more: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == at:
            ask()
        return function(*given, **more)

    return call


def test_stopped_while_validating_it_ends_after_a_step_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, documents=60)
    train(held_out(tmp_path), shown=False)
    whole = losses(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    looks: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(Entrance, "look", counted(Entrance.look, looks, at=3))
        finished = train(held_out(tmp_path), shown=False)
    assert (finished.code, finished.standing.step, finished.saved) == (130, 3, None)
    assert len(looks) == 3
    lines = Journal(tmp_path / "out/metrics.jsonl").read()
    [seen] = [line["validation"] for line in lines if "validation" in line]
    assert 0 < seen["share"] < 0.5
    train(held_out(tmp_path), shown=False)
    assert losses(tmp_path) == whole


def test_stopped_while_tokenising_it_keeps_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, documents=60)
    monkeypatch.setattr(feeding, "write_store", partial(writing.write_store, part=500))
    parts: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(writing, "_write_part", counted(writing._write_part, parts, at=3))
        with pytest.raises(Stopped, match="stopped while tokenising") as stopped:
            train(held_out(tmp_path), shown=False)
    assert stopped.value.code == 130
    rest: list[int] = []
    monkeypatch.setattr(writing, "_write_part", counted(writing._write_part, rest, at=0))
    train(held_out(tmp_path), shown=False)
    [place] = tmp_path.glob("out/data/*/index.json")
    # Two were written before it was stopped, in the midst of the third.
    assert len(Index.read(place.parent).parts) == len(rest) + 2
    monkeypatch.undo()
    (tmp_path / "out").rename(tmp_path / "stopped")
    train(held_out(tmp_path), shown=False)
    tokens = [next((tmp_path / run).rglob("tokens.bin")) for run in ("out", "stopped")]
    assert tokens[0].read_bytes() == tokens[1].read_bytes()
