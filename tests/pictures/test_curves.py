"""Curves are drawn with their errors, and series of unequal lengths are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from manyheads.errors import InputError, ShapeError
from manyheads.pictures import (
    Curve,
    CurveLabels,
    ScalingCurves,
    ScalingLabels,
    draw_curve,
    draw_scaling,
    draw_training,
    read_telemetry,
)
from tests.messages import refuses

LABELS = CurveLabels(
    title="Heads", subtitle="by ablation", xlabel="fraction removed", ylabel="loss"
)
SCALING = ScalingLabels(title="Зачем √d", size="размер", plain="q·k", scaled="q·k / √d")


def test_lines_are_drawn_with_their_errors(tmp_path: Path) -> None:
    lines = [
        Curve(
            name=f"by {name}",
            fractions=[0.25, 0.5],
            values=[2.0, 2.5],
            errors=[0.1, float("nan")],
            chosen=0.25,
        )
        for name in ("ablation", "chance")
    ]
    draw_curve(lines, 1.9, tmp_path / "curve.png", labels=LABELS)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_of_odd_lengths_is_refused(tmp_path: Path) -> None:
    line = Curve(name="odd", fractions=[0.5], values=[1.0, 2.0])
    with pytest.raises(ShapeError, match="1 fractions, 2 values"):
        draw_curve([line], 1.0, tmp_path / "curve.png", labels=LABELS)
    assert not (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    "line", ["[" * 50_000, "5", '{"step": "x"}', "\udce9", '{"step": 1, "induction": [5]}']
)
def test_damaged_telemetry_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    file.write_bytes(line.encode("utf-8", "surrogateescape"))
    with refuses(InputError, str(file), "telemetry.jsonl of a run"):
        read_telemetry(file, ["induction"])


def test_telemetry_becomes_a_curve_per_head(tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    lines = [
        {"step": 10, "stack": "main", "induction": [[0.1, 0.2], [0.3]]},
        {"step": 10, "stack": "other", "induction": [[9.0]]},
        {"step": 20, "stack": "main", "induction": [[0.4, None], [0.5]], "loss": 1.0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    steps, result = read_telemetry(file, ["induction"])
    assert steps == [10, 20]
    assert list(result["induction"]) == ["L0H0", "L0H1", "L1H0"]
    assert result["induction"]["L1H0"].tolist() == [0.3, 0.5]
    assert np.isnan(result["induction"]["L0H1"][1])
    with pytest.raises(InputError, match="no measure entropy"):
        read_telemetry(file, ["entropy"])


def test_a_curve_must_have_a_value_per_step(tmp_path: Path) -> None:
    panels = {"entropy": {"L0H0": np.zeros(3)}}
    with pytest.raises(ShapeError, match="3 values for 2 steps"):
        draw_training([1, 2], panels, tmp_path / "picture.png")


def test_every_quantity_has_a_panel(tmp_path: Path) -> None:
    panels = [
        ScalingCurves(title="дисперсия", plain=[8.0, 16.0], scaled=[1.0, 1.0], logarithmic=True),
        ScalingCurves(title="вес", plain=[0.4, 0.6], scaled=[0.1, 0.1]),
    ]
    draw_scaling([8, 16], panels, tmp_path / "scaling.png", labels=SCALING)
    assert imread(tmp_path / "scaling.png").shape[:2] == (600, 1600)
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.png"]


def test_a_curve_of_another_length_is_refused(tmp_path: Path) -> None:
    panels = [ScalingCurves(title="вес", plain=[0.4], scaled=[0.1, 0.1])]
    with pytest.raises(ShapeError, match="'вес'"):
        draw_scaling([8, 16], panels, tmp_path / "scaling.png", labels=SCALING)
    assert list(tmp_path.iterdir()) == []
