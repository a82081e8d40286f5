"""What every objective is, and the models that it refuses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.checkpoints.classes import Classified
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.text import TextModel
from manyheads.models.vision import Vision
from manyheads.parts.experts import RouterLosses
from manyheads.ragged import Ragged
from manyheads.taps import Watcher


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How much the losses of a mixture of experts count, summed over its layers.

    `balance` as in arXiv 2101.03961, `z` as in arXiv 2202.08906.
    """

    balance: float = 0.01
    z: float = 0.001

    def __post_init__(self) -> None:
        check_weight("routing.balance", self.balance)
        check_weight("routing.z", self.z)


EVEN = Routing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """What is asked of a model.

    `loss` does it all. A loop that compiles or wraps the model calls its two halves itself:
    `prepare` chooses on the host what to ask, `score` runs the model. One that asks for classes
    says of what.
    """

    classified: ClassVar[Classified | None] = None

    def __call__(self, model: Any, batch: Batch, draw: torch.Generator) -> Loss:
        return self.loss(model, batch, draw)

    def loss(
        self, model: Any, batch: Batch, draw: torch.Generator, *, watch: Watcher | None = None
    ) -> Loss:
        """The sum over the batch's targets, and its parts."""
        self.check(model)
        device = next(model.parameters()).device
        return self.score(model, self.prepare(model, batch, draw).to(device), watch=watch)

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot be trained for this."""

    @abstractmethod
    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        """What the model is to read and to answer; whatever is random comes from `draw`."""

    @abstractmethod
    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        """How far the model is from the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedObjective(Objective):
    """An objective that asks a mixture of experts to share the work, besides."""

    routing: Routing = EVEN

    def summed(self, total: Tensor, task: Task, router: tuple[RouterLosses, ...]) -> Loss:
        loss = Loss(total=total, targets=task.targets)
        if not router:
            return loss
        parts = {}
        if self.routing.balance:
            summed = torch.stack([each.balance for each in router]).sum()
            parts["router balance"] = self.routing.balance * summed
        if self.routing.z:
            summed = torch.stack([each.z for each in router]).sum()
            parts["router z"] = self.routing.z * summed
        return loss.plus(parts)


def texts_of(objective: Objective, batch: Batch) -> Ragged:
    if batch.texts is None:
        raise InputError(f"{type(objective).__name__} wants texts", "give a batch of texts")
    return batch.texts


def check_smoothing(share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"label_smoothing={share:g} is no share", "use 0 <= share < 1")


def check_readout(
    objective: Objective, model: nn.Module, kind: type[nn.Module], readout: type
) -> None:
    if not isinstance(model, kind):
        raise unfit(objective, model, KINDS[kind])
    has = type(model.config.readout)  # type: ignore[union-attr]
    if has is not readout:
        remedy = f"build the model with readout={readout.__name__}(...)"
        if objective.classified is not None:
            remedy = "give it classes: model.classes in a run file, with_classes in Python"
        raise ConfigError(f"{type(objective).__name__} cannot be read off {has.__name__}", remedy)


KINDS: dict[type[nn.Module], str] = {
    TextModel: "an encoder or a decoder of text",
    Seq2Seq: "an encoder-decoder",
    Vision: "a model of images",
}


def unfit(objective: Objective, model: nn.Module, wanted: str) -> ConfigError:
    name = type(objective).__name__
    return ConfigError(f"{name} cannot train a {type(model).__name__}", f"give it {wanted}")
