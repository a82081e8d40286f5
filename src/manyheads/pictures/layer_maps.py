"""Values by layer and token, such as the maps of causal tracing."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from manyheads.errors import ShapeError
from manyheads.pictures import canvas

MAX_LAYERS_LABELED = 12


def draw_layer_maps(
    maps: Mapping[str, Float[np.ndarray, "l t"]],
    tokens: Sequence[str],
    path: Path,
    *,
    marked: Collection[int] = (),
    limits: tuple[float, float] | None = None,
    measure: str = "",
    title: str = "",
    subtitle: str = "",
    theme: canvas.Theme = "light",
) -> None:
    """Draw one map per name side by side: tokens from top to bottom, layers from left to right.

    The `marked` tokens, such as those with noise, have a star. `limits` are the values of the
    lightest and the darkest color.
    """
    shapes = {values.shape for values in maps.values()}
    if len(shapes) != 1 or (shape := next(iter(shapes)))[1] != len(tokens) or not tokens:
        raise ShapeError(
            f"the maps have shapes {sorted(shapes)} and there are {len(tokens)} tokens",
            "pass maps of one shape, with one column per token",
        )
    layers = shape[0]
    names = [canvas.visible_token(token) + "*" * (at in marked) for at, token in enumerate(tokens)]
    low, high = limits or _limits(maps)
    size = 1.6 + len(maps) * max(1.8, 0.16 * layers), 0.9 + 0.24 * len(tokens)
    with canvas.themed_figure(path, theme, size, title, subtitle) as (figure, palette):
        panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for axes, (name, values) in zip(panels, maps.items(), strict=True):
            image = axes.imshow(
                values.T,
                cmap=palette.sequential,
                vmin=low,
                vmax=high,
                aspect="auto",
                interpolation="nearest",
            )
            axes.set_title(name, loc="left", size=10, weight="bold", color=palette.text)
            axes.set_xticks(canvas.tick_positions(layers, MAX_LAYERS_LABELED))
            axes.set_xlabel("layer", size=9)
            axes.set_yticks(range(len(tokens)), names)
            axes.tick_params(length=0, labelsize=9, labelcolor=palette.text)
            axes.spines[:].set_visible(False)
        canvas.add_color_bar(figure, image, list(panels), measure, fraction=0.05)


def _limits(maps: Mapping[str, Float[np.ndarray, "l t"]]) -> tuple[float, float]:
    """The smallest and the largest value; 0 and 1 if there is none."""
    values = np.concatenate([own[~np.isnan(own)] for own in maps.values()])
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
