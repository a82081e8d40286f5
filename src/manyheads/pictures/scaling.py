"""What 1/sqrt(d) does to scores, as curves over the head size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyheads.errors import ShapeError
from manyheads.pictures.png import DOTS, INK, QUIET, STYLE, write_png

__all__ = ["Curves", "ScalingWords", "draw_scaling"]

# Okabe and Ito's vermilion and blue, told apart by every reader.
PLAIN, SCALED = "#d55e00", "#0072b2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
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
    sizes: Sequence[int], panels: Sequence[Curves], path: Path, *, words: ScalingWords
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


def _draw_panel(axes: Axes, sizes: Sequence[int], curves: Curves, words: ScalingWords) -> None:
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
