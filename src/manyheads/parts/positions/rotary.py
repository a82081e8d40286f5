"""Rotary positions: queries and keys turn with their place, so scores know only distances."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.devices import trains_compiled
from manyheads.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NoScaling:
    """The frequencies the model was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NTKScaling:
    """The base is raised: the slowest frequency is stretched by `factor`, the fastest not."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow frequencies are stretched, fast ones kept, with a ramp between (arXiv 2309.00071).

    The ramp runs from the channel that turns `slow` times within `original_length` positions to the one
    that turns `fast` times. Scores are multiplied by the square of `temperature`.
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0

    @property
    def temperature(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Wavelengths above `original_length` / `slow` are stretched, those below `original_length` / `fast` kept."""

    factor: float = 8.0
    original_length: int = 8192
    fast: float = 4.0
    slow: float = 1.0


Scaling = NoScaling | LinearScaling | NTKScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosine and sine of every token's angles, made once a forward and used by all layers."""

    cos: Float[Tensor, "n 1 half"]
    sin: Float[Tensor, "n 1 half"]

    def __call__(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "n h d"]:
        """Rotation the first channels of each head, the rest stays."""
        if torch.compiler.is_compiling():
            return self.turned_whole(x)
        half = self.cos.shape[-1]
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, rest), dim=-1) if rest.shape[-1] else torch.cat(turned, dim=-1)

    def cuts(self, x: Float[Tensor, "n c"], size: int) -> bool:
        """Whether to `cut` a projection of these tokens: worth it for the way back alone."""
        half = self.cos.shape[-1]
        whole = size == 2 * half and half >= 16 and half & (half - 1) == 0
        return whole and trains_compiled(x)

    def cut(
        self, joined: Float[Tensor, "n rows"], rows: Mapping[str, int]
    ) -> dict[str, Float[Tensor, "n some"]]:
        """Queries and keys, turned, and values, of a projection that holds them in this order."""
        from manyheads.parts.positions.triton_rotary import turn_parts

        heads, keys, _ = (each // (2 * self.cos.shape[-1]) for each in rows.values())
        parts = turn_parts(joined, self.cos, self.sin, heads, keys)
        return {name: part.flatten(1) for name, part in zip(rows, parts, strict=True)}

    def turned_whole(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "n h d"]:
        """The same, of both halves at once and without their concatenation.

        Compiled, the way back of halves cut apart and joined took 0.35 ms a layer of a masked step
        on an H200, and takes 0.29 so. Where nothing but queries, keys and values is projected,
        `cut` serves instead.
        """
        half = self.cos.shape[-1]
        turning, rest = x.split((2 * half, x.shape[-1] - 2 * half), dim=-1)
        cos, sin = (each.to(x.dtype).unsqueeze(-2) for each in (self.cos, self.sin))
        pairs = turning.unflatten(-1, (2, half))
        sign = (2 * torch.arange(2, device=x.device, dtype=x.dtype) - 1).unsqueeze(-1)
        turned = (pairs * cos + pairs.flip(-2) * (sin * sign)).flatten(-2)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary embedding in the rotate-half layout (arXiv 2104.09864).

    `fraction` is the part of each head that turns. `scaling` reaches longer contexts.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    scaling: Scaling = NoScaling()

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"fraction={self.fraction} of a head cannot turn", "use 0 < fraction <= 1"
            )
        if not isinstance(self.scaling, NoScaling) and self.scaling.factor < 1:
            raise ConfigError(
                f"factor={self.scaling.factor} shortens the context", "use a factor of 1 or more"
            )

    def rotated_channels(self, size: int) -> int:
        """How many channels of a head of this size turn."""
        channels = int(size * self.fraction)
        if channels % 2 or channels == 0:
            raise ConfigError(
                f"rotary turns pairs and head size {size} x fraction {self.fraction:g} "
                f"gives {channels} channels",
                "choose an even number of channels",
            )
        return channels

    def frequencies(
        self, size: int, device: torch.device | Literal["cpu"] = "cpu"
    ) -> Float[Tensor, " half"]:
        """Radians a position for each pair of channels."""
        channels = self.rotated_channels(size)
        exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
        plain = self.theta**-exponent
        match self.scaling:
            case NoScaling():
                return plain
            case LinearScaling(factor=factor):
                return plain / factor
            case NTKScaling(factor=factor):
                base = self.theta * factor ** (channels / max(channels - 2, 1))
                return base**-exponent
            case YarnScaling():
                return _yarn(plain, self.theta, channels, self.scaling)
            case Llama3Scaling():
                return _llama3(plain, self.scaling)

    @property
    def stretch(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.scaling.temperature if isinstance(self.scaling, YarnScaling) else 1.0

    def rotation(self, positions: Int[Tensor, " n"], size: int) -> Rotation:
        if torch.compiler.is_compiling():
            # Made on the device, which a copy from the host would wait for.
            frequencies = self.frequencies(size, positions.device).float()
            return Rotation(*_turn_whole(positions, frequencies, self.stretch))
        frequencies = self.frequencies_on(size, positions.device)
        return Rotation(*_cos_sin(positions, frequencies, self.stretch))

    def frequencies_on(self, size: int, device: torch.device) -> Float[Tensor, " half"]:
        """In float32 and kept on the device: a recorded step cannot copy from the host."""
        return _frequencies_on(self, size, device)


def _cos_sin(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos() * stretch, angles.sin() * stretch


@torch.library.custom_op("manyheads::turn", mutates_args=())
def _turn_whole(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    """The same, closed to the compiler, which would else work it out again in every layer."""
    return _cos_sin(positions, frequencies, stretch)


@_turn_whole.register_fake
def _(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    return _cos_sin(positions, frequencies, stretch)


@lru_cache(maxsize=64)
def _frequencies_on(rotary: Rotary, size: int, device: torch.device) -> Float[Tensor, " half"]:
    with torch.inference_mode(False):
        return rotary.frequencies(size).to(device, torch.float32)


def _yarn(
    plain: Float[Tensor, " half"], theta: float, channels: int, scaling: YarnScaling
) -> Float[Tensor, " half"]:
    def channel_turning(times: float) -> float:
        wavelength = scaling.original_length / (times * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(channel_turning(scaling.fast)), 0)
    high = min(math.ceil(channel_turning(scaling.slow)), channels - 1)
    steps = torch.arange(channels // 2, dtype=torch.float64, device=plain.device)
    stretched = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def _llama3(plain: Float[Tensor, " half"], scaling: Llama3Scaling) -> Float[Tensor, " half"]:
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)
