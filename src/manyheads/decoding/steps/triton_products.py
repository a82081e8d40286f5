"""A Triton kernel for products of the weights with a few tokens, up to 16.

The weights are read once at the speed of the memory. The norm before a product and the gate or the
residual after it are computed on the way.

Importing this file needs triton: import it only where there is a CUDA device.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from manyheads.decoding.steps.triton_kernels import _early, _wait_for_the_kernel_before

# Tokens that a product of tensor cores has room for.
MOST_TOKENS = 16


@triton.jit
def _product_of_few(
    x_at,
    weight_at,
    norm_at,
    bias_at,
    residual_at,
    y_at,
    tokens,
    rows,
    columns,
    eps,
    shift,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = residual + weight @ norm(x) + bias; gated: SiLU of one half of the rows times the other.

    The norm scales the result: what it multiplies each channel by is known before its mean square.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    in_rows, in_batch = (row < rows)[:, None], (token < tokens)[None, :]
    row_at = weight_at + row.to(tl.int64)[:, None] * columns
    gate_rows = rows.to(tl.int64) * columns
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    second = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((COLUMNS, TOKENS), tl.float32)
    _wait_for_the_kernel_before(EARLY)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        x = tl.load(
            x_at + token[None, :] * columns + column[:, None],
            mask=inside[:, None] & in_batch,
            other=0.0,
            eviction_policy="evict_last",
        )
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_at + column, mask=inside, other=0.0).to(tl.float32) + shift
            x = (wide * scale[:, None]).to(x.dtype)
        at = row_at + column[None, :]
        mask = in_rows & inside[None, :]
        weight = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
        total = tl.dot(weight, x, total)
        if GATED:
            gate = tl.load(at + gate_rows, mask=mask, other=0.0, eviction_policy="evict_first")
            second = tl.dot(gate, x, second)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
        total *= factor[None, :]
        second *= factor[None, :]
    if BIAS:
        total += tl.load(bias_at + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        if GATED:
            more = tl.load(bias_at + rows + row, mask=row < rows, other=0.0)
            second += more.to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * second
    place = token[None, :] * rows + row[:, None]
    if RESIDUAL:
        total += tl.load(residual_at + place, mask=in_rows & in_batch, other=0.0).to(tl.float32)
    tl.store(y_at + place, total.to(y_at.dtype.element_ty), mask=in_rows & in_batch)


def _tile(rows: int, columns: int, *, gated: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages."""
    del columns
    return (32, 128, 4, 4) if gated or rows > 8192 else (16, 256, 4, 4)


def product_of_few(
    x: Float[Tensor, "b c"],
    weight: Float[Tensor, "rows c"],
    *,
    norm: tuple[Float[Tensor, " c"], float, float] | None = None,
    bias: Float[Tensor, " rows"] | None = None,
    residual: Float[Tensor, "b out"] | None = None,
    gated: bool = False,
) -> Float[Tensor, "b out"]:
    """residual + weight @ norm(x) + bias; `norm` is an RMS norm's weight, its shift and its eps."""
    tokens, columns = x.shape
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    y = x.new_empty(tokens, rows)
    scale, shift, eps = norm if norm is not None else (x, 0.0, 0.0)
    tile_rows, tile_columns, warps, stages = _tile(rows, columns, gated=gated)
    _product_of_few[(triton.cdiv(rows, tile_rows),)](
        x,
        weight,
        scale,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        tokens,
        rows,
        columns,
        eps,
        shift,
        TOKENS=MOST_TOKENS,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        num_warps=warps,
        num_stages=stages,
        **_early(x),
    )
    return y
