"""How far gates stand open: a histogram a head, layers down."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, drawing, head_room, write_picture

__all__ = ["draw_gates"]

BINS = 40
CLOSED = 0.1


def draw_gates(
    layers: Sequence[Sequence[Float[np.ndarray, " n"]]],
    path: Path,
    *,
    largest: float = 1.0,
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write a row a layer: the values of each head's gate, and how many are shut, below 0.1."""
    if not layers or not all(len(layer) for layer in layers):
        raise ShapeError("there is no gate to draw", "give one or more a layer")
    columns = max(len(layer) for layer in layers)
    side = 1.55 if columns <= 8 else 1.3
    size = (columns * side + 0.6, len(layers) * 1.35 + 0.5 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        grid = figure.subplots(len(layers), columns, squeeze=False, sharex=True)
        for axes in grid.flat:
            axes.set_visible(False)
        for number, layer in enumerate(layers):
            for head, values in enumerate(layer):
                axes = grid[number, head]
                axes.set_visible(True)
                counts, edges = np.histogram(values, bins=BINS, range=(0, largest))
                axes.stairs(counts, edges, fill=True, color=paper.colours[0])
                axes.axvline(CLOSED, color=paper.colours[1], linewidth=1)
                axes.set_yticks([])
                axes.set_xlim(0, largest)
                axes.set_xticks([0, largest / 2, largest])
                axes.spines[["left", "top", "right"]].set_visible(False)
                axes.tick_params(length=0, labelsize=8, labelcolor=paper.quiet)
                closed = float(np.mean(values < CLOSED))
                name = f"L{number}H{head}"
                axes.set_title(name, loc="left", size=8.5, weight="bold", color=paper.ink, pad=2)
                shut = f"{closed:.0%} shut"
                axes.set_title(shut, loc="right", size=7.5, color=paper.quiet, pad=2)
        write_picture(figure, path)
