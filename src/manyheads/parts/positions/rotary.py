"""Rotary positions: queries and keys are rotated, so that scores depend only on distances."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.annotations import Above, AtLeast, PositiveFloat, PositiveInt, Share
from manyheads.argument_checks import check_fields
from manyheads.devices import has_triton_kernels, runs_triton
from manyheads.errors import ConfigError
from manyheads.ragged import Lengths

# How many times longer texts may be than those that the model was trained on.
Factor = Annotated[float, AtLeast(1)]


@check_fields
@dataclass(frozen=True, slots=True)
class NoScaling:
    """The frequencies the model was trained with."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (arXiv 2306.15595)."""

    factor: Factor


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class NTKScaling:
    """The base is raised: the slowest frequency is stretched by `factor`, the fastest not."""

    factor: Factor


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """As NTK, by a factor that grows with each text longer than `original_length`.

    Keys in a cache keep the rotation that they had when they were written.
    """

    factor: Factor
    original_length: PositiveInt


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Wavelengths are multiplied by `short`, in texts longer than `original_length` by `long`.

    Each has one factor per pair of channels (arXiv 2402.13753). Scores are multiplied by the square
    of `temperature`.
    """

    short: tuple[PositiveFloat, ...]
    long: tuple[PositiveFloat, ...]
    original_length: PositiveInt
    temperature: float = 1.0


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow frequencies are stretched, fast ones kept, with a ramp between (arXiv 2309.00071).

    The ramp runs from the channel that turns `slow` times within `original_length` positions to
    the one that turns `fast` times, both rounded to whole channels if `truncate`. Scores are
    multiplied by the square of `temperature`, which is the published one unless there is an
    `attention_factor`.
    """

    factor: Factor
    original_length: PositiveInt
    fast: PositiveFloat = 32.0
    slow: PositiveFloat = 1.0
    attention_factor: float | Literal["published"] = "published"
    truncate: bool = True

    @property
    def temperature(self) -> float:
        if self.attention_factor != "published":
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Wavelengths above `original_length / slow` are stretched, those below `/ fast` kept."""

    factor: Factor = 8.0
    original_length: PositiveInt = 8192
    fast: PositiveFloat = 4.0
    slow: PositiveFloat = 1.0


# Numbers of one half of the heads of a token that a kernel rotates together.
MOST_TOGETHER = 2**13

# The frequencies of these depend on the length of the text.
ByLength = DynamicScaling | LongRopeScaling
Scaling = NoScaling | LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | ByLength


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosine and sine of each token's angles, computed once per forward pass for all layers."""

    cos: Float[Tensor, "n 1 half"]
    sin: Float[Tensor, "n 1 half"]

    def __call__(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "n h d"]:
        """Rotate the first channels of each head and leave the rest."""
        if torch.compiler.is_compiling():
            return self.rotate_pairs(x)
        half = self.cos.shape[-1]
        if self._in_one_kernel(x):
            from manyheads.parts.positions.triton_rotary import turn_heads

            rotated, rest = x.split((2 * half, x.shape[-1] - 2 * half), dim=-1)
            rotated = turn_heads(rotated, self.cos, self.sin)
            return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        halves = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*halves, rest), dim=-1) if rest.shape[-1] else torch.cat(halves, dim=-1)

    def _in_one_kernel(self, x: Float[Tensor, "n h d"]) -> bool:
        """Whether one kernel does it: a step of generation mostly waits for kernels to start."""
        half = self.cos.shape[-1]
        if torch.is_grad_enabled() or not runs_triton(x) or not self.covers(2 * half):
            return False
        # A program rotates all heads of a token.
        return x.shape[1] * half <= MOST_TOGETHER and len(x) == len(self.cos)

    def covers(self, size: int) -> bool:
        """Whether all channels of a head are rotated, as many as Triton kernels take."""
        half = self.cos.shape[-1]
        return size == 2 * half and half >= 16 and half & (half - 1) == 0

    def turn(
        self, q: Float[Tensor, "n h d"], k: Float[Tensor, "n g d"], v: Float[Tensor, "n g e"]
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n g d"], Float[Tensor, "n g e"]]:
        """Rotated queries and keys, and the values, of one projection."""
        if not (self.covers(q.shape[2]) and q.shape[2] == v.shape[2] and has_triton_kernels(q)):
            return self(q), self(k), v
        from manyheads.parts.positions.triton_rotary import rotated, turned

        if torch.is_grad_enabled():
            # Its backward pass is faster than what a compiler makes of the line above.
            return rotated(q, k, v, self.cos, self.sin)
        return turned(q, self.cos, self.sin), turned(k, self.cos, self.sin), v

    def rotate_pairs(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "n h d"]:
        """The same for both halves at once, without a concatenation.

        Compiled, the backward pass takes 0.29 ms per layer of a masked-language step on an H200,
        and 0.35 ms with halves. If only queries, keys and values are projected, `turn` is used.
        """
        half = self.cos.shape[-1]
        rotated, rest = x.split((2 * half, x.shape[-1] - 2 * half), dim=-1)
        cos, sin = (angles.to(x.dtype).unsqueeze(-2) for angles in (self.cos, self.sin))
        pairs = rotated.unflatten(-1, (2, half))
        sign = (2 * torch.arange(2, device=x.device, dtype=x.dtype) - 1).unsqueeze(-1)
        rotated = (pairs * cos + pairs.flip(-2) * (sin * sign)).flatten(-2)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary embedding in the rotate-half layout (arXiv 2104.09864).

    `fraction` of the channels of each head are rotated. `scaling` extends the context.
    """

    theta: Annotated[float, Above(1)] = 10_000.0
    fraction: Share = 1.0
    scaling: Scaling = NoScaling()

    def __post_init__(self) -> None:
        scaling = self.scaling
        if isinstance(scaling, YarnScaling | Llama3Scaling) and scaling.fast <= scaling.slow:
            raise ConfigError(f"fast must be above slow={scaling.slow}, got {scaling.fast}")
        if isinstance(scaling, LongRopeScaling) and len(scaling.short) != len(scaling.long):
            raise ConfigError(
                "short and long must have the same number of factors, got "
                f"{scaling.short} and {scaling.long}"
            )

    def rotated_channels(self, size: int) -> int:
        """How many channels of a head of this size are rotated."""
        # Compiled with dynamic=True, flex attention takes no integer that was made of a float.
        channels = size if self.fraction == 1.0 else int(size * self.fraction)
        if channels % 2 or channels == 0:
            raise ConfigError(
                f"head size {size} x fraction {self.fraction:g} gives {channels} rotated channels",
                "choose an even number",
            )
        if isinstance(self.scaling, LongRopeScaling) and len(self.scaling.long) * 2 != channels:
            raise ConfigError(
                f"{channels} rotated channels need {channels // 2} factors, got "
                f"{len(self.scaling.long)} in short and long"
            )
        return channels

    def frequencies(
        self, size: int, device: torch.device | Literal["cpu"] = "cpu"
    ) -> Float[Tensor, " half"]:
        """Radians per position for each pair of channels, in texts of the original length."""
        channels = self.rotated_channels(size)
        exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
        plain = self.theta**-exponent
        match self.scaling:
            case NoScaling() | DynamicScaling():
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
            case LongRopeScaling(short=short):
                return plain / torch.tensor(short, dtype=plain.dtype, device=device)

    def frequencies_by_length(
        self, size: int, reach: Int[Tensor, " n"], scaling: ByLength
    ) -> Float[Tensor, "n 1 half"]:
        """The frequencies of each token, whose text is `reach` tokens long."""
        channels, length = self.rotated_channels(size), scaling.original_length
        device, wide = reach.device, torch.float64
        exponent = torch.arange(0, channels, 2, dtype=wide, device=device) / channels
        if isinstance(scaling, LongRopeScaling):
            plain = self.theta**-exponent
            short, long = (
                plain / torch.tensor(factors, dtype=wide, device=device)
                for factors in (scaling.short, scaling.long)
            )
            return torch.where((reach > length)[:, None, None], long, short).float()
        grown = scaling.factor * reach.clamp(min=length).to(wide) / length - (scaling.factor - 1)
        base = self.theta * grown ** (channels / max(channels - 2, 1))
        return (base[:, None, None] ** -exponent).float()

    @property
    def stretch(self) -> float:
        """The factor of cosine and sine."""
        if isinstance(self.scaling, YarnScaling | LongRopeScaling):
            return self.scaling.temperature
        return 1.0

    def rotation(
        self, positions: Int[Tensor, " n"], size: int, lengths: Lengths | None = None
    ) -> Rotation:
        """The rotation at these positions; without `lengths` each token is the last of its text."""
        if isinstance(self.scaling, ByLength):
            reach = positions + 1 if lengths is None else _reach(positions, lengths)
            frequencies = self.frequencies_by_length(size, reach, self.scaling)
            return Rotation(*_cos_sin(positions, frequencies, self.stretch))
        if torch.compiler.is_compiling():
            # Computed on the device: a copy from the host would wait for it.
            frequencies = self.frequencies(size, positions.device).float()
            return Rotation(*_cos_sin_op(positions, frequencies, self.stretch))
        frequencies = self.frequencies_on(size, positions.device)
        return Rotation(*_cos_sin(positions, frequencies, self.stretch))

    def frequencies_on(self, size: int, device: torch.device) -> Float[Tensor, " half"]:
        """In float32 and cached on the device: a CUDA graph cannot copy from the host."""
        return _frequencies_on(self, size, device)


def _reach(positions: Int[Tensor, " n"], lengths: Lengths) -> Int[Tensor, " n"]:
    """For each token, how long its text is up to the last token of the batch."""
    owner = lengths.sequence_of_token
    if lengths.shard is not None:
        return torch.tensor(lengths.shard.lengths, device=positions.device)[owner]
    ends = positions.new_zeros(lengths.count).scatter_reduce(0, owner, positions + 1, "amax")
    return ends[owner]


def _cos_sin(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos() * stretch, angles.sin() * stretch


@torch.library.custom_op("manyheads::turn", mutates_args=())
def _cos_sin_op(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    """The same, opaque to the compiler, which would otherwise recompute it in every layer."""
    return _cos_sin(positions, frequencies, stretch)


@_cos_sin_op.register_fake
def _(positions: Tensor, frequencies: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    return _cos_sin(positions, frequencies, stretch)


@lru_cache(maxsize=64)
def _frequencies_on(rotary: Rotary, size: int, device: torch.device) -> Float[Tensor, " half"]:
    with torch.inference_mode(False):
        return rotary.frequencies(size).to(device, torch.float32)


def _yarn(
    plain: Float[Tensor, " half"], theta: float, channels: int, scaling: YarnScaling
) -> Float[Tensor, " half"]:
    def channel_with_turns(times: float) -> float:
        wavelength = scaling.original_length / (times * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(theta))

    low, high = channel_with_turns(scaling.fast), channel_with_turns(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    steps = torch.arange(channels // 2, dtype=torch.float64, device=plain.device)
    stretched = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def _llama3(plain: Float[Tensor, " half"], scaling: Llama3Scaling) -> Float[Tensor, " half"]:
    turns = scaling.original_length * plain / (2 * math.pi)
    share = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)
