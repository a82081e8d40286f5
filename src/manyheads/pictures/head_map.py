"""One head as a map: queries down, keys across, every token readable where there is room."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, Paper, drawing, thinned, visible, write_picture

__all__ = ["draw_head_map", "label_tokens", "paint"]

MOST_LABELS = 48
# Inches of a token that is labelled.
STEP = 0.21


def draw_head_map(
    pattern: Float[np.ndarray, "t s"],
    queries: Sequence[str],
    path: Path,
    *,
    keys: Sequence[str] | None = None,
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write the map; colours go by the root of a weight, so that small ones are seen.

    `keys` are the tokens looked at, where they are others than the queries.
    """
    keys = queries if keys is None else keys
    if pattern.shape != (len(queries), len(keys)) or not pattern.size:
        raise ShapeError(
            f"a pattern of {pattern.shape[0]} queries and {pattern.shape[1]} keys has "
            f"{len(queries)} and {len(keys)} tokens",
            "give as many of each, and one or more",
        )
    wide, high = (max(3.0, STEP * min(len(each), MOST_LABELS)) for each in (keys, queries))
    with drawing(look, (wide + 3.2, high + 2.2), title=title, subtitle=subtitle) as (figure, paper):
        axes = figure.subplots()
        image = paint(axes, pattern, paper)
        label_tokens(axes, queries, keys, paper)
        axes.set_xlabel("keys, looked at", size=11)
        axes.set_ylabel("queries, looking", size=11)
        bar = figure.colorbar(image, ax=axes, aspect=32, pad=0.02, ticks=[0, 0.5, 0.7071, 1])
        bar.ax.set_yticklabels(["0", "0.25", "0.5", "1"])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9)
        bar.set_label("weight", size=10, color=paper.quiet)
        write_picture(figure, path)


def paint(axes: Axes, pattern: Float[np.ndarray, "t s"], paper: Paper) -> AxesImage:
    """The weights of one head in colours from 0 to 1."""
    image = axes.imshow(
        np.sqrt(np.clip(pattern, 0, 1)),
        cmap=paper.scale,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    axes.spines[:].set(visible=True, color=paper.line)
    axes.tick_params(length=0, labelcolor=paper.ink)
    return image


def label_tokens(axes: Axes, queries: Sequence[str], keys: Sequence[str], paper: Paper) -> None:
    """Tokens along both sides, thinned out where they would touch."""
    rows, columns = thinned(len(queries), MOST_LABELS), thinned(len(keys), MOST_LABELS)
    axes.set_yticks(rows, [visible(queries[row]) for row in rows], size=9, color=paper.ink)
    axes.set_xticks(
        columns, [visible(keys[column]) for column in columns], size=9, rotation=90, color=paper.ink
    )
