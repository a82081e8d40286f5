"""Why a text matched a query: marked words, the matrix of their tokens, and the heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.image import AxesImage
from matplotlib.patches import FancyBboxPatch

from manyheads.errors import ShapeError
from manyheads.pictures.canvas import (
    Palette,
    Theme,
    ink_on,
    new_figure,
    save_picture,
    tick_positions,
    title_height,
    visible_token,
)

PAGE = 12.0
# Inches per character, per line of the passage, per row of the matrix and per layer of heads.
CHARACTER, LINE, ROW, LAYER = 0.104, 0.33, 0.23, 0.27
MAX_WORDS, MAX_ROWS, MAX_COLUMNS = 220, 34, 40
MAX_LABELS = 24


def draw_match(
    words: Sequence[str],
    contributions: Float[np.ndarray, " w"],
    path: Path,
    *,
    query: Sequence[str] = (),
    document: Sequence[str] = (),
    matrix: Float[np.ndarray, "q d"] | None = None,
    heads: Mapping[str, Sequence[Float[np.ndarray, " _"]]] | None = None,
    layers: Sequence[int] = (),
    measure: str = "adds to the score",
    title: str = "",
    subtitle: str = "",
    theme: Theme = "light",
) -> None:
    """Draw the words of a passage colored by what they add, and what is known besides.

    `matrix` has a row per token of the `query` and a column per token of the `document`; of a long
    document the columns with the largest values are drawn, in the order of the text. `heads` has
    one array per layer for each side, as in {"query": ..., "document": ...}.
    """
    _check(words, contributions, query, document, matrix)
    parts: list[float] = [_passage_height(words)]
    if matrix is not None:
        parts.append(ROW * min(len(query), MAX_ROWS) + 1.5)
    if heads:
        parts.append(LAYER * max(map(len, heads.values())) + 1.1)
    size = (PAGE, sum(parts) + 0.2 + title_height(title, subtitle))
    with new_figure(theme, size, title=title, subtitle=subtitle) as (figure, palette):
        grid = figure.add_gridspec(len(parts), 1, height_ratios=parts)
        _draw_passage(figure.add_subplot(grid[0]), words, contributions, palette, measure)
        if matrix is not None:
            _draw_matrix(figure, grid[1], query, document, matrix, palette)
        if heads:
            _draw_heads(figure, grid[-1], heads, layers, palette)
        save_picture(figure, path)


def _check(
    words: Sequence[str],
    contributions: Float[np.ndarray, " w"],
    query: Sequence[str],
    document: Sequence[str],
    matrix: Float[np.ndarray, "q d"] | None,
) -> None:
    if len(words) != len(contributions) or not words:
        raise ShapeError(
            f"there are {len(words)} words and {len(contributions)} contributions",
            "pass one of each per word, and at least one",
        )
    if matrix is not None and (matrix.shape != (len(query), len(document)) or not matrix.size):
        raise ShapeError(
            f"the matrix has shape {matrix.shape} for {len(query)} tokens of the query and "
            f"{len(document)} of the document",
            "pass one row and one column per token",
        )


def _boxes(words: Sequence[str]) -> list[tuple[int, float, float]]:
    """For each word its line, its left edge and its width in inches."""
    boxes, line, x = [], 0, 0.0
    for word in words:
        # Characters of East Asian scripts are twice as wide.
        columns = sum(2 if ord(letter) > 0x2E80 else 1 for letter in visible_token(word, 40))
        width = CHARACTER * columns + 0.09
        if x + width > PAGE - 0.4 and x > 0:
            line, x = line + 1, 0.0
        boxes.append((line, x, width))
        x += width + 0.02
    return boxes


def _passage_height(words: Sequence[str]) -> float:
    return LINE * (_boxes(words[:MAX_WORDS])[-1][0] + 1) + 0.6


def _draw_passage(
    axes: Axes,
    words: Sequence[str],
    contributions: Float[np.ndarray, " w"],
    palette: Palette,
    measure: str,
) -> None:
    """The words in the order of the text, from the first on."""
    cut = len(words) - MAX_WORDS
    words, values = words[:MAX_WORDS], np.nan_to_num(contributions[:MAX_WORDS])
    boxes = _boxes(words)
    largest = max(float(np.abs(values).max()), 1e-12)
    axes.set_axis_off()
    axes.set_xlim(0, PAGE - 0.4)
    axes.set_ylim(LINE * (boxes[-1][0] + 1) - 0.12, -0.2)
    for word, value, (line, x, width) in zip(words, values, boxes, strict=True):
        color = palette.diverging(0.5 + 0.5 * float(value) / largest)
        axes.add_patch(
            FancyBboxPatch(
                (x, line * LINE - 0.12),
                width,
                0.25,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor=color,
                edgecolor="none",
            )
        )
        axes.text(
            x + width / 2,
            line * LINE,
            visible_token(word, 40),
            size=9.5,
            ha="center",
            va="center",
            color=ink_on(color),
        )
    more = f"; {cut:,} more words are not drawn" if cut > 0 else ""
    heading = f"Words of the document by what each {measure}, up to {largest:.2g}{more}"
    axes.set_title(heading, loc="left", size=11, weight="bold", color=palette.text, pad=6)


def _draw_matrix(
    figure: Figure,
    place: SubplotSpec,
    query: Sequence[str],
    document: Sequence[str],
    matrix: Float[np.ndarray, "q d"],
    palette: Palette,
) -> None:
    """Query down, document across; of many columns the strongest."""
    axes = figure.add_subplot(place)
    strength = matrix.max(0)
    # Those that are the best match of a token of the query come first.
    strength[matrix.argmax(1)] += np.abs(matrix).max()
    columns = np.sort(np.argsort(-strength, kind="stable")[:MAX_COLUMNS])
    rows = np.sort(np.argsort(-matrix.max(1), kind="stable")[:MAX_ROWS])
    shown = matrix[np.ix_(rows, columns)]
    largest = max(float(np.abs(shown).max()), 1e-12)
    image = axes.imshow(
        shown,
        cmap=palette.diverging,
        vmin=-largest,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    best = shown.argmax(1)
    axes.scatter(best, np.arange(len(rows)), s=14, color=palette.series[1], zorder=3)
    axes.set_yticks(range(len(rows)), [visible_token(query[row]) for row in rows], size=9)
    axes.set_xticks(
        range(len(columns)),
        [visible_token(document[column]) for column in columns],
        size=9,
        rotation=90,
    )
    axes.spines[:].set(visible=True, color=palette.grid)
    axes.tick_params(length=0, labelcolor=palette.text)
    left_out = len(document) - len(columns)
    some = f"; the {len(columns)} strongest of {len(document)} tokens" if left_out else ""
    heading = f"Tokens of the query (down) and of the document (across){some}; a dot marks the best"
    axes.set_title(heading, loc="left", size=11, weight="bold", color=palette.text, pad=6)
    _color_bar(figure, image, axes)


def _draw_heads(
    figure: Figure,
    place: SubplotSpec,
    heads: Mapping[str, Sequence[Float[np.ndarray, " _"]]],
    layers: Sequence[int],
    palette: Palette,
) -> None:
    """One map per side, layers down and heads across, in the same colors."""
    tables = {name: _table(each) for name, each in heads.items()}
    largest = max(max(float(np.nanmax(np.abs(each))) for each in tables.values()), 1e-12)
    inner = place.subgridspec(1, len(tables))
    image, drawn = None, []
    for column, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(inner[column])
        image = axes.imshow(
            table, cmap=palette.diverging, vmin=-largest, vmax=largest, aspect="auto"
        )
        numbers = layers or range(len(table))
        rows, across = (tick_positions(size, MAX_LABELS) for size in table.shape)
        axes.set_yticks(rows, [f"L{numbers[row]}" for row in rows], size=9)
        axes.set_xticks(across, [f"H{head}" for head in across], size=9)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=palette.text)
        heading = f"Heads, while the model reads the {name}"
        axes.set_title(heading, loc="left", size=11, weight="bold", color=palette.text, pad=6)
        drawn.append(axes)
    if image is not None:
        _color_bar(figure, image, drawn)


def _table(layers: Sequence[Float[np.ndarray, " _"]]) -> Float[np.ndarray, "l h"]:
    """Layers may differ in their number of heads."""
    table = np.full((len(layers), max(map(len, layers))), np.nan)
    for row, values in enumerate(layers):
        table[row, : len(values)] = values
    return table


def _color_bar(figure: Figure, image: AxesImage, axes: Axes | list[Axes]) -> None:
    bar = figure.colorbar(image, ax=axes, aspect=18, pad=0.012)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
