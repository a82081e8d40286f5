"""A Triton kernel of the decay that a token chooses: one pass over the tokens, and its gradients.

Importing this file needs triton: import it inside a function that runs on CUDA.

    dt = softplus(x + dt_bias)        log_decay = -exp(A_log) dt

Each block of tokens stores its share of the gradients of `dt_bias` and `A_log`; torch adds the
shares in a fixed order.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens and channels per program.
ROWS = 64
COLUMNS = 64


@triton.jit
def _load(
    x_at,
    dt_bias_at,
    A_log_at,
    tokens,
    channels,
    per_head,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The rate of each channel, what softplus is applied to, and where its results belong."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < channels
    valid = (row < tokens)[:, None] & exists[None, :]
    x = tl.load(x_at + row[:, None] * stride + column[None, :], mask=valid, other=0.0)
    dt_bias = tl.load(dt_bias_at + column, mask=exists, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_at + column // per_head, mask=exists, other=0.0).to(tl.float32)
    place = row[:, None] * channels + column[None, :]
    return -tl.exp(A_log)[None, :], x.to(tl.float32) + dt_bias[None, :], column, place, valid


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); what rounding 1 + y loses is put back, so that small results are exact."""
    y = tl.exp(-tl.abs(x))
    whole = 1.0 + y
    log = tl.where(whole == 1.0, y, tl.log(whole) * (y / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _forward(
    x_at,
    dt_bias_at,
    A_log_at,
    out_at,
    tokens,
    channels,
    per_head,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rate, x, _column, place, valid = _load(
        x_at, dt_bias_at, A_log_at, tokens, channels, per_head, stride, ROWS, COLUMNS
    )
    tl.store(out_at + place, rate * _softplus(x), mask=valid)


@triton.jit
def _backward(
    x_at,
    dt_bias_at,
    A_log_at,
    d_out_at,
    d_x_at,
    shares_at,
    tokens,
    channels,
    per_head,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rate, x, column, place, valid = _load(
        x_at, dt_bias_at, A_log_at, tokens, channels, per_head, stride, ROWS, COLUMNS
    )
    d_dt = tl.load(d_out_at + place, mask=valid, other=0.0) * rate
    d_x = d_dt / (1.0 + tl.exp(-x))
    tl.store(d_x_at + place, d_x.to(d_x_at.dtype.element_ty), mask=valid)
    share_at = shares_at + tl.program_id(0) * 2 * channels + column
    tl.store(share_at, tl.sum(d_x, 0), mask=column < channels)
    d_A_log = tl.sum(d_dt * _softplus(x), 0)
    tl.store(share_at + channels, d_A_log, mask=column < channels)


class _LogDecay(torch.autograd.Function):
    """The log decay of every channel in float32, for `x` with the channels of all heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt_bias: Tensor, A_log: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        dt_bias, A_log = dt_bias.contiguous(), A_log.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _launch(_forward, (x, dt_bias, A_log), out)
        ctx.save_for_backward(x, dt_bias, A_log)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        x, dt_bias, A_log = ctx.saved_tensors
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(len(x), ROWS)
        shares = x.new_empty(blocks, 2, x.shape[1], dtype=torch.float32)
        _launch(_backward, (x, dt_bias, A_log), d_out.contiguous(), d_x, shares)
        d_dt_bias, d_A_log = shares.sum(0)
        d_A_log = d_A_log.view(A_log.shape[0], -1).sum(1)
        return d_x, d_dt_bias.to(dt_bias.dtype), d_A_log.to(A_log.dtype)


def _launch(kernel: Any, inputs: tuple[Tensor, ...], *tensors: Tensor) -> None:
    x, _, A_log = inputs
    tokens, channels = x.shape
    block = min(COLUMNS, triton.next_power_of_2(channels))
    kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(channels, block))](
        *inputs,
        *tensors,
        tokens,
        channels,
        channels // A_log.shape[0],
        x.stride(0),
        ROWS=ROWS,
        COLUMNS=block,
        num_warps=4,
    )


log_decay_of_tokens: Callable[[Tensor, Tensor, Tensor], Tensor] = _LogDecay.apply
