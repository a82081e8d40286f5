"""Triton kernels of Performer's random features: one pass over queries, two over keys.

Importing this file needs triton: import it inside a function that runs on CUDA.

With w the directions, and queries and keys divided by the fourth root of their size:

    f(q) = exp(w . q - max(w . q)) + eps        f(k) = exp(w . k - |k|^2 / 2 - top) + eps
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.devices import triton_precision
from manyheads.mixers.kernels.triton_decay import load_rows, side_by_side, store_rows

# Tokens of one program.
TOKENS = 64


@triton.jit
def _directions(at, head, features, d, M: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, M)
    return load_rows(at + head * features * d, row, row < features, d, d, D)


@triton.jit
def _exponents(
    x_at,
    w_at,
    row,
    exists,
    stride,
    scale,
    head,
    features,
    d,
    KEYS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The logarithms of the features before they are shifted; minus infinity beyond the last."""
    x = load_rows(x_at + head * d, row, exists, stride, d, D) * scale
    w = _directions(w_at, head, features, d, M, D)
    products = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    if KEYS:
        products -= tl.sum(x * x, 1)[:, None] / 2
    return tl.where(tl.arange(0, M)[None, :] < features, products, float("-inf"))


@triton.jit
def _peaks(
    x_at,
    w_at,
    peaks_at,
    tokens,
    stride,
    scale,
    features,
    d,
    heads,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists, head = row < tokens, tl.program_id(1)
    exponents = _exponents(
        x_at, w_at, row, exists, stride, scale, head, features, d, True, M, D, PRECISION
    )
    tl.store(peaks_at + row * heads + head, tl.max(exponents, 1), mask=exists)


@triton.jit
def _features(
    x_at,
    w_at,
    top_at,
    out_at,
    tokens,
    stride,
    scale,
    eps,
    features,
    d,
    heads,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists, head = row < tokens, tl.program_id(1)
    exponents = _exponents(
        x_at, w_at, row, exists, stride, scale, head, features, d, KEYS, M, D, PRECISION
    )
    if KEYS:
        top = tl.load(top_at + row * heads + head, mask=exists, other=0.0)
    else:
        top = tl.max(exponents, 1)
    value = tl.exp(exponents - top[:, None]) + eps
    store_rows(out_at + head * features, value, row, exists, heads * features, features, M)


@triton.jit
def _features_back(
    x_at,
    w_at,
    out_at,
    d_out_at,
    d_x_at,
    tokens,
    stride,
    scale,
    eps,
    features,
    d,
    heads,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists, head = row < tokens, tl.program_id(1)
    out = load_rows(out_at + head * features, row, exists, heads * features, features, M)
    d_out = load_rows(d_out_at + head * features, row, exists, heads * features, features, M)
    d_out = d_out * (out - eps)
    w = _directions(w_at, head, features, d, M, D)
    d_x = tl.dot(d_out, w, input_precision=PRECISION) * scale
    if KEYS:
        x = load_rows(x_at + head * d, row, exists, stride, d, D)
        d_x -= x * (tl.sum(d_out, 1) * scale * scale)[:, None]
    store_rows(d_x_at + head * d, d_x, row, exists, heads * d, d, D)


class _Features(torch.autograd.Function):
    """The features of queries, or with `top` those of keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, top: Tensor | None, eps: float) -> Tensor:
        out = x.new_empty(*x.shape[:2], w.shape[1])
        filler = x if top is None else top.contiguous()
        _launch(_features, (x, w, filler, out), (eps,), KEYS=top is not None)
        ctx.save_for_backward(x, w, out)
        ctx.eps, ctx.keys = eps, top is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w, out = ctx.saved_tensors
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        tensors = (x, w, out, d_out.contiguous(), d_x)
        _launch(_features_back, tensors, (ctx.eps,), KEYS=ctx.keys)
        return d_x, None, None, None


def _launch(kernel: Any, tensors: tuple[Any, ...], more: tuple[float, ...], **kind: Any) -> None:
    """Run a kernel for blocks of tokens of every head; the first tensors are `x` and `w`."""
    x, w = tensors[:2]
    (tokens, heads, d), features = x.shape, w.shape[1]
    kernel[(triton.cdiv(tokens, TOKENS), heads)](
        *tensors,
        tokens,
        x.stride(0),
        d**-0.25,
        *more,
        features,
        d,
        heads,
        **kind,
        TOKENS=TOKENS,
        M=max(16, triton.next_power_of_2(features)),
        D=max(16, triton.next_power_of_2(d)),
        PRECISION=triton_precision(x),
        num_warps=4,
        num_stages=1,
    )


def key_peaks(x: Tensor, w: Tensor) -> Tensor:
    """The logarithm of the largest feature of each key, without a gradient."""
    x = side_by_side(x.detach())
    peaks = x.new_empty(x.shape[:2], dtype=torch.float32)
    _launch(_peaks, (x, w.float().contiguous(), peaks), ())
    return peaks


def features_of(x: Tensor, w: Tensor, top: Tensor | None, eps: float) -> Tensor:
    """The features of queries, or, given what each is divided by, those of keys."""
    return _Features.apply(side_by_side(x), w.float().contiguous(), top, eps)
