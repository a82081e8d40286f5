"""Why a text matched a query: marked words, the matrix of their tokens, and the heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.image import AxesImage

from manyheads.errors import ShapeError
from manyheads.pictures import canvas

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
    theme: canvas.Theme = "light",
) -> None:
    """Draw the words of a passage colored by what they add, and what is known besides.

    `matrix` has a row per token of the `query` and a column per token of the `document`; of a long
    document the columns with the largest values are drawn, in the order of the text. `heads` has
    one array per layer for each side, as in {"query": ..., "document": ...}.
    """
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
    passage = [canvas.visible_token(word, 40) for word in words[:MAX_WORDS]]
    boxes = canvas.place_words(passage, 0.0, PAGE - 0.4, character=CHARACTER, space=0.02)
    parts = [LINE * (boxes[-1][0] + 1) + 0.6]
    if matrix is not None:
        parts.append(ROW * min(len(query), MAX_ROWS) + 1.5)
    if heads:
        parts.append(LAYER * max(map(len, heads.values())) + 1.1)
    size = PAGE, sum(parts) + 0.2
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        grid = figure.add_gridspec(len(parts), 1, height_ratios=parts)
        axes = figure.add_subplot(grid[0])
        axes.set_axis_off()
        axes.set_xlim(0, PAGE - 0.4)
        axes.set_ylim(LINE * (boxes[-1][0] + 1) - 0.12, -0.2)
        values = np.nan_to_num(contributions[:MAX_WORDS])
        largest = max(float(np.abs(values).max()), 1e-12)
        for word, value, (line, x, width) in zip(passage, values, boxes, strict=True):
            color = palette.diverging(0.5 + 0.5 * float(value) / largest)
            canvas.draw_word(axes, word, (x, line * LINE, width), color)
        omitted = len(words) - MAX_WORDS
        more = f"; {omitted:,} more words are not drawn" if omitted > 0 else ""
        heading = f"Words of the document by what each {measure}, up to {largest:.2g}{more}"
        _add_heading(axes, heading, palette)
        if matrix is not None:
            _draw_matrix(figure, grid[1], query, document, matrix, palette)
        if heads:
            _draw_heads(figure, grid[-1], heads, layers, palette)


def _add_heading(axes: Axes, heading: str, palette: canvas.Palette) -> None:
    axes.set_title(heading, loc="left", size=11, weight="bold", color=palette.text, pad=6)


def _draw_matrix(
    figure: Figure,
    place: SubplotSpec,
    query: Sequence[str],
    document: Sequence[str],
    matrix: Float[np.ndarray, "q d"],
    palette: canvas.Palette,
) -> None:
    """Query down, document across; of many columns the strongest."""
    axes = figure.add_subplot(place)
    strength = matrix.max(0)
    # Those that are the best match of a token of the query come first.
    strength[matrix.argmax(1)] += np.abs(matrix).max()
    columns = np.sort(np.argsort(-strength, kind="stable")[:MAX_COLUMNS])
    rows = np.sort(np.argsort(-matrix.max(1), kind="stable")[:MAX_ROWS])
    table = matrix[np.ix_(rows, columns)]
    image = _draw_image(axes, table, float(np.abs(table).max()), palette)
    best = table.argmax(1)
    axes.scatter(best, np.arange(len(rows)), s=14, color=palette.series[1], zorder=3)
    axes.set_yticks(range(len(rows)), [canvas.visible_token(query[row]) for row in rows], size=9)
    names = [canvas.visible_token(document[column]) for column in columns]
    axes.set_xticks(range(len(columns)), names, size=9, rotation=90)
    axes.spines[:].set(visible=True, color=palette.grid)
    of_all = f"; the {len(columns)} strongest of {len(document)} tokens"
    note = of_all if len(columns) < len(document) else ""
    heading = f"Tokens of the query (down) and of the document (across){note}; a dot marks the best"
    _add_heading(axes, heading, palette)
    canvas.add_color_bar(figure, image, axes, aspect=18, pad=0.012)


def _draw_image(
    axes: Axes, table: Float[np.ndarray, "r c"], largest: float, palette: canvas.Palette
) -> AxesImage:
    norm = CenteredNorm(halfrange=max(largest, 1e-12))
    image = axes.imshow(
        table, cmap=palette.diverging, norm=norm, aspect="auto", interpolation="nearest"
    )
    axes.tick_params(length=0, labelcolor=palette.text)
    return image


def _draw_heads(
    figure: Figure,
    place: SubplotSpec,
    heads: Mapping[str, Sequence[Float[np.ndarray, " _"]]],
    layers: Sequence[int],
    palette: canvas.Palette,
) -> None:
    """One map per side, layers down and heads across, in the same colors."""
    tables = {name: canvas.head_table(by_layer) for name, by_layer in heads.items()}
    largest = max(float(np.nanmax(np.abs(table))) for table in tables.values())
    grid = place.subgridspec(1, len(tables))
    side_by_side = [figure.add_subplot(grid[column]) for column in range(len(tables))]
    for axes, (name, table) in zip(side_by_side, tables.items(), strict=True):
        image = _draw_image(axes, table, largest, palette)
        numbers = layers or range(len(table))
        rows, columns = (canvas.tick_positions(size, MAX_LABELS) for size in table.shape)
        axes.set_yticks(rows, [f"L{numbers[row]}" for row in rows], size=9)
        axes.set_xticks(columns, [f"H{head}" for head in columns], size=9)
        axes.spines[:].set_visible(False)
        _add_heading(axes, f"Heads, while the model reads the {name}", palette)
    canvas.add_color_bar(figure, image, side_by_side, aspect=18, pad=0.012)
