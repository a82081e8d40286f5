"""Lines of JSON that survive a kill and go back with their run."""

from pathlib import Path

import pytest

from manyheads.errors import MissingExtraError
from manyheads.train.loop.metrics_log import MetricsLog, TensorBoardWriter
from tests.messages import refuses


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
    message = "run.tensorboard needs the package tensorboard: pip install 'manyheads[tensorboard]'."
    with refuses(MissingExtraError, message):
        TensorBoardWriter(tmp_path)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        line = {"step": step, "loss": 4.0 / step, "parts": {"z": 0.5 * step}, "validation": None}
        board.write(line)
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "parts/z"}
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 4.0), (2, 2.0)]
    assert [each.value for each in found.Scalars("parts/z")] == [0.5, 1.0]
