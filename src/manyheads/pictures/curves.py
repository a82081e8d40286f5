"""Curves: a metric while parts are removed, heads while training, and the effect of 1/√d."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from manyheads.checkpoints.files import parse_json
from manyheads.errors import InputError, ShapeError
from manyheads.formatting import percent
from manyheads.pictures import canvas

# Okabe and Ito's colors, which everybody can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric by the fraction of parts that is removed, with standard errors.

    `chosen` is the fraction that was finally removed; it is marked on the curve.
    """

    name: str
    fractions: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float] = ()
    chosen: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLabels:
    """The texts of the figure."""

    title: str
    subtitle: str
    xlabel: str
    ylabel: str
    baseline: str = "full model"


def draw_curve(
    curves: Sequence[Curve], baseline: float, path: Path, *, labels: CurveLabels
) -> None:
    """Draw the curves, all starting from the full model at the left."""
    for curve in curves:
        count = len(curve.values)
        if len(curve.fractions) != count or len(curve.errors) not in (0, count):
            raise ShapeError(
                f"the curve {curve.name!r} has {len(curve.fractions)} fractions, "
                f"{count} values and {len(curve.errors)} errors",
                "pass as many of each, or no errors",
            )
    with canvas.plain_figure(path, (12.0, 7.5), rect=(0.01, 0.01, 0.98, 0.86)) as figure:
        axes = figure.subplots()
        for curve, color in zip(curves, COLORS * len(curves), strict=False):
            _draw(axes, curve, baseline, color)
        axes.axhline(
            baseline, color=canvas.MUTED, linewidth=1.2, linestyle="--", label=labels.baseline
        )
        axes.set_xlabel(labels.xlabel, size=14, color=canvas.MUTED)
        axes.set_ylabel(labels.ylabel, size=14, color=canvas.MUTED)
        axes.xaxis.set_major_formatter(lambda fraction, _: percent(fraction))
        _style_plain_axes(axes)
        figure.text(0.015, 0.95, labels.title, size=20, **canvas.TITLE)
        figure.text(0.015, 0.90, labels.subtitle, size=13, color=canvas.MUTED, va="center")


def _style_plain_axes(axes: Axes) -> None:
    axes.tick_params(labelsize=12, labelcolor=canvas.TEXT_COLOR, color=canvas.MUTED)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=13)


def _draw(axes: Axes, curve: Curve, baseline: float, color: str) -> None:
    fractions, values = [0.0, *curve.fractions], [baseline, *curve.values]
    axes.plot(fractions, values, "-", color=color, label=curve.name, linewidth=2.4)
    if curve.errors:
        middle, errors = np.array(values), np.nan_to_num([0.0, *curve.errors])
        low, high = middle - errors, middle + errors
        axes.fill_between(fractions, low, high, color=color, alpha=0.18, linewidth=0)
    if curve.chosen is not None and curve.chosen in fractions:
        index = fractions.index(curve.chosen)
        axes.plot(fractions[index], values[index], "o", color=color, markersize=10)
        # Above a rising curve, below a falling one.
        rises = index > 0 and values[index] >= values[index - 1]
        rises = rises and fractions[index] > fractions[-1] / 6
        axes.annotate(
            f"{percent(curve.chosen)} removed",
            (fractions[index], values[index]),
            textcoords="offset points",
            xytext=(-10, 10) if rises else (10, -20),
            ha="right" if rises else "left",
            size=13,
            color=color,
        )


# By head one value per step, NaN where it was not measured.
Curves = Mapping[str, Float[np.ndarray, " t"]]


