"""Feed-forward layers (MLP, GeGLU, SwiGLU), and the constant that is left of a pruned sublayer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import check_fields
from manyheads.devices import trains_compiled
from manyheads.ragged import Ragged
from manyheads.taps import Tap, WatchContext, observe

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "tanh": Tensor.tanh,
}


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Two projections with an activation between them."""

    width: int
    hidden: int
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = 0.0


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GeGLU:
    """act(x W) * (x V), projected back (arXiv 2002.05202), with GELU by erf or by tanh."""

    width: int
    hidden: int
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    bias: bool = False
    dropout: float = 0.0


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLU:
    """act(x W) * (x V), projected back (arXiv 2002.05202), with SiLU."""

    width: int
    hidden: int
    bias: bool = False
    dropout: float = 0.0

    @property
    def activation(self) -> Literal["silu"]:
        return "silu"


class FeedForward(nn.Module):
    """A plain or gated feed-forward; a gated one has both input projections in one matrix."""

    def __init__(self, config: MLP | GeGLU | SwiGLU) -> None:
        super().__init__()
        self.config = config
        self.gated = not isinstance(config, MLP)
        rows = 2 * config.hidden if self.gated else config.hidden
        self.expand = nn.Linear(config.width, rows, bias=config.bias)
        self.contract = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "n c"], like: Ragged, context: WatchContext | None = None
    ) -> Float[Tensor, "n c"]:
        expanded = self.expand(x)
        if self.gated:
            inside = _gated(expanded, self.config.activation)
        else:
            inside = ACTIVATIONS[self.config.activation](expanded)
        inside = observe(context, Tap.INSIDE, inside, like)
        return self.contract(self.dropout(inside))


def _gated(joined: Float[Tensor, "n two_m"], activation: Activation) -> Float[Tensor, "n m"]:
    """The activation of one half times the other."""
    if trains_compiled(joined) and joined.dim() == 2:
        # Its backward pass is faster than what a compiler makes of the lines below.
        from manyheads.parts.triton_glu import KINDS, gated

        return gated(joined, KINDS.index(activation))
    gate, passed = joined.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A learned vector that is added to every token.

    It is what remains of an attention whose heads are all pruned: its output bias.
    """

    width: int


class ConstantLayer(nn.Module):
    """The vector of a `Constant`."""

    def __init__(self, config: Constant) -> None:
        super().__init__()
        self.config = config
        self.vector = nn.Parameter(torch.zeros(config.width))

    def forward(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return self.vector.to(x.dtype).expand_as(x)
