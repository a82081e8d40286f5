"""Curves while training: one measure of every head over the steps, the striking ones named."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from manyheads.errors import InputError, ShapeError
from manyheads.pictures.paper import (
    Look,
    Paper,
    drawing,
    head_room,
    quiet_axes,
    write_picture,
)

__all__ = ["draw_training", "read_heads"]

# By head, one value a step; NaN where it was not measured.
Curves = Mapping[str, Float[np.ndarray, " t"]]


def draw_training(
    steps: Sequence[int],
    panels: Mapping[str, Curves],
    path: Path,
    *,
    named: int = 4,
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write a panel a measure; the `named` heads that end highest are coloured, the rest pale."""
    if not panels or not steps:
        raise ShapeError("there is nothing to draw", "give one or more measures and steps")
    for measure, curves in panels.items():
        for head, values in curves.items():
            if len(values) != len(steps):
                raise ShapeError(
                    f"{measure} of {head} has {len(values)} values for {len(steps)} steps",
                    "give one a step, NaN where there is none",
                )
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (4.6 * columns + 0.4, 3.4 * rows + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (measure, curves) in zip(grid.flat, panels.items(), strict=False):
            _panel(axes, steps, curves, named, paper)
            axes.set_title(measure, loc="left", size=12, weight="bold", color=paper.ink)
            axes.set_xlabel("step", size=10)
        write_picture(figure, path)


def read_heads(
    file: Path, measures: Sequence[str], *, stack: str = "main"
) -> tuple[list[int], dict[str, Curves]]:
    """The steps of a run's telemetry.jsonl, and each measure by head.

    A line has its step, its stack, and of each measure a list a layer of values by head, as in
    {"step": 10, "stack": "main", "induction": [[0.1, 0.2]]}.
    """
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    lines = [line for line in lines if line.get("stack", "main") == stack]
    known = sorted({name for line in lines for name in line if isinstance(line[name], list)})
    found: dict[str, Curves] = {}
    for measure in measures:
        if measure not in known:
            raise InputError(
                f"{file} tells no {measure} of the {stack} stack",
                f"use {', '.join(known)}" if known else "name the telemetry.jsonl of a run",
            )
        found[measure] = _by_head([line.get(measure, []) for line in lines])
    return [int(line["step"]) for line in lines], found


def _by_head(tables: Sequence[Sequence[Sequence[float]]]) -> Curves:
    heads = sorted(
        {
            (layer, head)
            for table in tables
            for layer, row in enumerate(table)
            for head in range(len(row))
        }
    )
    curves = {f"L{layer}H{head}": np.full(len(tables), np.nan) for layer, head in heads}
    for step, table in enumerate(tables):
        for layer, row in enumerate(table):
            for head, value in enumerate(row):
                curves[f"L{layer}H{head}"][step] = math.nan if value is None else value
    return curves


def _panel(axes: Axes, steps: Sequence[int], curves: Curves, named: int, paper: Paper) -> None:
    last = {head: _last(values) for head, values in curves.items()}
    best = sorted(last, key=lambda head: -last[head])[:named]
    for head, values in curves.items():
        if head not in best:
            axes.plot(steps, values, color=paper.quiet, alpha=0.28, linewidth=0.9)
    for place, head in enumerate(best):
        colour = paper.colours[place % len(paper.colours)]
        axes.plot(steps, curves[head], color=colour, linewidth=2, label=head)
    quiet_axes(axes, paper)
    axes.legend(frameon=False, fontsize=9, labelcolor=paper.ink, loc="best")


def _last(values: Float[np.ndarray, " t"]) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else -math.inf
