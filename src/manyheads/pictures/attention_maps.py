"""Attention maps: one head, a grid of heads, and weights over a text or an image."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import AxesImage

from manyheads.errors import ShapeError
from manyheads.pictures import canvas

MAX_LABELS = 48
# Inches per labeled token.
STEP = 0.21


def draw_head_map(
    pattern: Float[np.ndarray, "t s"],
    queries: Sequence[str],
    path: Path,
    *,
    keys: Sequence[str] | None = None,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the attention map of one head, queries down and keys across.

    Colors show the square root of a weight, so that small ones can be seen. `keys` are the tokens
    attended to, where they differ from the queries.
    """
    keys = queries if keys is None else keys
    if pattern.shape != (len(queries), len(keys)) or not pattern.size:
        raise ShapeError(
            f"the pattern has {pattern.shape[0]} queries and {pattern.shape[1]} keys "
            f"for {len(queries)} and {len(keys)} tokens",
            "pass one token per query and per key, and at least one",
        )
    wide, high = (max(3.0, STEP * min(len(tokens), MAX_LABELS)) for tokens in (keys, queries))
    size = wide + 3.2, high + 2.2 - canvas.title_height(title, subtitle)
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        axes = figure.subplots()
        image = _paint(axes, pattern, palette)
        rows, columns = (
            canvas.tick_positions(len(tokens), MAX_LABELS) for tokens in (queries, keys)
        )
        axes.set_yticks(rows, [canvas.visible_token(queries[row]) for row in rows], size=9)
        names = [canvas.visible_token(keys[column]) for column in columns]
        axes.set_xticks(columns, names, size=9, rotation=90)
        axes.set_xlabel("keys", size=11)
        axes.set_ylabel("queries", size=11)
        ticks = [0, 0.5, 0.7071, 1]
        bar = canvas.add_color_bar(figure, image, axes, "weight", aspect=32, pad=0.02, ticks=ticks)
        bar.ax.set_yticklabels(["0", "0.25", "0.5", "1"])


