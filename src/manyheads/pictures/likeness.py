"""How alike each two heads are, heads of a group side by side and framed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.patches import Rectangle

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, drawing, head_room, thinned, write_picture

__all__ = ["draw_likeness"]

MOST_LABELS = 48


def draw_likeness(
    likeness: Float[np.ndarray, "h h"],
    names: Sequence[str],
    path: Path,
    *,
    clusters: Sequence[Sequence[int]] = (),
    measure: str = "likeness",
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write the matrix; `clusters` are groups of places that are brought together."""
    heads = len(names)
    if likeness.shape != (heads, heads) or not heads:
        raise ShapeError(
            f"a matrix of {likeness.shape} has {heads} names", "give a square, and a name a row"
        )
    grouped = [place for group in clusters for place in group]
    if len(set(grouped)) != len(grouped) or not set(grouped) <= set(range(heads)):
        raise ShapeError("a head is in two clusters, or is none of these", "name each once")
    order = [*grouped, *(place for place in range(heads) if place not in set(grouped))]
    side = max(3.4, 0.2 * min(heads, MOST_LABELS))
    size = (side + 2.0, side + 1.0 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        axes = figure.subplots()
        table = likeness[np.ix_(order, order)]
        image = axes.imshow(table, cmap=paper.scale, vmin=0, vmax=1, interpolation="nearest")
        start = 0
        for place, group in enumerate(clusters):
            corner = (start - 0.5, start - 0.5)
            colour = paper.colours[1 + place % (len(paper.colours) - 1)]
            frame = Rectangle(corner, len(group), len(group), fill=False, ec=colour, lw=2.2)
            axes.add_patch(frame)
            start += len(group)
        shown = thinned(heads, MOST_LABELS)
        labels = [names[order[place]] for place in shown]
        axes.set_xticks(shown, labels, size=8, rotation=90)
        axes.set_yticks(shown, labels, size=8)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=paper.ink)
        bar = figure.colorbar(image, ax=axes, aspect=32, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9)
        bar.set_label(measure, size=10, color=paper.quiet)
        write_picture(figure, path)
