"""Arrays that do not fit together are refused by name."""

from pathlib import Path

import numpy as np
import pytest

from manyheads.errors import ShapeError
from manyheads.pictures import (
    draw_atlas,
    draw_bars,
    draw_circuit,
    draw_gates,
    draw_grid,
    draw_head_map,
    draw_layer_maps,
    draw_over_image,
    draw_over_text,
    draw_similarity,
)

NOWHERE = Path("nowhere.png")


def test_a_token_too_few() -> None:
    with pytest.raises(ShapeError, match="2 queries and 2 keys"):
        draw_head_map(np.eye(2), ["one"], NOWHERE)
    with pytest.raises(ShapeError, match="one per token"):
        draw_over_text(["one"], {"rollout": np.ones(2)}, NOWHERE)


def test_maps_of_other_shapes() -> None:
    with pytest.raises(ShapeError, match="2 tokens"):
        draw_layer_maps({"residual": np.ones((4, 3))}, ["a", "b"], NOWHERE)
    with pytest.raises(ShapeError, match="one shape"):
        draw_layer_maps({"a": np.ones((4, 1)), "b": np.ones((3, 1))}, ["a"], NOWHERE)


def test_a_name_too_few() -> None:
    with pytest.raises(ShapeError, match="1 names, 2 values"):
        draw_bars(["L0H0"], [1.0, 2.0], NOWHERE)
    with pytest.raises(ShapeError, match="1 names"):
        draw_similarity(np.eye(2), ["L0H0"], NOWHERE)
    with pytest.raises(ShapeError, match="1 names for 2 heads"):
        draw_over_image(np.zeros((4, 4, 3)), np.zeros((2, 2, 2)), NOWHERE, names=["one"])
    with pytest.raises(ShapeError, match="one label per head"):
        draw_atlas([[1.0, 2.0]], NOWHERE, labels=[["one"]])


def test_nothing_to_draw() -> None:
    with pytest.raises(ShapeError, match="no head"):
        draw_grid([], NOWHERE)
    with pytest.raises(ShapeError, match="no head"):
        draw_atlas([[]], NOWHERE)
    with pytest.raises(ShapeError, match="no edge"):
        draw_circuit([], NOWHERE)
    with pytest.raises(ShapeError, match="no gate"):
        draw_gates([[]], NOWHERE)


def test_a_head_is_in_one_cluster() -> None:
    with pytest.raises(ShapeError, match="two clusters"):
        draw_similarity(np.eye(2), ["a", "b"], NOWHERE, clusters=[[0, 1], [1]])
