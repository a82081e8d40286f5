"""Charts of all heads: the atlas, bars, gate histograms and similarity matrices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.colors import FuncNorm, Normalize
from matplotlib.patches import Rectangle

from manyheads.errors import ShapeError
from manyheads.formatting import percent
from manyheads.pictures import canvas

Rows = Sequence[Sequence[float]]


def draw_atlas(
    values: Rows,
    path: Path,
    *,
    labels: Sequence[Sequence[str]] | None = None,
    measure: str = "",
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw one cell per head, layers down and heads across, with its value and its label.

    Values of both signs get a diverging scale of their square root; NaN has no color. Layers may
    differ in their number of heads.
    """
    if not values or not all(len(row) for row in values):
        raise ShapeError("there is no head to draw", "pass at least one value per layer")
    if labels is not None and [len(row) for row in labels] != [len(row) for row in values]:
        raise ShapeError("labels and values differ in their shapes", "pass one label per head")
    table = canvas.head_table(values)
    layers, heads = table.shape
    wide = 1.02 if heads <= 8 else 0.86
    size = heads * wide + 1.9, layers * 0.66 + 0.6
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        axes = figure.subplots()
        norm, colors = _normalization(table), palette.sequential
        if isinstance(norm, FuncNorm):
            colors = palette.diverging
        image = axes.imshow(table, cmap=colors, norm=norm, aspect="auto")
        axes.set_xticks(range(heads), [f"H{head}" for head in range(heads)], size=10)
        axes.set_yticks(range(layers), [f"L{layer}" for layer in range(layers)], size=10)
        axes.xaxis.tick_top()
        canvas.outline_cells(axes, layers, heads, palette.background, 3.0)
        axes.tick_params(which="both", length=0, labelcolor=palette.muted)
        for layer, row in enumerate(values):
            for head, value in enumerate(row):
                ink = canvas.ink_on(colors(norm(value)))
                label = (
                    "" if labels is None else canvas.shorten(labels[layer][head], int(15 * wide))
                )
                lift = 0.14 if label else 0.0
                text = "–" if np.isnan(value) else f"{value:.2g}".replace("-", "−")
                ink = palette.muted if np.isnan(value) else ink
                axes.text(head, layer - lift, text, ha="center", va="center", size=10, color=ink)
                axes.text(head, layer + 0.24, label, ha="center", va="center", size=7, color=ink)
        canvas.add_color_bar(figure, image, axes, measure, aspect=22, pad=0.015)


