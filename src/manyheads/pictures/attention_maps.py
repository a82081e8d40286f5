"""One head as a map: queries down, keys across, every token readable where there is room."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from manyheads.errors import ShapeError
from manyheads.pictures.canvas import (
    DOTS,
    INK,
    QUIET,
    STYLE,
    Look,
    Paper,
    drawing,
    head_room,
    thinned,
    visible,
    write_picture,
    write_png,
)

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


COLUMNS = 4
FEW_LABELS = 18
MOST_TOKEN_LABELS = 30
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
    if length <= MOST_TOKEN_LABELS:
        edges = np.arange(length + 1) - 0.5
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2 if length <= 12 else 0.5)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    return image


def _label(axes: Axes, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    """Tokens at the outer edges of the grid, thinned out where they would touch."""
    places = range(0, len(tokens), math.ceil(len(tokens) / MOST_TOKEN_LABELS))
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
