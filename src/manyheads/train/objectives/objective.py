"""The interface of an objective: prepared batches, losses, checks of the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import Between, NonNegativeFloat
from manyheads.argument_checks import check_fields
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.formatting import kind_of
from manyheads.models import encoder, provenance, seq2seq, vision
from manyheads.parts import experts, halting
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Watcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Smoothing = Annotated[float, Between(0, 1, "[)", "use a value such as 0.1")]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loss:
    """The main loss and its additions, all summed over the targets.

    So micro-batches and processes add up: the loss of a step is the sum of `combined` over all of
    them, divided by the sum of `targets`. An addition that is not a sum, such as a penalty on
    weights, is multiplied by the number of targets, and each addition by its own weight. `correct`
    is the number of correct predictions, where it is counted.
    """

    total: Float[Tensor, ""]
    targets: int
    parts: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    correct: Int[Tensor, ""] | None = None

    @property
    def combined(self) -> Float[Tensor, ""]:
        """The sum that is minimized."""
        return sum(self.parts.values(), self.total)

    def plus(self, parts: Mapping[str, Float[Tensor, ""]]) -> "Loss":
        """With more additions, each a mean over the targets."""
        sums = {name: self.targets * part for name, part in parts.items()}
        return replace(self, parts={**self.parts, **sums})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedBatch:
    """A batch as the model reads it, and the `labels` to predict at `positions`.

    Positions are tokens, sequences or images, depending on the objective, which may have one label
    per class. It is made on the host, where its shapes need no waiting for a device, then moved.
    """

    batch: Batch
    positions: Int[Tensor, " m"]
    labels: Int[Tensor, " m"] | Int[Tensor, "m classes"]

    @property
    def targets(self) -> int:
        return self.positions.shape[0]

    def to(self, device: torch.device | str) -> "PreparedBatch":
        """A copy on a device; copies from pinned memory do not block the host."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, batch=self.batch.to(device, non_blocking=True))

    def pin_memory(self) -> "PreparedBatch":
        return replace(self._map(Tensor.pin_memory), batch=self.batch.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PreparedBatch":
        """A function applied to all tensors outside of the batch."""
        return replace(self, positions=function(self.positions), labels=function(self.labels))


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Weights of the router losses of a mixture of experts, summed over its layers, and of halting.

    `balance` as in arXiv 2101.03961, `z` as in arXiv 2202.08906. `ponder` is that of the steps that
    tokens take before they stop (arXiv 1603.08983).
    """

    balance: NonNegativeFloat = 0.01
    z: NonNegativeFloat = 0.001
    ponder: NonNegativeFloat = 0.01


DEFAULT_ROUTING = Routing()


class WatcherChain:
    """Several watchers as one; each sees the value returned by the one before it."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = tuple(watchers)

    def wants(self, site: Site) -> bool:
        return any(watcher.wants(site) for watcher in self.watchers)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        for watcher in self.watchers:
            if watcher.wants(site):
                answer = watcher.see(site, value)
                value = value if answer is None else answer
        return value


def chain_watchers(*watchers: Watcher | None) -> Watcher | None:
    present = [watcher for watcher in watchers if watcher is not None]
    return WatcherChain(present) if present else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """Computes a loss from a model and a batch.

    `loss` does everything. A loop that compiles or wraps the model calls its two halves:
    `prepare` chooses inputs and labels on the host, `score` runs the model. `classified` says what
    a classification objective classifies.
    """

    classified: ClassVar[provenance.Classified | None] = None

    def __call__(self, model: Any, batch: Batch, generator: torch.Generator) -> Loss:
        return self.loss(model, batch, generator)

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator, *, watch: Watcher | None = None
    ) -> Loss:
        """The loss of a batch, and its parts."""
        self.check(model)
        device = next(model.parameters()).device
        return self.score(model, self.prepare(model, batch, generator).to(device), watch=watch)

    def attach(self, model: nn.Module) -> None:
        """Add trainable modules to the model, before the optimizer is built."""
        del model

    def with_tokenizer(self, tokenizer: "Tokenizer | None") -> "Objective":
        """The objective for texts of this tokenizer; without one, of the model's own."""
        del tokenizer
        return self

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise if the model cannot be trained with this objective."""

    @abstractmethod
    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        """The inputs and labels of a batch; all randomness comes from `generator`."""

    @abstractmethod
    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        """The loss of a prepared batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedObjective(Objective):
    """An objective that adds the losses of routers and of halting."""

    routing: Routing = DEFAULT_ROUTING

    def with_router_losses(
        self, total: Tensor, prepared: PreparedBatch, router: tuple[halting.AddedLoss, ...]
    ) -> Loss:
        routed = [added for added in router if isinstance(added, experts.RouterLosses)]
        halted = [added.ponder for added in router if isinstance(added, halting.PonderLoss)]
        terms = {
            "router balance": (self.routing.balance, [losses.balance for losses in routed]),
            "router z": (self.routing.z, [losses.z for losses in routed]),
            "ponder": (self.routing.ponder, halted),
        }
        parts = {
            name: weight * torch.stack(values).sum()
            for name, (weight, values) in terms.items()
            if weight and values
        }
        return Loss(total=total, targets=prepared.targets).plus(parts)


def require_texts(objective: Objective, batch: Batch) -> Ragged:
    if batch.texts is None:
        raise InputError(f"{type(objective).__name__} needs texts", "give a batch of texts")
    return batch.texts


def check_readout(
    objective: Objective, model: nn.Module, kind: type[nn.Module], readout: type
) -> None:
    check_kind(objective, model, kind)
    has = type(model.config.readout)  # type: ignore[union-attr]
    if has is not readout:
        remedy = f"build the model with readout={readout.__name__}(...)"
        if objective.classified is not None:
            remedy = "add classes: model.classes in a run file, with_classes in Python"
        raise ConfigError(
            f"{type(objective).__name__} cannot use the readout {has.__name__}", remedy
        )


KINDS: dict[type[nn.Module], str] = {
    encoder.TextModel: "a text encoder or decoder",
    seq2seq.Seq2Seq: "an encoder-decoder",
    vision.Vision: "a vision model",
}


def check_kind(objective: Objective, model: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(model, kind):
        name = type(objective).__name__
        raise ConfigError(f"{name} cannot train {kind_of(model)}", f"use {KINDS[kind]}")
