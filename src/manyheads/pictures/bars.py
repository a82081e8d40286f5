"""Heads as bars with their errors: what ablation or attribution found, largest first."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, drawing, head_room, quiet_axes, write_picture

__all__ = ["draw_bars"]


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
