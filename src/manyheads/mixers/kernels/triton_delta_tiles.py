"""What the Triton kernels of the delta rule share: tiles of matrices, and the tokens of a chunk.

Importing this file needs triton: import it inside a function that runs on CUDA.
"""

from typing import Any

import triton
import triton.language as tl

# Columns of values that one product has.
COLUMNS = 64


@triton.jit
def load_tile(at, row, column, row_stride, column_stride, row_valid, column_valid):
    """Numbers of a matrix in any order; zero where there are none."""
    at = at + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(at, mask=row_valid[:, None] & column_valid[None, :], other=0.0)


@triton.jit
def store_tile(at, value, row, column, row_stride, row_valid, column_valid):
    at = at + row[:, None] * row_stride + column[None, :]
    value = value.to(at.dtype.element_ty)
    tl.store(at, value, mask=row_valid[:, None] & column_valid[None, :])


@triton.jit
def tokens_of_chunk(starts_at, ends_at, size, SIZE: tl.constexpr):
    """This program's chunk and head, its first token, the slots, and which have a token."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.arange(0, SIZE)
    start = tl.load(starts_at + chunk)
    valid = (token < size) & (start + token < tl.load(ends_at + chunk))
    return chunk, head, start, token, valid


@triton.jit
def decay_of(difference, LIMIT: tl.constexpr = 0.0):
    """exp of a log decay; slots without a token may have any, and none gets beyond the limit."""
    return tl.exp(tl.minimum(difference, LIMIT))


@triton.jit
def undivided(
    g, g_at, token, channel, valid, d, g_stride, LEVELS: tl.constexpr, LIMIT: tl.constexpr
):
    """The largest n for which no channel decays below exp(-LIMIT) within blocks of 2^n tokens."""
    largest = 0
    for level in tl.static_range(LEVELS - 2, LEVELS + 1):
        if level > 0:
            first = load_tile(
                g_at, token >> level << level, channel, g_stride, 1, valid, channel < d
            )
            decay = tl.max(tl.max(first - g, 1), 0)
            largest = tl.where(decay <= LIMIT, level, largest)
    return largest


@triton.jit
def halves(token, level, whole):
    """The token that decays are taken from at a level; who is later, who earlier, and with whom.

    At levels from `whole` on a block has twice 2^level tokens: those of its second half are later,
    those of the first earlier, and decays are taken from the last of these. Below, a block has
    2^whole tokens, each of which is both; decays are taken from the first.
    """
    divided = level >= whole
    half = token >> tl.maximum(level, 0)
    block = tl.where(divided, half >> 1, token >> whole)
    last_of_half = ((half | 1) << tl.maximum(level, 0)) - 1
    middle = tl.where(divided, last_of_half, block << whole)
    later = ((half & 1) == 1) | (level < whole)
    earlier = ((half & 1) == 0) | (level < whole)
    return middle, later, earlier, block[:, None] == block[None, :]


def tile_side(size: int) -> int:
    """The sides of tiles are powers of two; products have at least 16."""
    return max(16, triton.next_power_of_2(size))


def halvings(size: int) -> int:
    """How often a chunk can be halved."""
    return (size - 1).bit_length()


def launch_options(
    size: int, d: int, e: int, precision: str, *, heavy: bool = False
) -> dict[str, Any]:
    """How a kernel is launched for chunks of `size` tokens, keys of d and values of e channels."""
    # Three products for one take long to compile for eight warps.
    wide = max(d, size) > 64 or (heavy and precision != "tf32x3")
    return {
        "SIZE": tile_side(size),
        "D": tile_side(d),
        "E": min(COLUMNS, tile_side(e)),
        "PRECISION": precision,
        "num_warps": 8 if wide else 4,
        "num_stages": 1,
    }


def decay_limit(precision: str) -> float:
    """The log decay up to which a product may be divided by it, as large numbers cost digits."""
    return 8.0 if precision == "tf32x3" else 60.0
