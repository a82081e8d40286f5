"""Charts of a classifier: which class is taken for which, and how confident it is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manyheads.errors import ShapeError
from manyheads.pictures import canvas

# Beyond so many classes cells have no numbers, and axes no more names.
MOST_NUMBERS, MOST_NAMES = 24, 60


def draw_confusion(
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    path: Path,
    *,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw a confusion matrix: expected classes down, predicted ones across.

    Cells show counts; their color is the fraction of the expected class, so that rare classes are
    seen as well as frequent ones.
    """
    table = np.asarray(counts, dtype=float)
    size = len(names)
    if table.shape != (size, size) or not size:
        raise ShapeError(
            f"counts of shape {table.shape} do not fit {size} names", "pass a square of counts"
        )
    rows = table.sum(1, keepdims=True)
    shares = np.divide(table, rows, out=np.zeros_like(table), where=rows > 0)
    cell = 0.62 if size <= MOST_NUMBERS else max(0.12, 15 / size)
    names = [canvas.shorten(name, 20) for name in names]
    side = size * cell + 0.085 * max(map(len, names))
    extent = max(side + 1.9, 4.6), max(side + 0.9, 2.6)
    with canvas.themed_figure(path, theme, extent, title, subtitle) as (figure, palette):
        axes = figure.subplots()
        image = axes.imshow(shares, cmap=palette.sequential, vmin=0, vmax=1)
        ticks = canvas.tick_positions(size, MOST_NAMES)
        labels = [names[index] for index in ticks]
        axes.set_xticks(ticks, labels, size=9, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(ticks, labels, size=9)
        axes.set_xlabel("predicted", size=10)
        axes.set_ylabel("expected", size=10)
        canvas.outline_cells(axes, size, size, palette.background, 2.0 if size < 40 else 0.5)
        axes.tick_params(which="both", length=0, labelcolor=palette.text)
        if size <= MOST_NUMBERS:
            for row, column in np.argwhere(table > 0).tolist():
                ink = canvas.ink_on(palette.sequential(shares[row, column]))
                number = f"{int(table[row, column]):,}"
                axes.text(column, row, number, ha="center", va="center", size=9, color=ink)
        label = "fraction of the expected class"
        canvas.add_color_bar(figure, image, axes, label, aspect=22, pad=0.02)
