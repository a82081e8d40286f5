"""Projections whose weights lie in four bits and are read back block by block as they are used."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.errors import ConfigError
from manyheads.parts.feedforward import FeedForward
from manyheads.surgery.nf4 import FourBits, Levels, pack, unpack

__all__ = ["Quantised", "dequantise", "quantise"]

STORED = ("codes", "scales", "spreads", "mean")
LOOKED_UP = ("pairs", "shares")
# Never rounded by a change of type: all weights hang on them.
EXACT = ("spreads", "mean", *LOOKED_UP)


class Quantised(nn.Linear):
    """A linear layer in NF4 (arXiv 2305.14314); its weight is frozen, its input gets gradients.

    The weight exists in full only while it is used: forwards, and once more backwards.
    """

    codes: UInt8[Tensor, " bytes"]
    scales: UInt8[Tensor, " blocks"]
    spreads: Float[Tensor, " groups"]
    mean: Float[Tensor, ""]
    pairs: Float[Tensor, "256 2"]
    shares: Float[Tensor, "256"]

    def __init__(self, linear: nn.Linear) -> None:
        # Linear's own would make a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, levels = pack(linear.weight), Levels.on(linear.weight.device)
        for name in STORED:
            self.register_buffer(name, getattr(packed, name))
        for name in LOOKED_UP:
            self.register_buffer(name, getattr(levels, name), persistent=False)
        self.kind = linear.weight.dtype
        self.bias = linear.bias
        self.training = linear.training

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the codes stand for, made anew at every reading."""
        return self.unpacked(self.kind)

    def unpacked(self, dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
        return _unpacked(self._tensors(), (self.out_features, self.in_features), dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.spreads, self.mean, self.pairs, self.shares

    def forward(self, x: Float[Tensor, "*n c"]) -> Float[Tensor, "*n rows"]:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = (self.out_features, self.in_features)
        written = cast(Tensor, _Product.apply(x, *self._tensors(), shape))  # type: ignore[no-untyped-call]
        return written if self.bias is None else written + self.bias.to(written.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantised":
        exact = {name: getattr(self, name) for name in EXACT}
        self.kind = fn(self.mean.to(self.kind)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            setattr(self, name, value.to(self.codes.device))
        return self


def _unpacked(
    tensors: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype
) -> Float[Tensor, "rows columns"]:
    return unpack(FourBits(*tensors[:4]), Levels(*tensors[4:]), shape, dtype)


class _Product(torch.autograd.Function):
    """x W^T, which keeps the codes and not the weight for the way back."""

    @staticmethod
    def forward(
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        spreads: Tensor,
        mean: Tensor,
        pairs: Tensor,
        shares: Tensor,
        shape: tuple[int, int],
    ) -> Tensor:
        tensors = (codes, scales, spreads, mean, pairs, shares)
        return F.linear(x, _unpacked(tensors, shape, x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[1:7])
        ctx.shape = inputs[7]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = _unpacked(ctx.saved_tensors, ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None, None, None, None


def quantise(model: nn.Module) -> int:
    """Put every projection of attention and feed-forward into four bits; says how many bytes less.

    Embeddings, norms, readout, biases and experts stay as they are. Only adapters learn on it.
    """
    saved = 0
    for owner in model.modules():
        if not isinstance(owner, Attention | FeedForward):
            continue
        for name, linear in list(owner.named_children()):
            if not isinstance(linear, nn.Linear) or isinstance(linear, Quantised):
                continue
            if hasattr(linear, "adapters"):
                raise ConfigError(f"{name} has adapters", "quantise first, then add adapters")
            small = Quantised(linear)
            saved += linear.weight.nbytes - sum(each.nbytes for each in small.buffers())
            setattr(owner, name, small)
    return saved


def dequantise(model: nn.Module) -> None:
    """Ordinary projections again, with the weights that the four bits stand for."""
    for owner in list(model.modules()):
        for name, small in list(owner.named_children()):
            if isinstance(small, Quantised):
                if hasattr(small, "adapters"):
                    raise ConfigError(f"{name} has adapters", "detach them first")
                setattr(owner, name, _plain(small))


def _plain(small: Quantised) -> nn.Linear:
    linear = nn.Linear(small.in_features, small.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(small.weight)
    linear.bias = small.bias
    return linear.train(small.training)
