"""NF4: projections with four-bit weights, unpacked block by block as they are used.

QLoRA (arXiv 2305.14314): sixteen levels at the quantiles of a normal distribution, one scale for
every 64 weights; the scales themselves are kept in eight bits at the levels of dynamic quantization
(arXiv 2110.02861), 256 to a float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge.automatic import native_models_only
from manyheads.errors import ConfigError
from manyheads.parts.feedforward import FeedForward

BLOCK = 64
SCALES_PER_BLOCK = 256
# The outermost quantile of the paper's levels, before they are scaled to 1.
OUTERMOST = 0.9677083
STORED = ("codes", "scales", "spreads", "mean")
LOOKED_UP = ("pairs", "scale_levels")
# Not converted by a change of dtype, since all weights depend on them.
EXACT = ("spreads", "mean", *LOOKED_UP)


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """A tensor in NF4: two codes per byte, the first one high; scale = mean + spread * level."""

    codes: UInt8[Tensor, " bytes"]
    scales: UInt8[Tensor, " blocks"]
    spreads: Float[Tensor, " groups"]
    mean: Float[Tensor, ""]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizationLevels:
    """The values of codes: two weights per byte, and the level of each scale's code."""

    pairs: Float[Tensor, "256 2"]
    scale_levels: Float[Tensor, "256"]

    @classmethod
    def on(cls, device: torch.device) -> "QuantizationLevels":
        levels, byte = normal_levels(), torch.arange(256)
        pairs = torch.stack((levels[byte >> 4], levels[byte & 15]), dim=1)
        return cls(pairs.to(device), dynamic_levels().to(device))


def pack(weight: Float[Tensor, "..."]) -> FourBits:
    """A tensor in four and an eighth bits per weight."""
    flat = weight.detach().flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    # For a block of zeros any scale will do.
    normalized = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = nearest(normalized.flatten(), normal_levels().to(weight.device))
    mean = scale.mean()
    groups = F.pad(scale - mean, (0, -len(scale) % SCALES_PER_BLOCK)).view(-1, SCALES_PER_BLOCK)
    spreads = groups.abs().amax(1)
    even = groups / spreads.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    scales = nearest(even.flatten(), dynamic_levels().to(weight.device))[: len(scale)]
    pairs = codes.view(-1, 2)
    return FourBits(
        codes=((pairs[:, 0] << 4) | pairs[:, 1]).to(torch.uint8),
        scales=scales.to(torch.uint8),
        spreads=spreads,
        mean=mean,
    )


