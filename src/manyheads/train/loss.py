"""What an objective makes of a batch: a sum over its targets, and what is added to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError

__all__ = ["Loss", "Task", "check_weight"]


def check_weight(name: str, weight: float) -> None:
    """Refuse a weight of a loss that would reward what it should cost."""
    if not 0 <= weight < math.inf:
        raise ConfigError(f"{name}={weight:g} is no weight of a loss", "use 0 or more")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loss:
    """The main loss and each addition to it, all summed over the targets.

    So micro-batches and processes add up: the loss of a step is the sum of `whole` over all of
    them, divided by the sum of `targets`. An addition that is no sum by nature, such as a penalty
    on weights, comes multiplied by the number of targets, and each by its own weight. `right` is
    how many answers were, where that is asked for.
    """

    total: Float[Tensor, ""]
    targets: int
    parts: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    right: Int[Tensor, ""] | None = None

    @property
    def whole(self) -> Float[Tensor, ""]:
        """What training follows."""
        whole = self.total
        for part in self.parts.values():
            whole = whole + part
        return whole

    def plus(self, parts: Mapping[str, Float[Tensor, ""]]) -> "Loss":
        """With more additions, given as means over the targets."""
        return replace(
            self,
            parts={**self.parts, **{name: self.targets * part for name, part in parts.items()}},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Task:
    """A batch as the model reads it, and what it is asked: `answers` at `places`.

    Places are tokens, or sequences, or images, by the objective. It is made on the host, where its
    shapes are known without waiting, and then moved.
    """

    batch: Batch
    places: Int[Tensor, " m"]
    answers: Int[Tensor, " m"]

    @property
    def targets(self) -> int:
        return self.places.shape[0]

    def to(self, device: torch.device | str) -> "Task":
        """Pinned memory is copied while the host goes on."""
        return Task(
            batch=self.batch.sent(device),
            places=self.places.to(device, non_blocking=True),
            answers=self.answers.to(device, non_blocking=True),
        )

    def pinned(self) -> "Task":
        return Task(
            batch=self.batch.pinned(),
            places=self.places.pin_memory(),
            answers=self.answers.pin_memory(),
        )
