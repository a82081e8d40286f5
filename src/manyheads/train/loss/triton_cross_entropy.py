"""A Triton kernel that turns scores into their loss and, in their own place, into its gradient.

Importing this file needs triton: import it where a CUDA device is at hand.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

COLUMNS = 4096
WARPS = 8


@triton.jit
def _score(
    scores_at,
    bias_at,
    answers_at,
    pull_at,
    losses_at,
    squares_at,
    words,
    width,
    stride,
    smoothing,
    BIASED: tl.constexpr,
    LEARNS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = scores_at + row * stride
    answer = tl.load(answers_at + row)
    highest = float("-inf")
    summed = 0.0
    total = 0.0
    for start in range(0, words, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < words
        score = tl.load(at + column, mask=inside, other=float("-inf")).to(tl.float32)
        if BIASED:
            score += tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
        if SMOOTHED:
            total += tl.sum(tl.where(inside, score, 0.0), 0)
        higher = tl.maximum(highest, tl.max(score, 0))
        summed = summed * tl.exp(highest - higher) + tl.sum(tl.exp(score - higher), 0)
        highest = higher
    logarithm = highest + tl.log(summed)
    expected = tl.load(at + answer).to(tl.float32)
    if BIASED:
        expected += tl.load(bias_at + answer).to(tl.float32)
    if SMOOTHED:
        expected = (1 - smoothing) * expected + smoothing * total / words
    tl.store(losses_at + row, logarithm - expected)
    tl.store(squares_at + row, logarithm * logarithm)
    if LEARNS:
        first = tl.load(pull_at)
        weight = first + 2 * tl.load(pull_at + 1) * logarithm
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < words
            score = tl.load(at + column, mask=inside, other=float("-inf")).to(tl.float32)
            if BIASED:
                score += tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
            push = tl.exp(score - logarithm) * weight
            if SMOOTHED:
                push -= first * smoothing / words
            push -= tl.where(column == answer, first * (1 - smoothing), 0.0)
            # Spare columns get nothing, so that products over them are right.
            push = tl.where(inside, push, 0.0)
            tl.store(at + column, push.to(scores_at.dtype.element_ty), mask=column < width)


def score_rows(
    scores: Float[Tensor, "m w"],
    bias: Float[Tensor, " v"] | None,
    answers: Int[Tensor, " m"],
    pull: Float[Tensor, " 2"] | None,
    smoothing: float,
    words: int,
) -> Float[Tensor, " 2"]:
    """The sums of cross-entropy and of squared log-sum-exp over the first `words` columns.

    Where `pull` says how much of each is wanted, the scores become their gradient.
    """
    rows = scores.new_empty(2, scores.shape[0], dtype=torch.float32)
    _score[(scores.shape[0],)](
        scores,
        bias,
        answers,
        pull,
        rows[0],
        rows[1],
        words,
        scores.shape[1],
        scores.stride(0),
        smoothing,
        BIASED=bias is not None,
        LEARNS=pull is not None,
        SMOOTHED=smoothing > 0,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return rows.sum(1)
