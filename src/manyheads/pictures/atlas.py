"""The atlas: layers down, heads across, coloured by one statistic and labelled by kind."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import FuncNorm, Normalize

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, drawing, head_room, write_picture

__all__ = ["draw_atlas"]

Rows = Sequence[Sequence[float]]


def draw_atlas(
    values: Rows,
    path: Path,
    *,
    labels: Sequence[Sequence[str]] | None = None,
    measure: str = "",
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write one cell a head with its value and, below, its label; layers may differ in heads.

    Values of both signs are coloured from the middle, by their root; NaN has no colour.
    """
    if not values or not all(len(row) for row in values):
        raise ShapeError("there is no head to draw", "give one or more values a layer")
    if labels is not None and [len(row) for row in labels] != [len(row) for row in values]:
        raise ShapeError("there are not as many labels as values", "give one a head")
    heads = max(len(row) for row in values)
    table = np.full((len(values), heads), np.nan)
    for layer, row in enumerate(values):
        table[layer, : len(row)] = row
    wide = 1.02 if heads <= 8 else 0.86
    size = (heads * wide + 1.9, len(values) * 0.66 + 0.6 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        axes = figure.subplots()
        norm, colours = _norm(table), paper.scale
        if isinstance(norm, FuncNorm):
            colours = paper.two_sided
        image = axes.imshow(table, cmap=colours, norm=norm, aspect="auto")
        axes.set_xticks(range(heads), [f"H{head}" for head in range(heads)], size=10)
        axes.set_yticks(range(len(values)), [f"L{layer}" for layer in range(len(values))], size=10)
        axes.xaxis.tick_top()
        axes.spines[:].set_visible(False)
        axes.set_xticks(np.arange(heads + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(values) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color=paper.back, linewidth=3)
        axes.tick_params(which="both", length=0, labelcolor=paper.quiet)
        for layer, row in enumerate(values):
            for head, value in enumerate(row):
                ink = _ink_on(colours(norm(value)))
                label = "" if labels is None else _short(labels[layer][head], wide)
                lift = 0.14 if label else 0.0
                said = "–" if np.isnan(value) else f"{value:.2g}".replace("-", "−")
                ink = paper.quiet if np.isnan(value) else ink
                axes.text(head, layer - lift, said, ha="center", va="center", size=10, color=ink)
                axes.text(head, layer + 0.24, label, ha="center", va="center", size=7, color=ink)
        bar = figure.colorbar(image, ax=axes, aspect=22, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9)
        bar.set_label(measure, size=10, color=paper.quiet)
        write_picture(figure, path)


def _norm(table: np.ndarray) -> Normalize:
    known = table[~np.isnan(table)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if low < 0 < high:
        most = max(-low, high)
        return FuncNorm((_root, _square), vmin=-most, vmax=most)
    return Normalize(low, high if high > low else low + 1)


def _root(values: np.ndarray) -> np.ndarray:
    """One head that matters most would leave all others pale."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.square(values)


def _ink_on(colour: Sequence[float]) -> str:
    red, green, blue = colour[:3]
    return "#1c2433" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.53 else "#f6f7fa"


def _short(label: str, wide: float) -> str:
    most = int(15 * wide)
    return label if len(label) <= most else label[: most - 1] + "…"
