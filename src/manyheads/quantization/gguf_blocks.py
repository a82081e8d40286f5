"""Blocks of GGUF files as integer codes, so that they need not be unpacked to be computed with.

Q4_0, Q4_1 and Q4_K are four-bit codes of groups of 32 columns, as ours are, and keep their values,
Q4_K up to the rounding of a product of two scales to float16. Other kinds become codes of eight
bits with a scale per row, which is a little coarser than the file.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from manyheads.quantization.integer_codes import GROUP, IntegerCodes

# The bytes of a block.
Blocks = UInt8[Tensor, "rows blocks bytes"]
Groups = tuple[UInt8[Tensor, "rows groups 32"], Tensor, Tensor | None]
# A block of Q4_K has eight groups.
GROUPS_OF_K = 8


def four_bit_codes(kind: str, blocks: Blocks) -> IntegerCodes:
    """The codes of a matrix of one of the kinds in `FOUR_BITS`."""
    digits, scales, offsets = FOUR_BITS[kind](blocks)
    digits = digits.flatten(1)
    codes = digits[:, 0::2] | (digits[:, 1::2] << 4)
    return IntegerCodes(codes, scales.contiguous(), digits.shape[1], offsets)


def _q4_0(blocks: Blocks) -> Groups:
    return _halves(blocks[..., 2:]), _half_floats(blocks[..., :2]), None


def _q4_1(blocks: Blocks) -> Groups:
    scales, offsets = (_half_floats(blocks[..., at : at + 2]) for at in (0, 2))
    return _halves(blocks[..., 4:]), scales, offsets


def _q4_k(blocks: Blocks) -> Groups:
    """Eight groups per block, whose scales and offsets are integers of six bits themselves."""
    scale, step = (_half_floats(blocks[..., at : at + 2]).float() for at in (0, 2))
    # Twelve bytes: six low bits of four scales and of four offsets, and the four low bits of the
    # others, whose two high bits are those above the first ones.
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    digits = _halves(blocks[..., 16:].unflatten(-1, (GROUPS_OF_K // 2, GROUP)))
    return (
        digits.reshape(len(blocks), -1, GROUP),
        (scale[..., None] * scales).flatten(1).half(),
        (-step[..., None] * offsets).flatten(1).half(),
    )


def _halves(pairs: UInt8[Tensor, "*rows n"]) -> UInt8[Tensor, "*rows _"]:
    """The low digits of all bytes, and then the high ones."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1)


def _half_floats(pairs: UInt8[Tensor, "rows blocks 2"]) -> Float[Tensor, "rows blocks"]:
    return pairs.contiguous().view(torch.float16)[..., 0]


FOUR_BITS: dict[str, Callable[[Blocks], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def joined(parts: list[IntegerCodes]) -> IntegerCodes:
    """The rows of several matrices, which all have eight bits or all four."""
    codes, scales = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales")
    )
    offsets = None
    if any(part.offsets is not None for part in parts):
        # Eight times a scale is exact in float16.
        own = (part.offsets if part.offsets is not None else -8 * part.scales for part in parts)
        offsets = torch.cat(list(own))
    return IntegerCodes(codes, scales, parts[0].columns, offsets)
