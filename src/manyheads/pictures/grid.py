"""Many heads side by side as small maps: a layer, or a whole model with a row a layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from manyheads.errors import ShapeError
from manyheads.pictures.head_map import paint
from manyheads.pictures.paper import Look, drawing, head_room, write_picture

__all__ = ["draw_grid"]

# Cells a side that are drawn; more would not be seen.
MOST_CELLS = 160
WIDEST = 12
# Inches of a map, by how many stand in a row.
SIZES = ((4, 2.7), (8, 1.75), (WIDEST, 1.25))

Pattern = Float[np.ndarray, "t s"]


def draw_grid(
    layers: Sequence[Sequence[Pattern]],
    path: Path,
    *,
    names: Mapping[tuple[int, int], str] | None = None,
    numbers: Sequence[int] | None = None,
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write a row a layer, and of a single layer up to four maps a row.

    `names` are written above maps by (row, head), as in {(0, 3): "induction"}; `numbers` are those
    of the layers, from 0 on where they are left out. Layers may differ in heads.
    """
    if not layers or not all(len(layer) for layer in layers):
        raise ShapeError("there is no head to draw", "give one or more a layer")
    numbers = range(len(layers)) if numbers is None else numbers
    cells = [
        (row, head, pattern)
        for row, layer in enumerate(layers)
        for head, pattern in enumerate(layer)
    ]
    single = len(layers) == 1
    columns = min(4, len(layers[0])) if single else max(len(layer) for layer in layers)
    rows = -(-len(layers[0]) // columns) if single else len(layers)
    side = next((size for most, size in SIZES if columns <= most), SIZES[-1][1])
    size = (columns * side + 0.5, rows * (side + 0.3) + 0.3 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for row, head, pattern in cells:
            place = (head // columns, head % columns) if single else (row, head)
            axes = grid[place]
            axes.set_visible(True)
            paint(axes, _smaller(pattern), paper)
            axes.set_xticks([])
            axes.set_yticks([])
            kind = (names or {}).get((row, head), "")
            small = 9.5 if columns <= 8 else 7.5
            name = f"L{numbers[row]}H{head}"
            axes.set_title(name, loc="left", size=small, weight="bold", color=paper.ink, pad=3)
            if kind:
                short = kind if len(kind) <= 8 * side else kind[: int(8 * side) - 1] + "…"
                axes.set_title(short, loc="right", size=small - 1, color=paper.quiet, pad=3)
        write_picture(figure, path)


def _smaller(pattern: Pattern) -> Pattern:
    """A cell is the largest weight in it, so that thin lines stay."""
    for axis in (0, 1):
        count = pattern.shape[axis]
        if count > MOST_CELLS:
            edges = np.linspace(0, count, MOST_CELLS + 1).astype(int)[:-1]
            pattern = np.maximum.reduceat(pattern, edges, axis=axis)
    return pattern
