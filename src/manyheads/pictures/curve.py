"""What a model loses as more and more of it is taken away, as curves with their errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyheads.errors import ShapeError
from manyheads.pictures.png import DOTS, INK, QUIET, STYLE, write_png

__all__ = ["CurveWords", "Line", "draw_curve"]

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
