"""Circuits: heads and MLPs by layer, and the edges between them by weight and sign."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

from manyheads.errors import ShapeError
from manyheads.formatting import pluralise
from manyheads.pictures import canvas
from manyheads.pictures.circuit_layout import (
    CircuitLayout,
    CircuitNode,
    WeightedEdge,
    place_circuit,
)

# As many edges as one can follow.
MAX_EDGES = 40
# Inches: a column, a box, and a row of a small and of a tall picture.
COLUMN, BOX, HEIGHT = 1.0, 0.74, 0.27
ROW, MIN_ROW, MANY_ROWS = 0.9, 0.62, 24
MARGIN, EDGE, MIN_WIDTH = 0.7, 0.32, 7.2
WIDEST, THINNEST = 4.6, 0.8
DASHES = (0, (2.2, 0.9))


def draw_circuit(
    edges: Sequence[WeightedEdge],
    path: Path,
    *,
    max_edges: int = MAX_EDGES,
    total: int | None = None,
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw the strongest edges of a circuit, each a writer, a reader and a score; layers go upward.

    Wider edges have larger scores; those below 0 are dashed and have another color. The picture
    says how many edges it has, of the `total` number of edges that were scored.
    """
    ranked = sorted(edges, key=lambda edge: -abs(edge[2]))[:max_edges]
    if not ranked:
        raise ShapeError("there is no edge to draw", "pass at least one")
    layout = place_circuit(ranked)
    rows = len(layout.layers)
    row = max(MIN_ROW, ROW - (ROW - MIN_ROW) * max(0, rows - 6) / MANY_ROWS)
    width = max(MIN_WIDTH, COLUMN * layout.columns + 2 * MARGIN)
    height = row * (rows - 1) + 2 * EDGE
    most = max(abs(score) for _, _, score in ranked) or 1.0
    with canvas.themed_figure(path, theme, (width, height + 0.45), title, subtitle) as (
        figure,
        palette,
    ):
        axes = figure.subplots()
        axes.set(xlim=(-width / 2, width / 2), ylim=(-EDGE, height - EDGE), aspect="equal")
        axes.axis("off")
        _draw_layers(axes, layout, row, width, palette)
        for group, head in layout.shared:
            ends = [(layout[name].x * COLUMN, layout[name].row * row) for name in (group, head)]
            _draw_curve(axes, ends, color=palette.muted, linewidth=0.9, linestyle=(0, (1, 2)))
        # The strongest edges come last, above the others.
        for (writer, _, score), route in reversed([*zip(ranked, layout.routes, strict=True)]):
            rows_passed = range(layout[writer].row, layout[writer].row + len(route))
            points = [(x * COLUMN, at * row) for x, at in zip(route, rows_passed, strict=True)]
            points[0] = points[0][0], points[0][1] + HEIGHT / 2
            points[-1] = points[-1][0], points[-1][1] - HEIGHT / 2
            _draw_curve(
                axes,
                points,
                color=palette.series[int(score < 0)],
                linewidth=THINNEST + (WIDEST - THINNEST) * abs(score) / most,
                linestyle=DASHES if score < 0 else "solid",
                alpha=0.85,
            )
        for box in layout.nodes:
            _draw_node(axes, box, row, palette)
        note = f"the strongest {len(ranked):,} of {total or len(edges):,} edges"
        if len(ranked) == (total or len(edges)):
            note = pluralise(len(ranked), "edge")
        helps, hurts = palette.series[:2]
        handles = [
            Line2D([], [], color=helps, linewidth=2.5, label="helps"),
            Line2D([], [], color=hurts, linewidth=2.5, linestyle=DASHES, label="works against"),
        ]
        note = f"{note}; width: |score|, up to {most:.3g}"
        handles.append(Line2D([], [], linestyle="none", label=note))
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=3,
            frameon=False,
            fontsize=9,
            handlelength=2.4,
            columnspacing=1.2,
        )


def _draw_layers(
    axes: Axes, layout: CircuitLayout, row: float, width: float, palette: canvas.Palette
) -> None:
    """A band behind every second layer, and its name at the left."""
    names = list(dict.fromkeys(layout.layers))
    for index, name in enumerate(names):
        own = [number for number, layer in enumerate(layout.layers) if layer == name]
        if not name:
            continue
        low, high = (own[0] - 0.5) * row, (own[-1] + 0.5) * row
        if index % 2:
            axes.axhspan(low, high, color=palette.grid, alpha=0.28, linewidth=0, zorder=0)
        place = -width / 2 + 0.08, (low + high) / 2
        axes.text(*place, f"layer {name}", size=8.5, color=palette.muted, va="center", zorder=1)


def _draw_curve(axes: Axes, points: Sequence[tuple[float, float]], **style: object) -> None:
    """A smooth line upward through some points, vertical at each."""
    corners = [points[0]]
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = 0.5 * (to_y - y)
        corners += [(x, y + bend), (to_x, to_y - bend), (to_x, to_y)]
    outline = Outline(corners, [Outline.MOVETO, *[Outline.CURVE4] * (len(corners) - 1)])
    axes.add_patch(PathPatch(outline, fill=False, capstyle="butt", zorder=2, **style))


def _draw_node(axes: Axes, node: CircuitNode, row: float, palette: canvas.Palette) -> None:
    x, y = node.x * COLUMN, node.row * row
    width = max(BOX, 0.09 * len(node.name) + 0.14)
    box = FancyBboxPatch(
        (x - width / 2, y - HEIGHT / 2),
        width,
        HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.07",
        fc=palette.background,
        ec=palette.muted,
        lw=1.0,
        zorder=4,
    )
    axes.add_patch(box)
    axes.text(
        x,
        y,
        node.name,
        size=9,
        ha="center",
        va="center",
        color=palette.text,
        zorder=5,
        weight="bold" if not node.name.startswith("L") else "normal",
    )
    for port in filter(None, node.ports):
        axes.text(
            node.port(port) * COLUMN,
            y - HEIGHT / 2 - 0.015,
            port[0].upper(),
            size=6.5,
            ha="center",
            va="top",
            color=palette.muted,
            zorder=5,
            weight="bold",
            bbox={"boxstyle": "circle,pad=0.12", "fc": palette.background, "ec": "none"},
        )
