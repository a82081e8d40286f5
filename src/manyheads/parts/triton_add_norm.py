"""A Triton kernel that adds to the residual stream and norms the sum.

Importing this file needs triton: import it inside a function that runs on CUDA.

A compiler that fuses sums into norms puts off writing the stream: the norms of later sublayers read
all that was added since, in ModernBERT a fifth more than if every sum were written at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Numbers of one program: as many rows as have so many.
NUMBERS = 4096


@triton.jit
def _add_norm(
    x_at,
    written_at,
    weight_at,
    bias_at,
    sum_at,
    normed_at,
    rows,
    columns,
    eps,
    MEAN: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    at = row * columns + column
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(written_at + at, mask=inside, other=0.0).to(tl.float32)
    # What is normed is what the stream holds, rounded.
    rounded = x.to(sum_at.dtype.element_ty)
    tl.store(sum_at + at, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if MEAN:
        x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps))[:, None]
    x *= tl.load(weight_at + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_at + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(normed_at + at, x.to(normed_at.dtype.element_ty), mask=inside)


@triton_op("manyheads::add_norm", mutates_args=())
def add_norm(
    x: Tensor, written: Tensor, weight: Tensor, bias: Tensor | None, eps: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """x + written (n, c), and its LayerNorm, or without a `mean` its RMS norm. Without gradients.

    torch parses these annotations and does not know those with shapes.
    """
    x, written = x.contiguous(), written.contiguous()
    rows, columns = x.shape
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    whole = triton.next_power_of_2(columns)
    together = max(1, NUMBERS // whole)
    wrap_triton(_add_norm)[(triton.cdiv(rows, together),)](
        x,
        written,
        weight,
        weight if bias is None else bias,
        summed,
        normed,
        rows,
        columns,
        eps,
        MEAN=mean,
        BIAS=bias is not None,
        ROWS=together,
        COLUMNS=whole,
        num_warps=8 if whole > 4096 else 4,
    )
    return summed, normed