def _normalization(table: np.ndarray) -> Normalize:
    values = table[~np.isnan(table)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if low < 0 < high:
        largest = max(-low, high)
        return FuncNorm((_root, _square), vmin=-largest, vmax=largest)
    return Normalize(low, high if high > low else low + 1)


def _root(values: np.ndarray) -> np.ndarray:
    """Keep small values visible beside one large value."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.square(values)


def draw_bars(
    names: Sequence[str],
    values: Sequence[float],
    path: Path,
    *,
    errors: Sequence[float] = (),
    top_k: int = 24,
    xlabel: str = "",
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the `top_k` largest absolute values as bars, negative ones in another color."""
    if not len(names) == len(values) or not names or len(errors) not in (0, len(values)):
        raise ShapeError(
            f"there are {len(names)} names, {len(values)} values and {len(errors)} errors",
            "pass as many of each, or no errors",
        )
    numbers = np.nan_to_num(np.asarray(values, dtype=float))
    order = sorted(np.argsort(-np.abs(numbers))[:top_k].tolist(), key=lambda index: -numbers[index])
    size = 9.0, 0.29 * len(order) + 0.9
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        axes = figure.subplots()
        positions = np.arange(len(order))
        colors = [palette.series[int(numbers[index] < 0)] for index in order]
        axes.barh(positions, numbers[order], color=colors, height=0.72)
        if len(errors):
            spread = np.nan_to_num(np.asarray(errors, dtype=float))[order]
            style: dict[str, Any] = {"fmt": "none", "ecolor": palette.text, "elinewidth": 1.2}
            axes.errorbar(numbers[order], positions, xerr=spread, **style)
        axes.axvline(0, color=palette.muted, linewidth=1)
        axes.set_yticks(positions, [names[index] for index in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
        canvas.style_axes(axes, palette, grid="x")
        axes.set_xlabel(xlabel, size=11)


# Of a head without a kind.
MIXED = "mixed"
# Kinds with a color of their own; the others share one.
MAX_COLORS = 7


def draw_head_kinds(
    layers: Mapping[str, Sequence[str]],
    path: Path,
    *,
    costs: Sequence[tuple[float, float, float]] = (),
    cost_label: str = "",
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw one cell per head, colored by its kind, and what it costs to remove some heads.

    `layers` has the kinds of the heads of each layer, `costs` the fraction that is removed, the
    change and its standard error.
    """
    if not layers or not any(layers.values()):
        raise ShapeError("there is no head to draw", "pass at least one kind per layer")
    counts = Counter(kind for kinds in layers.values() for kind in kinds if kind != MIXED)
    frequent = [kind for kind, _ in counts.most_common(MAX_COLORS)]
    widest = max(map(len, layers.values()))
    size = 0.36 * widest + 3.2 + 3.4 * bool(costs), max(2.6, 0.26 * len(layers) + 1.2)
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        ratios = (0.36 * widest + 2.2, 3.0) if costs else (1.0,)
        grid, *rest = figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
        colors = dict(zip(frequent, palette.series, strict=False))
        for row, kinds in enumerate(layers.values()):
            for column, kind in enumerate(kinds):
                color = palette.grid if kind == MIXED else colors.get(kind, palette.muted)
                cell = Rectangle((column - 0.42, row - 0.42), 0.84, 0.84, color=color, linewidth=0)
                grid.add_patch(cell)
        grid.set_xlim(-0.6, widest - 0.4)
        grid.set_ylim(len(layers) - 0.4, -0.6)
        grid.set_aspect("equal")
        step = max(1, len(layers) // 16)
        grid.set_yticks(range(0, len(layers), step), list(layers)[::step], size=9)
        grid.set_xticks([])
        grid.tick_params(length=0, labelcolor=palette.muted)
        for side in grid.spines.values():
            side.set_visible(False)
        shades = [(f"{kind} ({counts[kind]})", colors[kind]) for kind in frequent]
        others = sum(counts.values()) - sum(counts[kind] for kind in frequent)
        shades += [(f"other kinds ({others})", palette.muted)] if others else []
        mixed = sum(kind == MIXED for kinds in layers.values() for kind in kinds)
        shades += [(f"{MIXED} ({mixed})", palette.grid)] if mixed else []
        handles = [Rectangle((0, 0), 1, 1, color=color) for _, color in shades]
        grid.legend(
            handles,
            [name for name, _ in shades],
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            labelcolor=palette.text,
            fontsize=9,
        )
        for axes in rest:
            names = [percent(fraction) for fraction, _, _ in costs]
            changes = [change for _, change, _ in costs]
            errors = np.nan_to_num([error for _, _, error in costs])
            axes.bar(names, changes, color=palette.series[0], width=0.6)
            axes.errorbar(names, changes, yerr=errors, fmt="none", ecolor=palette.text)
            canvas.style_axes(axes, palette)
            axes.axhline(0, color=palette.muted, linewidth=1)
            axes.set_title(cost_label, loc="left", size=11, color=palette.text)
            axes.set_xlabel("heads removed at once", size=10)


BINS = 40
CLOSED = 0.1


def draw_gates(
    layers: Sequence[Sequence[Float[np.ndarray, " n"]]],
    path: Path,
    *,
    largest: float = 1.0,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw a histogram of gate values per head, and the fraction that is closed, below 0.1."""
    if not layers or not all(len(layer) for layer in layers):
        raise ShapeError("there is no gate to draw", "pass at least one per layer")
    columns = max(len(layer) for layer in layers)
    side = 1.55 if columns <= 8 else 1.3
    size = columns * side + 0.6, len(layers) * 1.35 + 0.5
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        grid = figure.subplots(len(layers), columns, squeeze=False, sharex=True)
        for axes in grid.flat:
            axes.set_visible(False)
        for number, layer in enumerate(layers):
            for head, values in enumerate(layer):
                axes = grid[number, head]
                axes.set_visible(True)
                counts, edges = np.histogram(values, bins=BINS, range=(0, largest))
                axes.stairs(counts, edges, fill=True, color=palette.series[0])
                axes.axvline(CLOSED, color=palette.series[1], linewidth=1)
                axes.set_yticks([])
                axes.set_xlim(0, largest)
                axes.set_xticks([0, largest / 2, largest])
                axes.spines[["left", "top", "right"]].set_visible(False)
                axes.tick_params(length=0, labelsize=8, labelcolor=palette.muted)
                name = f"L{number}H{head}"
                label = f"{percent(float(np.mean(values < CLOSED)))} closed"
                axes.set_title(name, loc="left", size=8.5, weight="bold", color=palette.text, pad=2)
                axes.set_title(label, loc="right", size=7.5, color=palette.muted, pad=2)


MAX_LABELS = 48


def draw_similarity(
    similarity: Float[np.ndarray, "h h"],
    names: Sequence[str],
    path: Path,
    *,
    clusters: Sequence[Sequence[int]] = (),
    measure: str = "similarity",
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the matrix; the heads of each of the `clusters`, given by index, are put together."""
    heads = len(names)
    if similarity.shape != (heads, heads) or not heads:
        raise ShapeError(
            f"the matrix has shape {similarity.shape} and {heads} names",
            "pass a square matrix and one name per row",
        )
    grouped = [index for group in clusters for index in group]
    if len(set(grouped)) != len(grouped) or not set(grouped) <= set(range(heads)):
        raise ShapeError("a head is unknown or in two clusters", "use each once")
    order = [*grouped, *(index for index in range(heads) if index not in set(grouped))]
    side = max(3.4, 0.2 * min(heads, MAX_LABELS))
    size = side + 2.0, side + 1.0
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        axes = figure.subplots()
        table = similarity[np.ix_(order, order)]
        image = axes.imshow(table, cmap=palette.sequential, vmin=0, vmax=1, interpolation="nearest")
        start = 0
        for index, group in enumerate(clusters):
            corner = (start - 0.5, start - 0.5)
            color = palette.series[1 + index % (len(palette.series) - 1)]
            frame = Rectangle(corner, len(group), len(group), fill=False, ec=color, lw=2.2)
            axes.add_patch(frame)
            start += len(group)
        ticks = canvas.tick_positions(heads, MAX_LABELS)
        labels = [names[order[index]] for index in ticks]
        axes.set_xticks(ticks, labels, size=8, rotation=90)
        axes.set_yticks(ticks, labels, size=8)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=palette.text)
        canvas.add_color_bar(figure, image, axes, measure, aspect=32, pad=0.02)
