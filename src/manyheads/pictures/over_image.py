"""Vision attention laid over the image: for each head, where one patch or the class looks."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LinearSegmentedColormap

from manyheads.errors import ShapeError
from manyheads.pictures.paper import Look, drawing, head_room, write_picture

__all__ = ["draw_over_image"]

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
