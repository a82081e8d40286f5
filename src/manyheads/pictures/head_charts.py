"""The atlas: layers down, heads across, coloured by one statistic and labelled by kind."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.colors import FuncNorm, Normalize
from matplotlib.patches import Rectangle

from manyheads.errors import ShapeError
from manyheads.pictures.canvas import Look, drawing, head_room, quiet_axes, thinned, write_picture

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


def draw_bars(
    names: Sequence[str],
    values: Sequence[float],
    path: Path,
    *,
    errors: Sequence[float] = (),
    most: int = 24,
    value: str = "",
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write the `most` bars that are farthest from 0, those below it in another colour."""
    if not len(names) == len(values) or not names or len(errors) not in (0, len(values)):
        raise ShapeError(
            f"there are {len(names)} names, {len(values)} values and {len(errors)} errors",
            "give as many of each, or no errors",
        )
    numbers = np.nan_to_num(np.asarray(values, dtype=float))
    kept = sorted(np.argsort(-np.abs(numbers))[:most].tolist(), key=lambda place: -numbers[place])
    size = (9.0, 0.29 * len(kept) + 0.9 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        axes = figure.subplots()
        places = np.arange(len(kept))
        colours = [paper.colours[0] if numbers[place] >= 0 else paper.colours[1] for place in kept]
        axes.barh(places, numbers[kept], color=colours, height=0.72)
        if len(errors):
            spread = np.nan_to_num(np.asarray(errors, dtype=float))[kept]
            axes.errorbar(
                numbers[kept], places, xerr=spread, fmt="none", ecolor=paper.ink, elinewidth=1.2
            )
        axes.axvline(0, color=paper.quiet, linewidth=1)
        axes.set_yticks(places, [names[place] for place in kept])
        axes.set_ylim(len(kept) - 0.4, -0.6)
        quiet_axes(axes, paper, grid="x")
        axes.set_xlabel(value, size=11)
        write_picture(figure, path)


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
