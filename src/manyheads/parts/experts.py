"""Mixture of experts: a router sends each token to a few of many feed-forward layers."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.parts.feedforward import FeedForward, SwiGLU
from manyheads.parts.grouped import grouped_matmul
from manyheads.ragged import Ragged
from manyheads.taps import Look

__all__ = ["Experts", "RouterLosses"]

# Rows of 16 bytes, in half precision too.
ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`count` SwiGLU experts of which each token visits the `chosen` most likely.

    The weights of the chosen are their softmax probabilities, made to sum to one if `renormalise`.
    `shared` is the hidden width of an expert that every token visits besides; 0 means none. Its
    gate, where it has one, is a number a token that scales what it writes.
    """

    width: int
    hidden: int
    count: int
    chosen: int
    shared: int = 0
    shared_gate: Literal["none", "sigmoid"] = "none"
    renormalise: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ConfigError(
                f"chosen={self.chosen} of count={self.count} experts",
                f"choose between 1 and {self.count}",
            )
        if self.shared_gate != "none" and not self.shared:
            raise ConfigError(
                f"shared_gate={self.shared_gate!r} has no shared expert to gate",
                "give shared=, its hidden width",
            )
        for name, size in (("width", self.width), ("hidden", self.hidden)):
            if size % ALIGNMENT or size < 1:
                raise ConfigError(
                    f"{name}={size} does not lie on the boundaries that grouped products want",
                    f"use a multiple of {ALIGNMENT}",
                )


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """What training adds to its loss so that experts share the work.

    `balance` is the Switch loss (arXiv 2101.03961) for several choices a token: 1 when even.
    `z` is the mean squared log-sum-exp of the router's logits (arXiv 2202.08906).
    """

    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]


class MixtureOfExperts(nn.Module):
    """Tokens are grouped by expert, so that an expert computes only the tokens sent to it."""

    def __init__(self, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.count, bias=False)
        self.expand = nn.Parameter(torch.empty(config.count, config.width, 2 * config.hidden))
        self.contract = nn.Parameter(torch.empty(config.count, config.hidden, config.width))
        for weight in (self.expand, self.contract):
            nn.init.normal_(weight, std=0.02)
        self.shared = (
            FeedForward(SwiGLU(width=config.width, hidden=config.shared)) if config.shared else None
        )
        gated = config.shared_gate != "none"
        self.shared_gate = nn.Linear(config.width, 1, bias=False) if gated else None

    def forward(
        self, x: Float[Tensor, "n c"], like: Ragged, look: Look | None = None
    ) -> tuple[Float[Tensor, "n c"], RouterLosses]:
        logits = self.router(x).float()
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.config.chosen, dim=-1)
        if self.config.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        visits = torch.zeros_like(logits, dtype=torch.int).scatter(1, experts, 1).sum(0)
        output = self._visit(x, weights, experts, visits)
        if self.shared is not None:
            output = output + self._share(x, like, look)
        return output, self._losses(logits, probabilities, visits)

    def _share(self, x: Float[Tensor, "n c"], like: Ragged, look: Look | None) -> Tensor:
        assert self.shared is not None
        written: Tensor = self.shared(x, like, look)
        return written if self.shared_gate is None else self.shared_gate(x).sigmoid() * written

    def _visit(
        self,
        x: Float[Tensor, "n c"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
        visits: Int[Tensor, " e"],
    ) -> Float[Tensor, "n c"]:
        """Sort the tokens by expert, let each expert work on its own, and put them back."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        order = experts.flatten().argsort(stable=True)
        token = order // self.config.chosen
        ends = visits.cumsum(0).int()
        gate, passed = grouped_matmul(x[token], self.expand.to(x.dtype), ends).chunk(2, -1)
        written = grouped_matmul(F.silu(gate) * passed, self.contract.to(x.dtype), ends)
        written = written * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, written)

    def _losses(
        self,
        logits: Float[Tensor, "n e"],
        probabilities: Float[Tensor, "n e"],
        visits: Int[Tensor, " e"],
    ) -> RouterLosses:
        tokens = max(logits.shape[0], 1)
        share = visits / (tokens * self.config.chosen)
        balance = self.config.count * (share * probabilities.sum(0) / tokens).sum()
        z = logits.logsumexp(-1).square().sum() / tokens
        return RouterLosses(balance=balance, z=z)
