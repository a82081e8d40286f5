"""Scores over a text: each word on the colour of its share, as rollout or flow give them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import FancyBboxPatch

from manyheads.errors import ShapeError
from manyheads.pictures.canvas import Look, drawing, head_room, visible, write_picture

# Inches of a letter and of a line, and how wide the page is.
LETTER, LINE, WIDE = 0.112, 0.36, 11.0


def draw_over_text(
    tokens: Sequence[str],
    scores: Mapping[str, Float[np.ndarray, " s"]],
    path: Path,
    *,
    at: int | None = None,
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write the text once for each way, as {"rollout": ..., "flow": ...}, scores from 0 up.

    `at` is the place that was asked about, framed. Each text is coloured up to its own largest
    score, which is told.
    """
    for name, values in scores.items():
        if len(values) != len(tokens):
            raise ShapeError(
                f"{name} has {len(values)} scores for {len(tokens)} tokens", "give one a token"
            )
    if not tokens or not scores:
        raise ShapeError("there is no text to draw", "give tokens, and one or more scores")
    lines = _lines(tokens)
    block = LINE * (max(line for line, _, _ in lines) + 1) + 0.62
    size = (WIDE, block * len(scores) + 0.1 + head_room(title, subtitle))
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        # Everything has its place here, and the layout has nothing to do.
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, size[0])
        axes.set_ylim(size[1], 0)
        top = head_room(title, subtitle) + 0.2
        for name, values in scores.items():
            most = float(np.nanmax(values))
            said = f"{name}, up to {most:.2g}"
            axes.text(0.18, top + 0.1, said, size=11, weight="bold", color=paper.ink, va="center")
            for place, (line, x, width) in enumerate(lines):
                y = top + 0.48 + line * LINE
                share = float(values[place]) / most if most > 0 else 0.0
                colour = paper.scale(0.85 * share if share > 0 else 0.0)
                edge = paper.colours[1] if place == at else "none"
                axes.add_patch(_box(x, y, width, colour, edge))
                axes.text(
                    x + width / 2,
                    y,
                    visible(tokens[place]),
                    size=10,
                    ha="center",
                    va="center",
                    color=_ink(colour),
                )
            top += block
        write_picture(figure, path)


def _lines(tokens: Sequence[str]) -> list[tuple[int, float, float]]:
    """For each token its line, where it starts and how wide it is, in inches."""
    found, line, x = [], 0, 0.18
    for token in tokens:
        # Letters of some scripts stand on two places.
        letters = sum(2 if ord(letter) > 0x2E80 else 1 for letter in visible(token))
        width = LETTER * letters + 0.1
        if x + width > WIDE - 0.18 and x > 0.18:
            line, x = line + 1, 0.18
        found.append((line, x, width))
        x += width + 0.03
    return found


def _box(
    x: float, y: float, width: float, colour: tuple[float, float, float, float], edge: str
) -> FancyBboxPatch:
    return FancyBboxPatch(
        (x, y - 0.13),
        width,
        0.26,
        boxstyle="round,pad=0,rounding_size=0.05",
        facecolor=colour,
        edgecolor=edge,
        linewidth=2,
    )


def _ink(colour: Sequence[float]) -> str:
    red, green, blue = colour[:3]
    return "#1c2433" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.53 else "#f6f7fa"


# From nothing to a yellow that is bright on any picture; under it the image is darkened.
GLOW = LinearSegmentedColormap.from_list(
    "glow", [(0.05, 0.06, 0.14, 0.72), (0.55, 0.25, 0.1, 0.55), (1.0, 0.9, 0.25, 0.45)]
)


def draw_over_image(
    image: Float[np.ndarray, "height width 3"],
    weights: Float[np.ndarray, "h rows columns"],
    path: Path,
    *,
    names: Sequence[str] = (),
    title: str = "",
    subtitle: str = "",
    look: Look = "light",
) -> None:
    """Write the image, then one copy a head under its weights over the patches.

    The image has values from 0 to 1; `weights` are those of one query on the patches.
    """
    heads = len(weights)
    names = names or [f"head {head}" for head in range(heads)]
    if len(names) != heads or not heads:
        raise ShapeError(f"there are {len(names)} names for {heads} heads", "give one a head")
    columns = min(5, heads + 1)
    rows = math.ceil((heads + 1) / columns)
    size = (2.3 * columns, 2.55 * rows + head_room(title, subtitle))
    height, width = image.shape[:2]
    with drawing(look, size, title=title, subtitle=subtitle) as (figure, paper):
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if place > heads:
                continue
            axes.imshow(np.clip(image, 0, 1), extent=(0, width, height, 0))
            name = "the image" if place == 0 else names[place - 1]
            if place:
                mine = weights[place - 1]
                axes.imshow(
                    mine / max(float(mine.max()), 1e-9),
                    cmap=GLOW,
                    vmin=0,
                    vmax=1,
                    extent=(0, width, height, 0),
                    interpolation="bilinear",
                )
                name = f"{name}  ≤ {mine.max():.2f}"
            axes.set_title(name, loc="left", size=10, color=paper.ink, pad=4)
        write_picture(figure, path)
