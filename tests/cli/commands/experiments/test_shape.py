"""manyheads shape: a table of shapes, and wrong use in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.main import main
from manyheads.train import shape_search

SMALL = ["shape", "--parameters", "1M", "--vocabulary", "256", "--device", "cpu"]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_search, "SECONDS", 0.0)


def test_the_best_shapes_are_predicted_and_timed(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "shapes.json"
    assert (
        main([*SMALL, "--top", "3", "--tokens", "64", "--max-length", "16", "--json", str(out)])
        == 0
    )
    printed = capsys.readouterr().out
    assert "measured, ms" in printed
    assert "rtx4090, ms" in printed
    assert "on cpu correlate by" in printed
    shapes = json.loads(out.read_text("utf-8"))
    assert [shape["measured"] is not None for shape in shapes[:4]] == [True, True, True, False]
    assert all(0.97e6 <= shape["parameters"] <= 1.03e6 for shape in shapes)


def test_modernbert_base_is_placed_among_its_like(capsys: Any) -> None:
    words = ["shape", "--devices", "h200, a100", "--layers", "22", "--no-timing"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ModernBERT-base, 22 x 768 x 1,152, is number" in printed
    assert "measured" not in printed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--parameters", "many"], "--parameters 'many' is not a count: write 150M"),
        (["--devices", "h300"], "--devices has 'h300': use t4"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--max-length", "0"], "--max-length must be at least 1"),
        (["--parameters", "10k"], "no shape has about 10,000 parameters"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], reason: str, capsys: Any) -> None:
    assert main(["shape", *words, "--no-timing"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
