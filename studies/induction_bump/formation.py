"""What is watched while induction heads form, and when they have."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyheads import lens
from studies.study import Settings
from studies.training import loss_by_position


def log_spaced(steps: int, moments: int, first: int = 20) -> list[int]:
    """The start, then steps that grow by one factor up to the last.

    >>> log_spaced(3000, 5, first=30)
    [0, 30, 139, 646, 3000]
    """
    first = min(first, steps)
    growth = (steps / first) ** (1 / max(moments - 2, 1))
    return sorted({0, *(round(first * growth**place) for place in range(moments - 1))})


def observe_model(
    passages: Tensor, blocks: Tensor, settings: Settings, model: nn.Module
) -> dict[str, float]:
    """The best heads of two kinds, the loss on both copies of a block, and the in-context score."""
    around = settings["around"]
    losses = loss_by_position(model, passages)
    copies = torch.tensor(loss_by_position(model, blocks))
    half = blocks.shape[1] // 2
    heads = lens.statistics(model, blocks.tolist(), progress=False)

    def near(position: int) -> float:
        window = losses[position - around : position + around]
        return sum(window) / len(window)

    # The first word of a block follows from nothing.
    first, second = float(copies[: half - 1].mean()), float(copies[half:].mean())
    return {
        "induction": float(heads["induction"].means.max()),
        "previous token": float(heads["previous_token"].means.max()),
        "in context": near(settings["late"]) - near(settings["early"]),
        "first copy": first,
        "second copy": second,
        "gain": first - second,
        "loss": sum(losses) / len(losses),
    }


def first_above(steps: Sequence[int], values: Sequence[float], bound: float) -> float | None:
    """The step at which values first pass a bound, between the measured ones; None if never.

    >>> first_above([0, 10, 20], [0.0, 0.1, 0.3], 0.2)
    15.0
    """
    for place in range(1, len(values)):
        low, high = values[place - 1], values[place]
        if low <= bound < high:
            share = (bound - low) / (high - low)
            return steps[place - 1] + share * (steps[place] - steps[place - 1])
    return None


def share_in_window(heads: Sequence[float], scores: Sequence[float]) -> float:
    """How much of the change of a score falls into the time in which heads form.

    That is from the last moment below a tenth of their final value to the first above nine tenths.

    >>> round(share_in_window([0.0, 0.01, 0.4, 0.5], [-0.1, -0.2, -0.4, -0.5]), 2)
    0.75
    """
    bounds = [heads[0] + share * (heads[-1] - heads[0]) for share in (0.1, 0.9)]
    below = max((at for at, value in enumerate(heads) if value <= bounds[0]), default=0)
    above = next((at for at, value in enumerate(heads) if value >= bounds[1]), len(heads) - 1)
    change = scores[-1] - scores[0]
    return (scores[max(above, below)] - scores[below]) / change if change else math.nan
