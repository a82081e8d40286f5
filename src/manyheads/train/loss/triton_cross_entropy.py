"""A Triton kernel for the cross-entropy of logits, which are overwritten by their gradient.

Importing this file needs triton.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

COLUMNS = 4096
WARPS = 8


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    bias_ptr,
    labels_ptr,
    grad_sums_ptr,
    losses_ptr,
    squares_ptr,
    vocabulary,
    width,
    stride,
    smoothing,
    BIASED: tl.constexpr,
    LEARNS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    highest = float("-inf")
    total_exp = 0.0
    total = 0.0
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < vocabulary
        logit = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
        if BIASED:
            logit += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if SMOOTHED:
            total += tl.sum(tl.where(inside, logit, 0.0), 0)
        higher = tl.maximum(highest, tl.max(logit, 0))
        total_exp = total_exp * tl.exp(highest - higher) + tl.sum(tl.exp(logit - higher), 0)
        highest = higher
    lse = highest + tl.log(total_exp)
    expected = tl.load(row_ptr + label).to(tl.float32)
    if BIASED:
        expected += tl.load(bias_ptr + label).to(tl.float32)
    if SMOOTHED:
        expected = (1 - smoothing) * expected + smoothing * total / vocabulary
    tl.store(losses_ptr + row, lse - expected)
    tl.store(squares_ptr + row, lse * lse)
    if LEARNS:
        first = tl.load(grad_sums_ptr)
        weight = first + 2 * tl.load(grad_sums_ptr + 1) * lse
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < vocabulary
            logit = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
            if BIASED:
                logit += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            grad_logits = tl.exp(logit - lse) * weight
            if SMOOTHED:
                grad_logits -= first * smoothing / vocabulary
            grad_logits -= tl.where(column == label, first * (1 - smoothing), 0.0)
            # Padding columns get a gradient of zero, so that products over them are right.
            grad_logits = tl.where(inside, grad_logits, 0.0)
            tl.store(
                row_ptr + column, grad_logits.to(logits_ptr.dtype.element_ty), mask=column < width
            )


def cross_entropy_rows(
    logits: Float[Tensor, "m w"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " m"],
    grad_sums: Float[Tensor, " 2"] | None,
    smoothing: float,
    vocabulary: int,
) -> Float[Tensor, " 2"]:
    """The sums of cross-entropy and of squared log-sum-exp over the first `vocabulary` columns.

    With `grad_sums`, the gradient of both sums, the logits are overwritten by their gradient.
    """
    rows = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
    _cross_entropy_kernel[(logits.shape[0],)](
        logits,
        bias,
        labels,
        grad_sums,
        rows[0],
        rows[1],
        vocabulary,
        logits.shape[1],
        logits.stride(0),
        smoothing,
        BIASED=bias is not None,
        LEARNS=grad_sums is not None,
        SMOOTHED=smoothing > 0,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return rows.sum(1)