def unpack(
    packed: FourBits,
    levels: QuantizationLevels,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """The weights that the codes stand for."""
    scale_levels = levels.scale_levels[packed.scales.int()]
    spreads = packed.spreads[:, None].expand(-1, SCALES_PER_BLOCK).flatten()[: len(scale_levels)]
    scale = packed.mean + spreads * scale_levels
    pairs = levels.pairs[packed.codes.int()]
    whole = (pairs.view(-1, BLOCK) * scale[:, None]).to(dtype)
    return whole.flatten()[: prod(shape)].view(shape)


def nearest(values: Float[Tensor, " n"], levels: Float[Tensor, " k"]) -> Int[Tensor, " n"]:
    """The index of the level nearest to each value; levels ascend."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)


def normal_levels() -> Float[Tensor, "16"]:
    """Quantiles of the normal distribution, eight above zero and seven below, spread to [-1, 1].

    >>> [round(level, 3) for level in normal_levels().tolist()[:8]]
    [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0]
    """
    above = torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat((above, below, above.new_zeros(1))).sort().values
    return (levels / levels.amax()).float()


def dynamic_levels() -> Float[Tensor, "256"]:
    """A sign, a power of ten, and a fraction with more bits for larger powers."""
    positive = []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append(10.0 ** (exponent - 6) * (bounds[1:] + bounds[:-1]) / 2)
    above = torch.cat(positive)
    levels = torch.cat((-above, torch.tensor([0.0, 1.0]), above))
    return levels.sort().values


class Quantized(nn.Linear):
    """A linear layer in NF4 (arXiv 2305.14314); its weight is frozen, its input gets gradients.

    The full weight exists only while it is used, in the forward and in the backward pass.
    """

    codes: UInt8[Tensor, " bytes"]
    scales: UInt8[Tensor, " blocks"]
    spreads: Float[Tensor, " groups"]
    mean: Float[Tensor, ""]
    pairs: Float[Tensor, "256 2"]
    scale_levels: Float[Tensor, "256"]

    def __init__(self, linear: nn.Linear) -> None:
        # Linear.__init__ would allocate a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, levels = pack(linear.weight), QuantizationLevels.on(linear.weight.device)
        for name in STORED:
            self.register_buffer(name, getattr(packed, name))
        for name in LOOKED_UP:
            self.register_buffer(name, getattr(levels, name), persistent=False)
        self.kind = linear.weight.dtype
        self.bias = linear.bias
        self.training = linear.training

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight, unpacked at every access."""
        return self.unpacked(self.kind)

    def unpacked(self, dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
        return _unpacked(self._tensors(), (self.out_features, self.in_features), dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.spreads, self.mean, self.pairs, self.scale_levels

    def forward(self, x: Float[Tensor, "*n c"]) -> Float[Tensor, "*n rows"]:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = (self.out_features, self.in_features)
        written = cast(Tensor, _Product.apply(x, shape, *self._tensors()))  # type: ignore[no-untyped-call]
        return written if self.bias is None else written + self.bias.to(written.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantized":
        exact = {name: getattr(self, name) for name in EXACT}
        self.kind = fn(self.mean.to(self.kind)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            setattr(self, name, value.to(self.codes.device))
        return self


def _unpacked(
    tensors: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype
) -> Float[Tensor, "rows columns"]:
    return unpack(FourBits(*tensors[:4]), QuantizationLevels(*tensors[4:]), shape, dtype)


class _Product(torch.autograd.Function):
    """x W^T, which saves the codes and not the weight for the backward pass."""

    @staticmethod
    def forward(x: Tensor, shape: tuple[int, int], *tensors: Tensor) -> Tensor:
        return F.linear(x, _unpacked(tensors, shape, x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.shape, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = _unpacked(ctx.saved_tensors, ctx.shape, gradient.dtype)
        return gradient @ weight, None, *(None for _ in ctx.saved_tensors)


@native_models_only
def quantize(model: nn.Module) -> int:
    """Convert every projection of attention and feed-forward to NF4; returns the bytes saved.

    Embeddings, norms, readout, biases and experts stay as they are. Only adapters can be trained
    on top.
    """
    saved = 0
    for owner in model.modules():
        if not isinstance(owner, Attention | FeedForward):
            continue
        for name, linear in list(owner.named_children()):
            if not isinstance(linear, nn.Linear) or isinstance(linear, Quantized):
                continue
            if hasattr(linear, "adapters"):
                raise ConfigError(f"{name} has adapters", "quantize first, then add adapters")
            small = Quantized(linear)
            saved += linear.weight.nbytes - sum(buffer.nbytes for buffer in small.buffers())
            setattr(owner, name, small)
    return saved


@native_models_only
def dequantize(model: nn.Module) -> None:
    """Convert back to ordinary projections, with the weights of the four-bit codes."""
    for owner in list(model.modules()):
        for name, small in list(owner.named_children()):
            if isinstance(small, Quantized):
                if hasattr(small, "adapters"):
                    raise ConfigError(f"{name} has adapters", "call surgery.delete_adapter first")
                linear = nn.Linear(small.in_features, small.out_features, bias=False, device="meta")
                linear.weight, linear.bias = nn.Parameter(small.weight), small.bias
                setattr(owner, name, linear.train(small.training))
