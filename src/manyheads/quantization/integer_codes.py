"""Weights as small integers: eight bits with a scale per row, or four with one per 32 columns."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, Shaped, UInt8
from torch import Tensor

WeightName = Literal["int8", "int4"]
# How codes are stored: ours by the name of the weights, those of GGUF files by the name there.
Layout = Literal["int8", "int4", "q4_0", "q4_1"]
# The columns that share a scale in four bits; torch's packed products know 32, 64, 128 and 256.
GROUP = 32
# 119 = 16 * 7 + 7 is the largest integer that two digits of four bits hold: see products.Digits.
LARGEST = {"int8": 119, "int4": 7}
SMALLEST = {"int8": -119, "int4": -8}
# Scales are searched below the one that fits the largest weight; a smaller one rounds the others
# more finely and cuts the largest.
SHRINK = tuple(1 - 0.03 * step for step in range(14))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerCodes:
    """A matrix of integers times scales.

    `codes` are int8 of the matrix's shape, or bytes with two codes each, the first one low, after
    adding 8. `scales` are float32, one per row, or one per group of 32 columns, in bfloat16, or in
    float16 as GGUF files have them. There, groups may also have `offsets`, the weights that their
    smallest code stands for, instead of -8 times the scale.
    """

    codes: Shaped[Tensor, "rows bytes"]
    scales: Float[Tensor, "rows groups"]
    columns: int
    offsets: Float[Tensor, "rows groups"] | None = None

    @property
    def name(self) -> WeightName:
        return "int8" if self.codes.dtype == torch.int8 else "int4"

    @property
    def layout(self) -> Layout:
        if self.name == "int8" or self.scales.dtype == torch.bfloat16:
            return self.name
        return "q4_0" if self.offsets is None else "q4_1"

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    def integers(self) -> Int8[Tensor, "rows columns"]:
        """The codes as int8, one per weight."""
        if self.name == "int8":
            return self.codes
        pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        return (pairs[:, : self.columns].to(torch.int8)) - 8

    def values(self) -> Float[Tensor, "rows columns"]:
        """The weights that the codes stand for, in float32."""
        integers, scales = self.integers().float(), self.scales.float()
        if self.name == "int8":
            return integers.mul_(scales)
        groups = split_groups(integers)
        if self.offsets is None:
            values = groups.mul_(scales[..., None])
        else:
            values = groups.sub_(SMALLEST["int4"]).mul_(scales[..., None])
            values += self.offsets.float()[..., None]
        return values.flatten(1)[:, : self.columns]

    def select(self, rows: Shaped[Tensor, " n"]) -> "IntegerCodes":
        """These rows alone."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return IntegerCodes(self.codes[rows], self.scales[rows], self.columns, offsets)

    def zeros(self) -> Float[Tensor, "rows groups"]:
        """The weights that a code of zero stands for."""
        if self.offsets is None:
            return torch.zeros_like(self.scales)
        return self.offsets.float() - SMALLEST["int4"] * self.scales.float()


def pack(
    integers: Int8[Tensor, "rows columns"], scales: Float[Tensor, "rows groups"], name: WeightName
) -> IntegerCodes:
    """Codes as they are stored: two to a byte if they have four bits."""
    columns = integers.shape[1]
    if name == "int8":
        return IntegerCodes(integers.contiguous(), scales.float().contiguous(), columns)
    return IntegerCodes(join_pairs(integers), scales.to(torch.bfloat16).contiguous(), columns)


def join_pairs(integers: Int8[Tensor, "rows columns"]) -> UInt8[Tensor, "rows bytes"]:
    """Bytes of two codes from -8 to 7."""
    digits = F.pad(integers + 8, (0, integers.shape[1] % 2)).to(torch.uint8)
    return (digits[:, 0::2] | (digits[:, 1::2] << 4)).contiguous()


def round_weight(
    weight: Float[Tensor, "rows columns"], name: WeightName, *, search: bool = True
) -> IntegerCodes:
    """The nearest codes; with `search` four-bit scales are those of the smallest squared error.

    >>> codes = round_weight(torch.tensor([[0.75, -1.0, 0.25, 1.0]]), "int8")
    >>> codes.integers().tolist()
    [[89, -119, 30, 119]]
    """
    weight = weight.detach().float()
    if name == "int8":
        scales = (weight.abs().amax(1, keepdim=True) / LARGEST[name]).clamp(min=TINY)
        return pack(nearest(weight, scales, name), scales, name)
    groups = split_groups(weight)
    scales = group_scales(groups, search=search)
    integers = nearest(groups, scales[..., None].float(), name).flatten(1)
    return pack(integers[:, : weight.shape[1]], scales, name)


def split_groups(weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows groups 32"]:
    """The columns by group; zeros fill the last one."""
    return F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


TINY = torch.finfo(torch.bfloat16).tiny


def nearest(
    weight: Float[Tensor, "*rows columns"], scales: Float[Tensor, "*rows _"], name: WeightName
) -> Int8[Tensor, "*rows columns"]:
    """The code nearest to each weight."""
    return (weight / scales).round().clamp(SMALLEST[name], LARGEST[name]).to(torch.int8)


def group_scales(
    groups: Float[Tensor, "*rows columns"],
    importance: Float[Tensor, "*any columns"] | None = None,
    *,
    search: bool = True,
) -> Float[Tensor, "*rows"]:
    """A four-bit scale for every group, in bfloat16.

    The weight of the largest magnitude is -8 times the scale, which is negative for a positive
    weight: of the sixteen codes one more is negative. With `search` smaller scales are tried, and
    the one with the smallest squared error, weighted by `importance`, is taken.
    """
    low, high = groups.aminmax(dim=-1)
    largest = torch.where(high.abs() > low.abs(), high, low) / SMALLEST["int4"]
    largest = torch.where(largest.abs() < TINY, TINY, largest)
    best = largest.to(torch.bfloat16)
    if not search:
        return best
    weights = 1.0 if importance is None else importance
    least = torch.full_like(largest, torch.inf)
    for factor in SHRINK:
        scales = (largest * factor).to(torch.bfloat16)
        wide = scales.float()[..., None]
        errors = (groups - nearest(groups, wide, "int4") * wide).square() * weights
        error = errors.sum(-1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best
