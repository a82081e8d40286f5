"""Triton kernels of the short causal convolution: one pass over the tokens, and its gradients.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program computes a block of tokens times a block of channels. With w_d the weight of the token `d`
before, which is a token of the same sequence, or one of `before`, or zero:

    sum_t = bias + sum_d w_d x_{t-d}        output_t = silu(sum_t)

The gradient takes two passes: one for the gradients of the sums, of the weight and of the bias, and
one for that of the tokens, which adds up those of the sums that each token is part of. Each block
stores its share of the gradients of weight and bias; torch adds the shares in a fixed order.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.ragged import Lengths

# Tokens and channels per program.
ROWS = 64
COLUMNS = 64


@triton.jit
def _block(tokens, channels, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The number of the block of tokens, its tokens and channels, and which of them there are."""
    # Programs next to each other compute the same tokens.
    block = (tl.program_id(0) // across).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row < tokens)[:, None] & (column < channels)[None, :]
    return block, row, column, valid


@triton.jit
def _places(
    x_at,
    before_at,
    sequences_at,
    offsets_at,
    row,
    column,
    tokens,
    stride,
    channels,
    SIZE: tl.constexpr,
):
    """Where each token is: in its sequence, in `x`, and counted on from the rows of `before`."""
    sequence = tl.load(sequences_at + row, mask=row < tokens, other=0)
    position = row - tl.load(offsets_at + sequence, mask=row < tokens, other=0)
    slot = (sequence + 1) * (SIZE - 1) + position
    x_at = x_at + row[:, None] * stride + column[None, :]
    return position, x_at, before_at + slot[:, None] * channels + column[None, :]


@triton.jit
def _earlier(
    x_at,
    before_at,
    position,
    valid,
    stride,
    channels,
    DISTANCE: tl.constexpr,
    CONTINUED: tl.constexpr,
):
    """The token `DISTANCE` before each: of the same sequence, or of `before`, or zero."""
    inside = (position >= DISTANCE)[:, None]
    value = tl.load(x_at - DISTANCE * stride, mask=valid & inside, other=0.0).to(tl.float32)
    if CONTINUED:
        outside = (position < DISTANCE)[:, None]
        carried = tl.load(before_at - DISTANCE * channels, mask=valid & outside, other=0.0)
        value = tl.where(inside, value, carried.to(tl.float32))
    return value


@triton.jit
def _weight(weight_at, column, channels, DISTANCE: tl.constexpr, SIZE: tl.constexpr):
    """The weights of the token `DISTANCE` before, for a `weight` with the channels side by side."""
    at = weight_at + (SIZE - 1 - DISTANCE) * channels + column
    return tl.load(at, mask=column < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _sums(
    x_at,
    before_at,
    weight_at,
    bias_at,
    position,
    column,
    valid,
    stride,
    channels,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    CONTINUED: tl.constexpr,
):
    """What SiLU is applied to."""
    value = _earlier(x_at, before_at, position, valid, stride, channels, 0, CONTINUED)
    sums = value * _weight(weight_at, column, channels, 0, SIZE)
    for distance in tl.static_range(1, SIZE):
        value = _earlier(x_at, before_at, position, valid, stride, channels, distance, CONTINUED)
        sums += value * _weight(weight_at, column, channels, distance, SIZE)
    if BIASED:
        bias = tl.load(bias_at + column, mask=column < channels, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    return sums


@triton.jit
def _forward(
    x_at,
    weight_at,
    bias_at,
    before_at,
    sequences_at,
    offsets_at,
    out_at,
    stride,
    tokens,
    channels,
    across,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    CONTINUED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _, row, column, valid = _block(tokens, channels, across, ROWS, COLUMNS)
    stride = stride * UNIT
    position, x_at, before_at = _places(
        x_at, before_at, sequences_at, offsets_at, row, column, tokens, stride, channels, SIZE
    )
    sums = _sums(
        x_at,
        before_at,
        weight_at,
        bias_at,
        position,
        column,
        valid,
        stride,
        channels,
        SIZE,
        BIASED,
        CONTINUED,
    )
    out = sums / (1.0 + tl.exp(-sums))
    at = out_at + row[:, None] * channels + column[None, :]
    tl.store(at, out.to(out_at.dtype.element_ty), mask=valid)


@triton.jit
def _sums_back(
    x_at,
    weight_at,
    bias_at,
    before_at,
    sequences_at,
    offsets_at,
    d_out_at,
    d_sums_at,
    shares_at,
    stride,
    tokens,
    channels,
    across,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    CONTINUED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of the sums, and this block's share of those of weight and bias."""
    block, row, column, valid = _block(tokens, channels, across, ROWS, COLUMNS)
    stride = stride * UNIT
    position, x_at, before_at = _places(
        x_at, before_at, sequences_at, offsets_at, row, column, tokens, stride, channels, SIZE
    )
    sums = _sums(
        x_at,
        before_at,
        weight_at,
        bias_at,
        position,
        column,
        valid,
        stride,
        channels,
        SIZE,
        BIASED,
        CONTINUED,
    )
    at = row[:, None] * channels + column[None, :]
    d_out = tl.load(d_out_at + at, mask=valid, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-sums))
    d_sums = d_out * gate * (1.0 + sums * (1.0 - gate))
    tl.store(d_sums_at + at, d_sums.to(d_sums_at.dtype.element_ty), mask=valid)
    share_at = shares_at + block * (SIZE + BIASED) * channels + column
    for distance in tl.static_range(SIZE):
        value = _earlier(x_at, before_at, position, valid, stride, channels, distance, CONTINUED)
        share = tl.sum(d_sums * value, 0)
        tl.store(share_at + (SIZE - 1 - distance) * channels, share, mask=column < channels)
    if BIASED:
        tl.store(share_at + SIZE * channels, tl.sum(d_sums, 0), mask=column < channels)


@triton.jit
def _tokens_back(
    d_sums_at,
    weight_at,
    sequences_at,
    offsets_at,
    d_x_at,
    tokens,
    channels,
    across,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of the tokens, each from its own sum and those after it in its sequence."""
    _, row, column, valid = _block(tokens, channels, across, ROWS, COLUMNS)
    sequence = tl.load(sequences_at + row, mask=row < tokens, other=0)
    end = tl.load(offsets_at + sequence + 1, mask=row < tokens, other=0)
    d_x = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for distance in tl.static_range(SIZE):
        later = row + distance
        at = d_sums_at + later[:, None] * channels + column[None, :]
        d_sums = tl.load(at, mask=valid & (later < end)[:, None], other=0.0).to(tl.float32)
        d_x += d_sums * _weight(weight_at, column, channels, distance, SIZE)
    at = d_x_at + row[:, None] * channels + column[None, :]
    tl.store(at, d_x.to(d_x_at.dtype.element_ty), mask=valid)


class _Convolution(torch.autograd.Function):
    """The outputs of all tokens, in the precision of `x`; `before` gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        lengths: Lengths,
    ) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        # Channels side by side: read as they are, weights would cost more than the tokens.
        weight = weight.T.contiguous()
        bias = None if bias is None else bias.contiguous()
        before = None if before is None else before.to(x.dtype).contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch(_forward, x, weight, bias, before, lengths, out)
        ctx.save_for_backward(x, weight, bias, before)
        ctx.lengths = lengths
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, before = ctx.saved_tensors
        (tokens, channels), size = x.shape, weight.shape[0]
        d_sums = torch.empty_like(x, memory_format=torch.contiguous_format)
        summands = size if bias is None else size + 1
        blocks = triton.cdiv(tokens, ROWS)
        shares = x.new_empty(blocks, summands, channels, dtype=torch.float32)
        _launch(
            _sums_back, x, weight, bias, before, ctx.lengths, d_out.contiguous(), d_sums, shares
        )
        total = shares.sum(0)
        d_weight = total[:size].T.to(weight.dtype).contiguous()
        d_bias = None if bias is None else total[size].to(bias.dtype)
        d_x = _token_gradient(d_sums, weight, ctx.lengths) if ctx.needs_input_grad[0] else None
        return d_x, d_weight, d_bias, None, None


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    lengths: Lengths,
    *results: Tensor,
) -> None:
    tokens, channels = x.shape
    across = triton.cdiv(channels, COLUMNS)
    # Triton loads many numbers at once only where it knows that rows start at even places.
    unit = gcd(x.stride(0), 16)
    fillers = [weight if tensor is None else tensor for tensor in (bias, before)]
    kernel[(triton.cdiv(tokens, ROWS) * across,)](
        x,
        weight,
        *fillers,
        lengths.sequence_of_token,
        lengths.offsets,
        *results,
        x.stride(0) // unit,
        tokens,
        channels,
        across,
        UNIT=unit,
        SIZE=weight.shape[0],
        BIASED=bias is not None,
        CONTINUED=before is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )


def _token_gradient(d_sums: Tensor, weight: Tensor, lengths: Lengths) -> Tensor:
    (tokens, channels), d_x = d_sums.shape, torch.empty_like(d_sums)
    across = triton.cdiv(channels, COLUMNS)
    _tokens_back[(triton.cdiv(tokens, ROWS) * across,)](
        d_sums,
        weight,
        lengths.sequence_of_token,
        lengths.offsets,
        d_x,
        tokens,
        channels,
        across,
        SIZE=weight.shape[0],
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return d_x


convolve: Callable[..., Tensor] = _Convolution.apply
