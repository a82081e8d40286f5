"""NF4: weights in four bits at the quantiles of a normal distribution, with double quantisation.

QLoRA (arXiv 2305.14314): sixteen levels, one scale for every 64 weights; the scales themselves are
kept in eight bits at the levels of dynamic quantisation (arXiv 2110.02861), 256 to a float32.
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

__all__ = ["FourBits", "Levels", "nearest", "pack", "unpack"]

BLOCK = 64
SCALES_A_BLOCK = 256
# The outermost quantile that the paper's levels are cut from, before they are spread to 1.
OUTERMOST = 0.9677083


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """A tensor in NF4: two codes a byte, first one high; scale = mean + spread * level."""

    codes: UInt8[Tensor, " bytes"]
    scales: UInt8[Tensor, " blocks"]
    spreads: Float[Tensor, " groups"]
    mean: Float[Tensor, ""]


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """What codes stand for: the two weights of every byte, and the share of every scale's code."""

    pairs: Float[Tensor, "256 2"]
    shares: Float[Tensor, "256"]

    @classmethod
    def on(cls, device: torch.device) -> "Levels":
        levels, byte = normal_levels(), torch.arange(256)
        pairs = torch.stack((levels[byte >> 4], levels[byte & 15]), dim=1)
        return cls(pairs.to(device), dynamic_levels().to(device))


def pack(weight: Float[Tensor, "..."]) -> FourBits:
    """A tensor in four and an eighth bits a weight."""
    flat = weight.detach().flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    # A block of zeros has no scale, and any will do.
    shares = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = nearest(shares.flatten(), normal_levels().to(weight.device))
    mean = scale.mean()
    groups = F.pad(scale - mean, (0, -len(scale) % SCALES_A_BLOCK)).view(-1, SCALES_A_BLOCK)
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
    packed: FourBits, levels: Levels, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "..."]:
    """What the codes stand for."""
    shares = levels.shares[packed.scales.int()]
    spreads = packed.spreads[:, None].expand(-1, SCALES_A_BLOCK).flatten()[: len(shares)]
    scale = packed.mean + spreads * shares
    pairs = levels.pairs[packed.codes.int()]
    whole = (pairs.view(-1, BLOCK) * scale[:, None]).to(dtype)
    return whole.flatten()[: prod(shape)].view(shape)


def nearest(values: Float[Tensor, " n"], levels: Float[Tensor, " k"]) -> Int[Tensor, " n"]:
    """The place of the level next to each value; levels ascend."""
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
    """A sign, a power of ten, and the finer a fraction the larger the power."""
    positive = []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append(10.0 ** (exponent - 6) * (bounds[1:] + bounds[:-1]) / 2)
    above = torch.cat(positive)
    levels = torch.cat((-above, torch.tensor([0.0, 1.0]), above))
    return levels.sort().values