def draw_training(
    steps: Sequence[int],
    panels: Mapping[str, Curves],
    path: Path,
    *,
    top_k: int = 4,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw a panel per measure; the `top_k` heads that end highest are colored."""
    if not panels or not steps:
        raise ShapeError("there is nothing to draw", "pass at least one measure and one step")
    for measure, curves in panels.items():
        for head, values in curves.items():
            if len(values) != len(steps):
                raise ShapeError(
                    f"{measure} of {head} has {len(values)} values for {len(steps)} steps",
                    "pass one per step, NaN where there is none",
                )
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = 4.6 * columns + 0.4, 3.4 * rows
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (measure, curves) in zip(grid.flat, panels.items(), strict=False):
            last = {head: values[~np.isnan(values)][-1:] for head, values in curves.items()}
            best = sorted(last, key=lambda head: -last[head].max(initial=-math.inf))[:top_k]
            for head in curves:
                if head not in best:
                    axes.plot(steps, curves[head], color=palette.muted, alpha=0.28, linewidth=0.9)
            for head, color in zip(best, cycle(palette.series), strict=False):
                axes.plot(steps, curves[head], color=color, linewidth=2, label=head)
            canvas.style_axes(axes, palette)
            axes.legend(frameon=False, fontsize=9, labelcolor=palette.text, loc="best")
            axes.set_title(measure, loc="left", size=12, weight="bold", color=palette.text)
            axes.set_xlabel("step", size=10)


def read_telemetry(
    file: Path, measures: Sequence[str], *, stack: str = "main"
) -> tuple[list[int], dict[str, Curves]]:
    """Read the steps of a run's telemetry.jsonl, and the curves of some measures by head.

    Each line has a step, a stack, and for each measure a list of values by head per layer, as in
    {"step": 10, "stack": "main", "induction": [[0.1, 0.2]]}.
    """
    again = "pass the telemetry.jsonl of a run"
    if not file.is_file():
        raise InputError(f"{file} does not exist", again)
    lines = [
        parse_json(line, f"{file}, line {number},", remedy=again)
        for number, line in enumerate(file.read_bytes().splitlines(), 1)
        if line.strip()
    ]
    if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
        raise InputError(f"{file} has a line without a step", again)
    lines = [line for line in lines if line.get("stack", "main") == stack]
    measured = sorted({name for line in lines for name in line if isinstance(line[name], list)})
    panels: dict[str, Curves] = {}
    for measure in measures:
        if measure not in measured:
            raise InputError(
                f"{file} has no measure {measure} of the {stack} stack",
                f"use {', '.join(measured)}" if measured else again,
            )
        try:
            panels[measure] = _by_head([line.get(measure, []) for line in lines])
        except (TypeError, ValueError):
            raise InputError(f"{file}: {measure} has no numbers by layer and head", again) from None
    return [int(line["step"]) for line in lines], panels


def _by_head(tables: Sequence[Sequence[Sequence[float]]]) -> Curves:
    curves: dict[tuple[int, int], np.ndarray] = {}
    for step, table in enumerate(tables):
        for layer, row in enumerate(table):
            for head, value in enumerate(row):
                curve = curves.setdefault((layer, head), np.full(len(tables), np.nan))
                curve[step] = math.nan if value is None else value
    return {f"L{layer}H{head}": curves[layer, head] for layer, head in sorted(curves)}


PLAIN, SCALED = "#d55e00", "#0072b2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurves:
    """One quantity by head size, without and with the division by √d."""

    title: str
    plain: Sequence[float]
    scaled: Sequence[float]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLabels:
    """The texts of the figure of 1/√d."""

    title: str
    size: str
    plain: str
    scaled: str


def draw_scaling(
    sizes: Sequence[int], panels: Sequence[ScalingCurves], path: Path, *, labels: ScalingLabels
) -> None:
    """Draw a panel per quantity."""
    for curves in panels:
        if not len(curves.plain) == len(curves.scaled) == len(sizes):
            raise ShapeError(
                f"{curves.title!r} must have one value per head size", f"pass {len(sizes)}"
            )
    rect = (0.006, 0.01, 0.988, 0.86)
    with canvas.plain_figure(path, (16.0, 6.0), wspace=0.06, rect=rect) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False)
        bold = {"size": 15, "weight": "bold", "color": canvas.TEXT_COLOR}
        for axes, curves in zip(grid.flat, panels, strict=True):
            lines = ((curves.plain, PLAIN, labels.plain), (curves.scaled, SCALED, labels.scaled))
            for values, color, name in lines:
                axes.plot(sizes, values, "o-", color=color, label=name, linewidth=2.5, markersize=7)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            if curves.logarithmic:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.minorticks_off()
            else:
                axes.set_ylim(bottom=0)
            axes.set_title(curves.title, loc="left", pad=10, **bold)
            axes.set_xlabel(labels.size, size=13, color=canvas.MUTED)
            _style_plain_axes(axes)
        figure.text(0.012, 0.935, labels.title, size=21, **canvas.TITLE)
