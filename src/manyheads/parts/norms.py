"""Norms, and where they are around a sublayer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import check_fields


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """Subtract the mean, divide by the standard deviation, scale (arXiv 1607.06450).

    If `centered`, the output is scaled by 1 + weight.
    """

    eps: float = 1e-5
    bias: bool = True
    centered: bool = False


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """Divide by the root mean square, scale (arXiv 1910.07467); `centered` as in LayerNorm."""

    eps: float = 1e-6
    bias: bool = False
    centered: bool = False


@check_fields
@dataclass(frozen=True, slots=True)
class NoNorm:
    """No norm."""


Norm = LayerNorm | RMSNorm | NoNorm


@check_fields
@dataclass(frozen=True, slots=True)
class PreNorm:
    """x + f(norm(x)): the residual stream itself is not normed (arXiv 2002.04745)."""

    norm: Norm = LayerNorm()


@check_fields
@dataclass(frozen=True, slots=True)
class PostNorm:
    """norm(x + f(x)), as in the 2017 Transformer and BERT."""

    norm: Norm = LayerNorm()


@check_fields
@dataclass(frozen=True, slots=True)
class SandwichNorm:
    """x + norm(f(norm(x))): a norm before and one after the sublayer (arXiv 2105.13290)."""

    norm: Norm = LayerNorm()


@check_fields
@dataclass(frozen=True, slots=True)
class OutputNorm:
    """x + norm(f(x)): only what the sublayer adds is normed, as in OLMo 2 (arXiv 2501.00656)."""

    norm: Norm = RMSNorm()


@check_fields
@dataclass(frozen=True, slots=True)
class ScaledPreNorm:
    """x + scale * f(norm(x)), with a learned scale per channel (LayerScale, arXiv 2103.17239).

    All scales begin at `start`.
    """

    norm: Norm = LayerNorm()
    start: float = 1.0


Placement = PreNorm | PostNorm | SandwichNorm | OutputNorm | ScaledPreNorm


class Normalize(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32."""

    def __init__(self, config: LayerNorm | RMSNorm, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(width) if config.centered else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias else None

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        if not self.config.centered:
            return self._normed(x, self.weight, self.bias)
        # Half precision is too coarse for one plus a small weight.
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return self._normed(x.to(wide), 1 + self.weight.to(wide), bias).to(x.dtype)

    def _normed(
        self, x: Float[Tensor, "... c"], weight: Float[Tensor, " c"], bias: Tensor | None
    ) -> Float[Tensor, "... c"]:
        if isinstance(self.config, LayerNorm):
            return F.layer_norm(x, weight.shape, weight, bias, self.config.eps)
        # The fused kernel needs one dtype for both, and autocast gives two.
        normed = F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.eps)
        return normed if bias is None else normed + bias


class ChannelScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        return x * self.weight.to(x.dtype)


def make_norm(config: Norm, width: int) -> nn.Module:
    if isinstance(config, NoNorm):
        return nn.Identity()
    return Normalize(config, width)
