"""Asked to stop, a run stops soon whatever it is doing, and goes on later as if it had not."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manyheads.data import tokenize
from manyheads.data.store import StoreIndex
from manyheads.progress import Interrupted
from manyheads.train.distributed import ModelWrapper
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file import data_config
from manyheads.train.run_file.run_config import Run, parse_run
from tests.train.tiny import tables, write_corpus


def ask() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def held_out(folder: Path) -> Run:
    settings = tables(folder, steps=6, validate_every=2)
    settings["data"] |= {"validation": 0.5, "micro_batch": 16, "batch": 64}
    return parse_run(settings)


def said(folder: Path) -> list[dict[str, Any]]:
    """All lines, but for how fast it went."""
    lines = MetricsLog(folder / "out/metrics.jsonl").read()
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines
    ]


def counted(function: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """The function, in whose nth call somebody asks to stop."""

    def call(*inputs: Any, **more: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == at:
            ask()
        return function(*inputs, **more)

    return call


@pytest.mark.parametrize(("look", "step"), [(3, 2), (-2, 6)])
def test_a_run_interrupted_while_validating_validates_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int, step: int
) -> None:
    write_corpus(tmp_path, documents=24)
    looks: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(ModelWrapper, "evaluate", counted(ModelWrapper.evaluate, looks, at=0))
        train(held_out(tmp_path), progress=False)
    whole = said(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    at = look if look > 0 else len(looks) + look
    looks.clear()
    with monkeypatch.context() as patched:
        patched.setattr(ModelWrapper, "evaluate", counted(ModelWrapper.evaluate, looks, at=at))
        finished = train(held_out(tmp_path), progress=False)
    assert (finished.exit_code, finished.state.step, finished.saved) == (130, step, None)
    assert len(looks) == at
    assert len(said(tmp_path)) < len(whole)
    # Stopped again before its first batch is done, it owes no less.
    with monkeypatch.context() as patched:
        patched.setattr(ModelWrapper, "evaluate", counted(ModelWrapper.evaluate, [], at=1))
        assert train(held_out(tmp_path), progress=False).state.step == step
    assert train(held_out(tmp_path), progress=False).saved is not None
    assert said(tmp_path) == whole


def test_a_phase_that_was_stopped_at_its_end_is_validated_on_its_own_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, documents=24)
    settings = tables(tmp_path, steps=0)
    settings["data"] |= {"validation": 0.5, "micro_batch": 16, "batch": 64}
    settings["phase"] = [
        {"name": "one", "steps": 2},
        {"name": "other", "steps": 2, "data": {"validation": 0.3}},
    ]
    train(parse_run(settings), progress=False)
    whole = said(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(ModelWrapper, "evaluate", counted(ModelWrapper.evaluate, [], at=2))
        assert train(parse_run(settings), progress=False).state.step == 2
    train(parse_run(settings), progress=False)
    assert said(tmp_path) == whole


def test_stopped_while_tokenizing_it_keeps_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, documents=24)
    monkeypatch.setattr(data_config, "write_store", partial(tokenize.write_store, part_size=500))
    parts: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "_write_part", counted(tokenize._write_part, parts, at=3))
        with pytest.raises(Interrupted, match="interrupted while tokenizing") as stopped:
            train(held_out(tmp_path), progress=False)
    assert stopped.value.exit_code == 130
    rest: list[int] = []
    monkeypatch.setattr(tokenize, "_write_part", counted(tokenize._write_part, rest, at=0))
    train(held_out(tmp_path), progress=False)
    [place] = tmp_path.glob("out/data/*/index.json")
    # Two were written before it was stopped, in the midst of the third.
    assert len(StoreIndex.read(place.parent).parts) == len(rest) + 2
    monkeypatch.undo()
    (tmp_path / "out").rename(tmp_path / "stopped")
    train(held_out(tmp_path), progress=False)
    tokens = [next((tmp_path / run).rglob("tokens.bin")) for run in ("out", "stopped")]
    assert tokens[0].read_bytes() == tokens[1].read_bytes()
