"""What a model loses as more and more of it is taken away, as curves with their errors."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyheads.errors import InputError, ShapeError
from manyheads.pictures.canvas import (
    DOTS,
    INK,
    QUIET,
    STYLE,
    Look,
    Paper,
    drawing,
    head_room,
    quiet_axes,
    write_picture,
    write_png,
)

# Okabe and Ito's colours, told apart by every reader; black is for what was there before.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to take parts away: shares that are gone, the metric there, its standard errors.

    `chosen` is the share at which the line was cut off, marked where it lies on the line.
    """

    name: str
    shares: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float] = ()
    chosen: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveWords:
    """What is written on the picture."""

    title: str
    subtitle: str
    share: str
    value: str
    whole: str = "whole model"


def draw_curve(lines: Sequence[Line], baseline: float, path: Path, *, words: CurveWords) -> None:
    """Write the lines into one picture, from the whole model at the left."""
    for line in lines:
        if len(line.shares) != len(line.values) or len(line.errors) not in (0, len(line.values)):
            raise ShapeError(
                f"the line {line.name!r} has {len(line.shares)} shares, {len(line.values)} values "
                f"and {len(line.errors)} errors",
                "give as many of each, or no errors",
            )
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 7.5), dpi=DOTS)
        figure.set_layout_engine("constrained", rect=(0.01, 0.01, 0.98, 0.86))
        axes = figure.subplots()
        for line, colour in zip(lines, COLOURS * len(lines), strict=False):
            _draw(axes, line, baseline, colour)
        axes.axhline(baseline, color=QUIET, linewidth=1.2, linestyle="--", label=words.whole)
        axes.set_xlabel(words.share, size=14, color=QUIET)
        axes.set_ylabel(words.value, size=14, color=QUIET)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.tick_params(labelsize=12, labelcolor=INK, color=QUIET)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=13)
        figure.text(0.015, 0.95, words.title, size=20, weight="bold", color=INK, va="center")
        figure.text(0.015, 0.90, words.subtitle, size=13, color=QUIET, va="center")
        write_png(figure, path)


def _draw(axes: Axes, line: Line, baseline: float, colour: str) -> None:
    shares, values = [0.0, *line.shares], [baseline, *line.values]
    axes.plot(shares, values, "-", color=colour, label=line.name, linewidth=2.4)
    if line.errors:
        errors = [0.0, *(error if error == error else 0.0 for error in line.errors)]
        low = [value - error for value, error in zip(values, errors, strict=True)]
        high = [value + error for value, error in zip(values, errors, strict=True)]
        axes.fill_between(shares, low, high, color=colour, alpha=0.18, linewidth=0)
    if line.chosen is not None and line.chosen in shares:
        place = shares.index(line.chosen)
        axes.plot(shares[place], values[place], "o", color=colour, markersize=10)
        # Where the line does not pass: over what it has come up, under what it has come down.
        rises = place > 0 and values[place] >= values[place - 1] and shares[place] > shares[-1] / 6
        axes.annotate(
            f"{line.chosen:.0%} gone",
            (shares[place], values[place]),
            textcoords="offset points",
            xytext=(-10, 10) if rises else (10, -20),
            ha="right" if rises else "left",
            size=13,
            color=colour,
        )


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


# Okabe and Ito's vermilion and blue, told apart by every reader.
PLAIN, SCALED = "#d55e00", "#0072b2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurves:
    """One quantity over the head sizes, with and without the division."""

    title: str
    plain: Sequence[float]
    scaled: Sequence[float]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingWords:
    """What is written on the picture."""

    title: str
    size: str
    plain: str
    scaled: str


def draw_scaling(
    sizes: Sequence[int], panels: Sequence[ScalingCurves], path: Path, *, words: ScalingWords
) -> None:
    """Write a panel a quantity."""
    for curves in panels:
        if not len(curves.plain) == len(curves.scaled) == len(sizes):
            raise ShapeError(
                f"{curves.title!r} has a value too many or too few", f"give {len(sizes)}"
            )
    with rc_context(STYLE):
        figure = Figure(figsize=(16, 6), dpi=DOTS)
        figure.set_layout_engine("constrained", wspace=0.06, rect=(0.006, 0.01, 0.988, 0.86))
        for axes, curves in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
        ):
            _draw_panel(axes, sizes, curves, words)
        figure.text(0.012, 0.935, words.title, size=21, weight="bold", color=INK, va="center")
        write_png(figure, path)


def _draw_panel(
    axes: Axes, sizes: Sequence[int], curves: ScalingCurves, words: ScalingWords
) -> None:
    lines = ((curves.plain, PLAIN, words.plain), (curves.scaled, SCALED, words.scaled))
    for values, colour, name in lines:
        axes.plot(sizes, values, "o-", color=colour, label=name, linewidth=2.5, markersize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    if curves.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(curves.title, loc="left", size=15, weight="bold", color=INK, pad=10)
    axes.set_xlabel(words.size, size=13, color=QUIET)
    axes.tick_params(labelsize=12, labelcolor=INK, color=QUIET)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=13)
