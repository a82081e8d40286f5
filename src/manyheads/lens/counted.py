"""A Triton kernel that counts values, reading each once and writing nothing.

Importing this file needs triton: import it where a CUDA device is at hand.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["below"]


@triton.jit
def _below(
    values_at,
    kept_at,
    limit_at,
    out_at,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(kept_at + row, mask=row < rows, other=0).to(tl.int32)
    limit = tl.load(limit_at).to(tl.float32)
    at = values_at + row.to(tl.int64)[:, None] * width
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(at + column[None, :], mask=inside, other=float("inf"))
        count += (value.to(tl.float32) < limit).to(tl.int32)
    total = tl.sum(tl.sum(count, 1) * kept, 0)
    tl.atomic_add(out_at, total.to(tl.int64))


def below(
    values: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    """How many values of the rows that count lie below a limit; the device need not wait."""
    values = values.contiguous()
    found = torch.zeros((), dtype=torch.int64, device=values.device)
    some = 4
    _below[(triton.cdiv(len(values), some),)](
        values, rows.to(torch.uint8), limit, found, *values.shape, ROWS=some, COLUMNS=1024
    )
    return found
