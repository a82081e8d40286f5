"""The curves of 1/sqrt(d) become a picture."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from manyheads.errors import ShapeError
from manyheads.pictures.curves import ScalingCurves, ScalingWords, draw_scaling

WORDS = ScalingWords(title="Зачем √d", size="размер", plain="q·k", scaled="q·k / √d")


def test_a_panel_a_quantity(tmp_path: Path) -> None:
    panels = [
        ScalingCurves(title="дисперсия", plain=[8.0, 16.0], scaled=[1.0, 1.0], logarithmic=True),
        ScalingCurves(title="вес", plain=[0.4, 0.6], scaled=[0.1, 0.1]),
    ]
    draw_scaling([8, 16], panels, tmp_path / "scaling.png", words=WORDS)
    assert imread(tmp_path / "scaling.png").shape[:2] == (600, 1600)
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.png"]


def test_a_curve_of_another_length_is_refused(tmp_path: Path) -> None:
    panels = [ScalingCurves(title="вес", plain=[0.4], scaled=[0.1, 0.1])]
    with pytest.raises(ShapeError, match="'вес'"):
        draw_scaling([8, 16], panels, tmp_path / "scaling.png", words=WORDS)
    assert list(tmp_path.iterdir()) == []
