"""Logs that survive a kill and go back with their run, and advice on slow settings."""

from pathlib import Path

import pytest
import torch

from manyheads.errors import MissingPackageError
from manyheads.models.build import Model, build
from manyheads.train.loop import reporting
from manyheads.train.loop.reporting import MetricsLog, TensorBoardWriter, performance_advice
from tests.messages import refuses

CPU = torch.device("cpu")


def model(dropout: float) -> Model:
    return build("gpt2", layers=1, width=8, heads=1, vocabulary=9, dropout=dropout)


def test_settings_that_are_slow_on_a_cpu_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_has_bfloat16", lambda: False)
    assert not list(performance_advice(model(0.0), CPU, half=False))
    [dropping] = performance_advice(model(0.1), CPU, half=False)
    assert "model.heads.dropout=0" in dropping
    [rounding] = performance_advice(model(0.0), CPU, half=True)
    assert 'run.precision="float32"' in rounding
    assert not list(performance_advice(model(0.1), torch.device("cuda"), half=True))
    monkeypatch.setattr(reporting, "_has_bfloat16", lambda: True)
    assert not list(performance_advice(model(0.0), CPU, half=True))


def test_going_back_forgets_later_lines_and_half_a_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        log.write({"step": step, "loss": step / 3})
    with log.file.open("a") as file:
        file.write('{"step": 2, "lo')
    log.truncate_after(2)
    assert log.read() == [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 2 / 3}]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": float("nan"), "parts": {"z": float("inf")}})
    assert log.read() == [{"step": 1, "loss": None, "parts": {"z": None}}]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl", enabled=False).write({"step": 1})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    message = "run.tensorboard needs the package tensorboard: run pip install tensorboard."
    with refuses(MissingPackageError, message):
        TensorBoardWriter(tmp_path)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        line = {"step": step, "loss": 4.0 / step, "parts": {"z": 0.5 * step}, "validation": None}
        board.write(line)
    board.close()
    result = EventAccumulator(str(tmp_path)).Reload()
    assert set(result.Tags()["scalars"]) == {"loss", "parts/z"}
    assert [(each.step, each.value) for each in result.Scalars("loss")] == [(1, 4.0), (2, 2.0)]
    assert [each.value for each in result.Scalars("parts/z")] == [0.5, 1.0]
