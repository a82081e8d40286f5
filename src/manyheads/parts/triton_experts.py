"""A Triton kernel for the products of a few tokens with the matrices of their experts.

Which expert a tile of tokens belongs to is found on the device, so that a CUDA graph can record it.

Importing this file needs triton: import it inside a function that runs on CUDA.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Tokens of one expert per program.
ROWS = 16


@triton.jit
def _product(
    x_at,
    weights_at,
    ends_at,
    y_at,
    experts,
    width,
    size,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the tokens of one expert, which are next to each other, and some columns."""
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    present = expert < experts
    end = tl.load(ends_at + expert, mask=present, other=0)
    start = tl.load(ends_at + expert - 1, mask=present & (expert > 0), other=0)
    tiles = tl.where(present, (end - start + ROWS - 1) // ROWS, 0)
    tiles_until = tl.cumsum(tiles, 0)
    own = (tile < tiles_until) & (tile >= tiles_until - tiles)
    if tile < tl.max(tiles_until, 0):
        chosen = tl.sum(tl.where(own, expert, 0), 0)
        first = tl.sum(tl.where(own, start + (tile - tiles_until + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(own, end, 0), 0)
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        inner = tl.arange(0, WIDTH)
        matrix_at = weights_at + chosen.to(tl.int64) * width * size
        total = tl.zeros((ROWS, SIZE), tl.float32)
        for begin in range(0, width, WIDTH):
            channel = begin + inner
            x = tl.load(
                x_at + row[:, None].to(tl.int64) * width + channel[None, :],
                mask=(row < last)[:, None] & (channel < width)[None, :],
                other=0.0,
            )
            weight = tl.load(
                matrix_at + channel[:, None].to(tl.int64) * size + column[None, :],
                mask=(channel < width)[:, None] & (column < size)[None, :],
                other=0.0,
            )
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        tl.store(
            y_at + row[:, None].to(tl.int64) * size + column[None, :],
            total.to(y_at.dtype.element_ty),
            mask=(row < last)[:, None] & (column < size)[None, :],
        )


@triton_op("manyheads::few_grouped_matmul", mutates_args=())
def few_grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to `ends[0]` times the first matrix, from there to `ends[1]` times the second, ..."""
    y = x.new_empty(x.shape[0], weights.shape[2])
    launch(wrap_triton(_product), x.contiguous(), weights.contiguous(), ends, y)
    return y


def launch(kernel: Any, x: Tensor, weights: Tensor, ends: Tensor, y: Tensor) -> None:
    (rows, width), (experts, _, size) = x.shape, weights.shape
    # No expert has more tiles than its tokens fill, and one more.
    tiles = min(rows, experts + rows // ROWS)
    columns, inner = (64, 128) if x.element_size() == 2 else (32, 64)
    if tiles == 0:
        return
    kernel[(tiles, triton.cdiv(size, columns))](
        x,
        weights,
        ends,
        y,
        experts,
        width,
        size,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=ROWS,
        WIDTH=inner,
        SIZE=columns,
        PRECISION="ieee",
        num_warps=4,
        num_stages=4,
    )