def _paint(axes: Axes, pattern: Float[np.ndarray, "t s"], palette: canvas.Palette) -> AxesImage:
    """Draw the weights of one head with colors from 0 to 1."""
    roots, colors = np.sqrt(np.clip(pattern, 0, 1)), palette.sequential
    image = axes.imshow(roots, colors, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.spines[:].set(visible=True, color=palette.grid)
    axes.tick_params(length=0, labelcolor=palette.text)
    return image


# Cells per side; more could not be told apart.
MAX_CELLS = 160
MAX_COLUMNS = 12
# Inches per map, by the number of maps in a row.
SIZES = ((4, 2.7), (8, 1.75), (MAX_COLUMNS, 1.25))

Pattern = Float[np.ndarray, "t s"]


def draw_grid(
    layers: Sequence[Sequence[Pattern]],
    path: Path,
    *,
    names: Mapping[tuple[int, int], str] | None = None,
    numbers: Sequence[int] | None = None,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw a row of maps per layer, or up to four per row for a single layer.

    `names` are shown above maps by (row, head), as in {(0, 3): "induction"}; `numbers` are the
    indices of the layers, by default from 0 on. Layers may differ in their number of heads.
    """
    if not layers or not all(len(layer) for layer in layers):
        raise ShapeError("there is no head to draw", "pass at least one pattern per layer")
    numbers = range(len(layers)) if numbers is None else numbers
    cells = [(row, head) for row, layer in enumerate(layers) for head in range(len(layer))]
    single = len(layers) == 1
    columns = min(4, len(layers[0])) if single else max(len(layer) for layer in layers)
    rows = -(-len(layers[0]) // columns) if single else len(layers)
    side = next((size for limit, size in SIZES if columns <= limit), SIZES[-1][1])
    size = columns * side + 0.5, rows * (side + 0.3) + 0.3
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for row, head in cells:
            axes = grid[divmod(head, columns) if single else (row, head)]
            axes.set_visible(True)
            _paint(axes, _smaller(layers[row][head]), palette)
            axes.set_xticks([])
            axes.set_yticks([])
            small = 9.5 if columns <= 8 else 7.5
            name = f"L{numbers[row]}H{head}"
            axes.set_title(name, loc="left", size=small, weight="bold", color=palette.text, pad=3)
            kind = canvas.shorten((names or {}).get((row, head), ""), int(8 * side))
            axes.set_title(kind, loc="right", size=small - 1, color=palette.muted, pad=3)


def _smaller(pattern: Pattern) -> Pattern:
    """Reduce a map to MAX_CELLS per side by its maxima, which keeps thin lines."""
    for axis in (0, 1):
        count = pattern.shape[axis]
        if count > MAX_CELLS:
            edges = np.linspace(0, count, MAX_CELLS + 1).astype(int)[:-1]
            pattern = np.maximum.reduceat(pattern, edges, axis=axis)
    return pattern


COLUMNS = 4
FEW_LABELS = 18
MAX_TOKEN_LABELS = 30
LONGEST_LABEL = 18

Patterns = Float[np.ndarray, "h t s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMapLabels:
    """The texts of the figure; `entropy` is a format string of {entropy} and {max_entropy}."""

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
    labels: HeadMapLabels,
) -> None:
    """Draw a map per head, queries down and keys across, all on one color scale."""
    heads, length, keys = patterns.shape
    if length != keys or not patterns.size:
        raise ShapeError(
            f"the patterns have {heads} heads, {length} queries and {keys} keys",
            "pass as many keys as queries, and at least one of each",
        )
    counts = {"tokens": (tokens, length), "names": (names, heads), "entropies": (entropies, heads)}
    for what, (values, count) in counts.items():
        if len(values) != count:
            raise ShapeError(f"there are {len(values)} {what} for {count}", f"pass {count}")
    rows = math.ceil(heads / COLUMNS)
    larger = 1.35 if length > FEW_LABELS else 1.0
    width, height = 16 * larger, (1 + 4 * rows) * larger
    rect = (0.006, 0.01, 0.988, 0.985 - 1.02 / height)
    with canvas.plain_figure(path, (width, height), hspace=0.05, rect=rect) as figure:
        grid = figure.subplots(rows, COLUMNS, squeeze=False)
        for head, axes in enumerate(grid.flat):
            if head >= heads:
                axes.set_visible(False)
                continue
            image = axes.imshow(patterns[head], cmap="viridis", vmin=0, vmax=patterns.max())
            axes.spines[:].set_visible(False)
            if length <= MAX_TOKEN_LABELS:
                canvas.outline_cells(axes, length, length, "white", 1.2 if length <= 12 else 0.5)
            axes.tick_params(which="both", length=0, labelcolor=canvas.TEXT_COLOR)
            label = labels.entropy.format(entropy=entropies[head], max_entropy=math.log2(length))
            axes.set_title(names[head], loc="left", size=15, weight="bold", color=canvas.TEXT_COLOR)
            axes.set_title(label, loc="right", size=11, color=canvas.MUTED)
            _label(axes, tokens, left=head % COLUMNS == 0, below=head + COLUMNS >= heads)
        bar = figure.colorbar(image, ax=grid, aspect=45, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=11, labelcolor=canvas.TEXT_COLOR)
        bar.set_label(labels.weight, size=13, color=canvas.MUTED)
        title, subtitle = (1 - inches / height for inches in (0.3, 0.68))
        figure.text(0.012, title, labels.title, size=21, **canvas.TITLE)
        figure.text(0.012, subtitle, labels.subtitle, size=14, color=canvas.MUTED, va="center")
        figure.supylabel(labels.queries, y=0.52, size=13, color=canvas.MUTED)
        figure.supxlabel(labels.keys, size=13, color=canvas.MUTED)


def _label(axes: Axes, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    """Label the outer edges of the grid with tokens, skipping some where there are many."""
    positions = canvas.tick_positions(len(tokens), MAX_TOKEN_LABELS)
    names = [canvas.shorten(tokens[index], LONGEST_LABEL) for index in positions]
    size = 12.5 if len(names) <= 10 else 10 if len(names) <= FEW_LABELS else 8.5
    axes.set_yticks(positions if left else [], names if left else [], size=size)
    axes.set_xticks(positions if below else [], names if below else [], size=size)
    for name in axes.get_xticklabels():
        if len(names) > FEW_LABELS:
            name.set(rotation=90)
        else:
            name.set(rotation=45, ha="right", rotation_mode="anchor")


# Inches per character, per line and of the page.
CHARACTER, LINE, PAGE = 0.112, 0.36, 11.0


def draw_over_text(
    tokens: Sequence[str],
    scores: Mapping[str, Float[np.ndarray, " s"]],
    path: Path,
    *,
    at: int | None = None,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the text once per method, as in {"rollout": ..., "flow": ...}, colored by its scores.

    The token `at` gets a frame. Colors go from 0 to the largest score of each method, which is
    given in its heading.
    """
    for name, values in scores.items():
        if len(values) != len(tokens):
            raise ShapeError(
                f"{name} has {len(values)} scores for {len(tokens)} tokens", "pass one per token"
            )
    if not tokens or not scores:
        raise ShapeError("there is no text to draw", "pass tokens and at least one method")
    words = [canvas.visible_token(token) for token in tokens]
    boxes = canvas.place_words(words, 0.18, PAGE - 0.18, character=CHARACTER, space=0.03)
    block = LINE * (boxes[-1][0] + 1) + 0.62
    size = PAGE, block * len(scores) + 0.1
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, PAGE)
        axes.set_ylim(figure.get_figheight(), 0)
        top = canvas.title_height(title, subtitle) + 0.2
        for name, values in scores.items():
            largest = float(np.nanmax(values))
            heading = f"{name}, up to {largest:.2g}"
            bold = canvas.TITLE | {"color": palette.text}
            axes.text(0.18, top + 0.1, heading, size=11, **bold)
            for index, (line, x, width) in enumerate(boxes):
                fraction = float(values[index]) / largest if largest > 0 else 0.0
                color = palette.sequential(0.85 * fraction if fraction > 0 else 0.0)
                edge = palette.series[1] if index == at else "none"
                canvas.draw_word(
                    axes, words[index], (x, top + 0.48 + line * LINE, width), color, edge
                )
            top += block


# From a dark veil to bright yellow, both half transparent.
GLOW = LinearSegmentedColormap.from_list(
    "glow", [(0.05, 0.06, 0.14, 0.72), (0.55, 0.25, 0.1, 0.55), (1.0, 0.9, 0.25, 0.45)]
)


def draw_over_image(
    image: Float[np.ndarray, "height width 3"],
    weights: Float[np.ndarray, "h rows columns"],
    path: Path,
    *,
    names: Sequence[str] = (),
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the image, then one copy per head with its weights over the patches.

    The image has values from 0 to 1; `weights` are those of one query on the patches.
    """
    heads = len(weights)
    names = names or [f"head {head}" for head in range(heads)]
    if len(names) != heads or not heads:
        raise ShapeError(f"there are {len(names)} names for {heads} heads", "pass one per head")
    columns = min(5, heads + 1)
    rows = math.ceil((heads + 1) / columns)
    size = 2.3 * columns, 2.55 * rows
    extent = (0, image.shape[1], image.shape[0], 0)
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if index > heads:
                continue
            axes.imshow(np.clip(image, 0, 1), extent=extent)
            name = "image" if index == 0 else names[index - 1]
            if index:
                largest = float(weights[index - 1].max())
                shares = weights[index - 1] / max(largest, 1e-9)
                axes.imshow(shares, GLOW, vmin=0, vmax=1, extent=extent, interpolation="bilinear")
                name = f"{name}  ≤ {largest:.2f}"
            axes.set_title(name, loc="left", size=10, color=palette.text, pad=4)
