"""Adaptive computation time (arXiv 1603.08983): each token decides when to stop."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.annotations import Share
from manyheads.argument_checks import check_fields
from manyheads.parts.experts import RouterLosses


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Halting:
    """Tokens stop on their own, as in Universal Transformers (arXiv 1807.03819).

    Before every layer the state of a token gives the probability that it stops there. Once their
    sum exceeds `threshold`, and at the last layer at the latest, it stops: its output is the mean
    of its states after the layers, weighted by these probabilities, with what is missing to one for
    the last. Layers still compute its keys and values for tokens that go on.
    """

    threshold: Share = 0.99


@dataclass(frozen=True, slots=True)
class PonderLoss:
    """What training adds so that tokens stop soon: the mean of their steps and remainders."""

    ponder: Float[Tensor, ""]
    steps: Int[Tensor, " n"]
    """How many layers each token used."""


# Losses of a model's own parts, which training adds to that of its task.
AddedLoss = RouterLosses | PonderLoss


class HaltingSteps:
    """The tokens of a batch on their way through the layers."""

    def __init__(self, config: Halting, x: Float[Tensor, "n c"]) -> None:
        self.config = config
        self.running: Bool[Tensor, " n"] = torch.ones_like(x[:, 0], dtype=torch.bool)
        self.total: Float[Tensor, " n"] = torch.zeros_like(x[:, 0], dtype=torch.float32)
        self.remainder = self.total
        self.steps: Int[Tensor, " n"] = torch.zeros_like(self.running, dtype=torch.long)
        self.output = torch.zeros_like(x)

    def weights(self, logits: Float[Tensor, " n"], *, last: bool) -> Float[Tensor, " n"]:
        """The weight of each token's state after the next layer; 0 for those that have stopped."""
        probability = logits.float().sigmoid()
        stops = self.running & ((self.total + probability > self.config.threshold) | last)
        remaining = 1 - self.total
        weights = torch.where(stops, remaining, probability) * self.running
        self.remainder = torch.where(stops, remaining, self.remainder)
        self.steps = self.steps + self.running
        self.total, self.running = self.total + weights, self.running & ~stops
        return weights

    def add(self, x: Float[Tensor, "n c"], weights: Float[Tensor, " n"]) -> None:
        """Add the state after a layer."""
        self.output = self.output + x * weights.to(x.dtype).unsqueeze(1)

    def loss(self) -> PonderLoss:
        spent = self.steps + self.remainder
        return PonderLoss(spent.sum() / max(len(spent), 1), self.steps)
