"""What every objective is, and the models that it refuses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.checkpoints.classification_head import Classified
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.text import TextModel
from manyheads.models.vision import Vision
from manyheads.parts.experts import RouterLosses
from manyheads.ragged import Ragged
from manyheads.taps import Watcher
from manyheads.train.loss import Loss, Task, check_weight

__all__ = [
    "Objective",
    "RoutedObjective",
    "Routing",
    "check_readout",
    "check_smoothing",
    "texts_of",
    "unfit",
]


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
