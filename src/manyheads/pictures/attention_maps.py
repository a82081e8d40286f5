"""Attention maps: one head, a grid of heads, and weights over a text or an image."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import FancyBboxPatch

from manyheads.errors import ShapeError
from manyheads.pictures.canvas import (
    DPI,
    MUTED,
    STYLE,
    TEXT_COLOR,
    Palette,
    Theme,
    ink_on,
    new_figure,
    save_picture,
    save_png,
    tick_positions,
    title_height,
    visible_token,
)

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
    theme: Theme = "light",
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
    wide, high = (max(3.0, STEP * min(len(each), MAX_LABELS)) for each in (keys, queries))
    with new_figure(theme, (wide + 3.2, high + 2.2), title=title, subtitle=subtitle) as (
        figure,
        palette,
    ):
        axes = figure.subplots()
        image = paint(axes, pattern, palette)
        label_tokens(axes, queries, keys, palette)
        axes.set_xlabel("keys", size=11)
        axes.set_ylabel("queries", size=11)
        bar = figure.colorbar(image, ax=axes, aspect=32, pad=0.02, ticks=[0, 0.5, 0.7071, 1])
        bar.ax.set_yticklabels(["0", "0.25", "0.5", "1"])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9)
        bar.set_label("weight", size=10, color=palette.muted)
        save_picture(figure, path)


def paint(axes: Axes, pattern: Float[np.ndarray, "t s"], palette: Palette) -> AxesImage:
    """Draw the weights of one head with colors from 0 to 1."""
    image = axes.imshow(
        np.sqrt(np.clip(pattern, 0, 1)),
        cmap=palette.sequential,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    axes.spines[:].set(visible=True, color=palette.grid)
    axes.tick_params(length=0, labelcolor=palette.text)
    return image


def label_tokens(axes: Axes, queries: Sequence[str], keys: Sequence[str], palette: Palette) -> None:
    """Label both axes with tokens, skipping some where there are many."""
    rows, columns = tick_positions(len(queries), MAX_LABELS), tick_positions(len(keys), MAX_LABELS)
    axes.set_yticks(rows, [visible_token(queries[row]) for row in rows], size=9, color=palette.text)
    axes.set_xticks(
        columns,
        [visible_token(keys[column]) for column in columns],
        size=9,
        rotation=90,
        color=palette.text,
    )


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
    theme: Theme = "light",
) -> None:
    """Draw a row of maps per layer, or up to four per row for a single layer.

    `names` are shown above maps by (row, head), as in {(0, 3): "induction"}; `numbers` are the
    indices of the layers, by default from 0 on. Layers may differ in their number of heads.
    """
    if not layers or not all(len(layer) for layer in layers):
        raise ShapeError("there is no head to draw", "pass at least one pattern per layer")
    numbers = range(len(layers)) if numbers is None else numbers
    cells = [
        (row, head, pattern)
        for row, layer in enumerate(layers)
        for head, pattern in enumerate(layer)
    ]
    single = len(layers) == 1
    columns = min(4, len(layers[0])) if single else max(len(layer) for layer in layers)
    rows = -(-len(layers[0]) // columns) if single else len(layers)
    side = next((size for limit, size in SIZES if columns <= limit), SIZES[-1][1])
    size = (columns * side + 0.5, rows * (side + 0.3) + 0.3 + title_height(title, subtitle))
    with new_figure(theme, size, title=title, subtitle=subtitle) as (figure, palette):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for row, head, pattern in cells:
            axes = grid[divmod(head, columns) if single else (row, head)]
            axes.set_visible(True)
            paint(axes, _smaller(pattern), palette)
            axes.set_xticks([])
            axes.set_yticks([])
            kind = (names or {}).get((row, head), "")
            small = 9.5 if columns <= 8 else 7.5
            name = f"L{numbers[row]}H{head}"
            axes.set_title(name, loc="left", size=small, weight="bold", color=palette.text, pad=3)
            if kind:
                short = kind if len(kind) <= 8 * side else kind[: int(8 * side) - 1] + "…"
                axes.set_title(short, loc="right", size=small - 1, color=palette.muted, pad=3)
        save_picture(figure, path)


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
    _check(patterns, tokens, names, entropies)
    heads, length, _ = patterns.shape
    rows = math.ceil(heads / COLUMNS)
    with rc_context(STYLE):
        larger = 1.35 if length > FEW_LABELS else 1.0
        figure = Figure(figsize=(16 * larger, (1 + 4 * rows) * larger), dpi=DPI)
        title_height = 1.02 / figure.get_figheight()
        figure.set_layout_engine(
            "constrained", hspace=0.05, rect=(0.006, 0.01, 0.988, 0.985 - title_height)
        )
        grid = figure.subplots(rows, COLUMNS, squeeze=False)
        for head, axes in enumerate(grid.flat):
            if head >= heads:
                axes.set_visible(False)
                continue
            image = _draw_one(axes, patterns[head], brightest=float(patterns.max()))
            label = labels.entropy.format(entropy=entropies[head], max_entropy=math.log2(length))
            axes.set_title(names[head], loc="left", size=15, weight="bold", color=TEXT_COLOR)
            axes.set_title(label, loc="right", size=11, color=MUTED)
            _label(axes, tokens, left=head % COLUMNS == 0, below=head + COLUMNS >= heads)
        bar = figure.colorbar(image, ax=grid, aspect=45, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=11, labelcolor=TEXT_COLOR)
        bar.set_label(labels.weight, size=13, color=MUTED)
        _add_titles(figure, labels)
        save_png(figure, path)


def _add_titles(figure: Figure, labels: HeadMapLabels) -> None:
    """Write the titles and axis labels that all maps share."""
    title, subtitle = (1 - inches / figure.get_figheight() for inches in (0.3, 0.68))
    figure.text(0.012, title, labels.title, size=21, weight="bold", color=TEXT_COLOR, va="center")
    figure.text(0.012, subtitle, labels.subtitle, size=14, color=MUTED, va="center")
    figure.supylabel(labels.queries, y=0.52, size=13, color=MUTED)
    figure.supxlabel(labels.keys, size=13, color=MUTED)


def _check(
    patterns: Patterns, tokens: Sequence[str], names: Sequence[str], entropies: Sequence[float]
) -> None:
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


def _draw_one(axes: Axes, pattern: Float[np.ndarray, "t t"], brightest: float) -> AxesImage:
    image = axes.imshow(pattern, cmap="viridis", vmin=0, vmax=brightest)
    axes.spines[:].set_visible(False)
    length = len(pattern)
    if length <= MAX_TOKEN_LABELS:
        edges = np.arange(length + 1) - 0.5
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2 if length <= 12 else 0.5)
    axes.tick_params(which="both", length=0, labelcolor=TEXT_COLOR)
    return image


def _label(axes: Axes, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    """Label the outer edges of the grid with tokens, skipping some where there are many."""
    positions = range(0, len(tokens), math.ceil(len(tokens) / MAX_TOKEN_LABELS))
    names = [_short(tokens[index]) for index in positions]
    size = 12.5 if len(names) <= 10 else 10 if len(names) <= FEW_LABELS else 8.5
    axes.set_yticks(positions if left else [], names if left else [], size=size)
    axes.set_xticks(positions if below else [], names if below else [], size=size)
    for name in axes.get_xticklabels():
        if len(names) > FEW_LABELS:
            name.set(rotation=90)
        else:
            name.set(rotation=45, ha="right", rotation_mode="anchor")


def _short(token: str) -> str:
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…"


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
    theme: Theme = "light",
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
    lines = _token_boxes(tokens)
    block = LINE * (max(line for line, _, _ in lines) + 1) + 0.62
    size = (PAGE, block * len(scores) + 0.1 + title_height(title, subtitle))
    with new_figure(theme, size, title=title, subtitle=subtitle) as (figure, palette):
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, size[0])
        axes.set_ylim(size[1], 0)
        top = title_height(title, subtitle) + 0.2
        for name, values in scores.items():
            largest = float(np.nanmax(values))
            heading = f"{name}, up to {largest:.2g}"
            axes.text(
                0.18, top + 0.1, heading, size=11, weight="bold", color=palette.text, va="center"
            )
            for index, (line, x, width) in enumerate(lines):
                y = top + 0.48 + line * LINE
                fraction = float(values[index]) / largest if largest > 0 else 0.0
                color = palette.sequential(0.85 * fraction if fraction > 0 else 0.0)
                edge = palette.series[1] if index == at else "none"
                axes.add_patch(_box(x, y, width, color, edge))
                axes.text(
                    x + width / 2,
                    y,
                    visible_token(tokens[index]),
                    size=10,
                    ha="center",
                    va="center",
                    color=ink_on(color),
                )
            top += block
        save_picture(figure, path)


def _token_boxes(tokens: Sequence[str]) -> list[tuple[int, float, float]]:
    """For each token its line, its left edge and its width in inches."""
    boxes, line, x = [], 0, 0.18
    for token in tokens:
        # Characters of East Asian scripts are twice as wide.
        columns = sum(2 if ord(letter) > 0x2E80 else 1 for letter in visible_token(token))
        width = CHARACTER * columns + 0.1
        if x + width > PAGE - 0.18 and x > 0.18:
            line, x = line + 1, 0.18
        boxes.append((line, x, width))
        x += width + 0.03
    return boxes


def _box(
    x: float, y: float, width: float, color: tuple[float, float, float, float], edge: str
) -> FancyBboxPatch:
    return FancyBboxPatch(
        (x, y - 0.13),
        width,
        0.26,
        boxstyle="round,pad=0,rounding_size=0.05",
        facecolor=color,
        edgecolor=edge,
        linewidth=2,
    )


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
    theme: Theme = "light",
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
    size = (2.3 * columns, 2.55 * rows + title_height(title, subtitle))
    height, width = image.shape[:2]
    with new_figure(theme, size, title=title, subtitle=subtitle) as (figure, palette):
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if index > heads:
                continue
            axes.imshow(np.clip(image, 0, 1), extent=(0, width, height, 0))
            name = "image" if index == 0 else names[index - 1]
            if index:
                head_weights = weights[index - 1]
                axes.imshow(
                    head_weights / max(float(head_weights.max()), 1e-9),
                    cmap=GLOW,
                    vmin=0,
                    vmax=1,
                    extent=(0, width, height, 0),
                    interpolation="bilinear",
                )
                name = f"{name}  ≤ {head_weights.max():.2f}"
            axes.set_title(name, loc="left", size=10, color=palette.text, pad=4)
        save_picture(figure, path)
