"""The curve of what is lost."""

from pathlib import Path

import pytest

from manyheads.errors import ShapeError
from manyheads.pictures.curves import CurveWords, Line, draw_curve

WORDS = CurveWords(title="Heads", subtitle="by ablation", share="share gone", value="loss")


def test_lines_are_drawn_with_their_errors(tmp_path: Path) -> None:
    lines = [
        Line(
            name=f"by {name}",
            shares=[0.25, 0.5],
            values=[2.0, 2.5],
            errors=[0.1, float("nan")],
            chosen=0.25,
        )
        for name in ("ablation", "chance")
    ]
    draw_curve(lines, 1.9, tmp_path / "curve.png", words=WORDS)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_of_odd_lengths_is_refused(tmp_path: Path) -> None:
    line = Line(name="odd", shares=[0.5], values=[1.0, 2.0])
    with pytest.raises(ShapeError, match="1 shares, 2 values"):
        draw_curve([line], 1.0, tmp_path / "curve.png", words=WORDS)
    assert not (tmp_path / "curve.png").exists()
