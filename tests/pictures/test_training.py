import json
from pathlib import Path

import numpy as np
import pytest

from manyheads.errors import InputError, ShapeError
from manyheads.pictures.curves import draw_training, read_heads


def test_telemetry_becomes_a_curve_a_head(tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    lines = [
        {"step": 10, "stack": "main", "induction": [[0.1, 0.2], [0.3]]},
        {"step": 10, "stack": "other", "induction": [[9.0]]},
        {"step": 20, "stack": "main", "induction": [[0.4, None], [0.5]], "loss": 1.0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    steps, found = read_heads(file, ["induction"])
    assert steps == [10, 20]
    assert list(found["induction"]) == ["L0H0", "L0H1", "L1H0"]
    assert found["induction"]["L1H0"].tolist() == [0.3, 0.5]
    assert np.isnan(found["induction"]["L0H1"][1])
    with pytest.raises(InputError, match="tells no entropy"):
        read_heads(file, ["entropy"])


def test_a_curve_must_have_a_value_a_step(tmp_path: Path) -> None:
    panels = {"entropy": {"L0H0": np.zeros(3)}}
    with pytest.raises(ShapeError, match="3 values for 2 steps"):
        draw_training([1, 2], panels, tmp_path / "picture.png")
