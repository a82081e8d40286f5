"""The heads of a layer as heat maps side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from manyheads.errors import ShapeError
from manyheads.pictures.png import DOTS, INK, QUIET, STYLE, write_png

__all__ = ["HeadsWords", "draw_heads"]

COLUMNS = 4
FEW_LABELS = 18
MOST_LABELS = 30
LONGEST_LABEL = 18

Patterns = Float[np.ndarray, "h t s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsWords:
    """What is written on the picture; `entropy` has room for {entropy} and {most}, in bits."""

    title: str
    subtitle: str
    queries: str
    keys: str
    weight: str
    entropy: str


def draw_heads(
    patterns: Patterns,
    tokens: Sequence[str],
    path: Path,
    *,
    names: Sequence[str],
    entropies: Sequence[float],
    words: HeadsWords,
) -> None:
    """Write a map a head, queries down and keys across, all in one range of colours."""
    _check(patterns, tokens, names, entropies)
    heads, length, _ = patterns.shape
    rows = math.ceil(heads / COLUMNS)
    with rc_context(STYLE):
        larger = 1.35 if length > FEW_LABELS else 1.0
        figure = Figure(figsize=(16 * larger, (1 + 4 * rows) * larger), dpi=DOTS)
        head_room = 1.02 / figure.get_figheight()
        figure.set_layout_engine(
            "constrained", hspace=0.05, rect=(0.006, 0.01, 0.988, 0.985 - head_room)
        )
        grid = figure.subplots(rows, COLUMNS, squeeze=False)
        for head, axes in enumerate(grid.flat):
            if head >= heads:
                axes.set_visible(False)
                continue
            image = _draw_one(axes, patterns[head], brightest=float(patterns.max()))
            said = words.entropy.format(entropy=entropies[head], most=math.log2(length))
            axes.set_title(names[head], loc="left", size=15, weight="bold", color=INK)
            axes.set_title(said, loc="right", size=11, color=QUIET)
            _label(axes, tokens, left=head % COLUMNS == 0, below=head + COLUMNS >= heads)
        bar = figure.colorbar(image, ax=grid, aspect=45, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=11, labelcolor=INK)
        bar.set_label(words.weight, size=13, color=QUIET)
        _write(figure, words)
        write_png(figure, path)


def _write(figure: Figure, words: HeadsWords) -> None:
    """What is said about all maps together, at fixed distances from the upper edge."""
    title, subtitle = (1 - inches / figure.get_figheight() for inches in (0.3, 0.68))
    figure.text(0.012, title, words.title, size=21, weight="bold", color=INK, va="center")
    figure.text(0.012, subtitle, words.subtitle, size=14, color=QUIET, va="center")
    figure.supylabel(words.queries, y=0.52, size=13, color=QUIET)
    figure.supxlabel(words.keys, size=13, color=QUIET)


def _check(
    patterns: Patterns, tokens: Sequence[str], names: Sequence[str], entropies: Sequence[float]
) -> None:
    heads, length, keys = patterns.shape
    if length != keys or not patterns.size:
        raise ShapeError(
            f"patterns of {heads} heads, {length} queries and {keys} keys",
            "give as many keys as queries, and one or more of each",
        )
    counts = {"tokens": (tokens, length), "names": (names, heads), "entropies": (entropies, heads)}
    for what, (given, count) in counts.items():
        if len(given) != count:
            raise ShapeError(f"there are {len(given)} {what} for {count}", f"give {count}")


def _draw_one(axes: Axes, pattern: Float[np.ndarray, "t t"], brightest: float) -> AxesImage:
    image = axes.imshow(pattern, cmap="viridis", vmin=0, vmax=brightest)
    axes.spines[:].set_visible(False)
    length = len(pattern)
    if length <= MOST_LABELS:
        edges = np.arange(length + 1) - 0.5
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2 if length <= 12 else 0.5)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    return image


def _label(axes: Axes, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    """Tokens at the outer edges of the grid, thinned out where they would touch."""
    places = range(0, len(tokens), math.ceil(len(tokens) / MOST_LABELS))
    names = [_short(tokens[place]) for place in places]
    size = 12.5 if len(names) <= 10 else 10 if len(names) <= FEW_LABELS else 8.5
    axes.set_yticks(places if left else [], names if left else [], size=size)
    axes.set_xticks(places if below else [], names if below else [], size=size)
    for name in axes.get_xticklabels():
        if len(names) > FEW_LABELS:
            name.set(rotation=90)
        else:
            name.set(rotation=45, ha="right", rotation_mode="anchor")


def _short(token: str) -> str:
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…"
