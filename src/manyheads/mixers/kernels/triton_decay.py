"""Triton kernels of the decaying recurrence: what each chunk adds to the state, and its outputs.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program computes one head of one chunk from its tokens alone, so that neither scores nor decays
of a chunk are ever stored. The states between chunks are joined by `triton_states`. With `g` the
log decay of each token, `g_cumsum` its sum from the start of the chunk up to and including a token,
`g_chunk` that of the whole chunk, and `h` the state before the chunk:

    kv = sum_j exp(g_chunk - g_cumsum_j) k_j v_j^T
    o_i = exp(g_cumsum_i) q_i^T h + sum_{j <= i} exp(g_cumsum_i - g_cumsum_j) (q_i . k_j) v_j

`d_x` is the gradient of `x`. The loop over tokens is `naive_decay_recurrence`.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout


@triton.jit
def load_rows(at, row, exists, stride, size, BLOCK: tl.constexpr):
    """Vectors of some tokens, zero beyond their channels and where there is no token."""
    column = tl.arange(0, BLOCK)[None, :]
    valid = exists[:, None] & (column < size)
    return tl.load(at + row[:, None] * stride + column, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_rows(at, value, row, exists, stride, size, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    valid = exists[:, None] & (column < size)
    at = at + row[:, None] * stride + column
    tl.store(at, value.to(at.dtype.element_ty), mask=valid)


@triton.jit
def _matrix(at, d, e, D: tl.constexpr, E: tl.constexpr):
    """Where the numbers of one state are, and which of them there are."""
    row, column = tl.arange(0, D)[:, None], tl.arange(0, E)[None, :]
    return at + row * e + column, (row < d) & (column < e)


@triton.jit
def _g_cumsum(g_at, row, exists, head, heads, DECAYS: tl.constexpr, CHUNK: tl.constexpr):
    """The decay up to each token, and that of the whole chunk."""
    g = tl.zeros([CHUNK], dtype=tl.float32)
    if DECAYS:
        g = tl.load(g_at + row * heads + head, mask=exists, other=0.0).to(tl.float32)
    return tl.cumsum(g, 0), tl.sum(g, 0)


@triton.jit
def _within(g_cumsum, CHUNK: tl.constexpr):
    """What is left of an earlier token (the column) at a later one (the row)."""
    token = tl.arange(0, CHUNK)
    visible = token[:, None] >= token[None, :]
    between = tl.where(visible, g_cumsum[:, None] - g_cumsum[None, :], 0.0)
    return tl.where(visible, tl.exp(between), 0.0)


@triton.jit
def _add(
    k_at,
    v_at,
    g_at,
    starts_at,
    ends_at,
    kv_at,
    g_chunk_at,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    exists = row < tl.load(ends_at + chunk)
    key = load_rows(k_at + head // repeats * d, row, exists, k_stride, d, D)
    value = load_rows(v_at + head * e, row, exists, v_stride, e, E)
    g_cumsum, g_chunk = _g_cumsum(g_at, row, exists, head, heads, DECAYS, CHUNK)
    v_decayed = value * tl.exp(g_chunk - g_cumsum)[:, None]
    kv = tl.dot(tl.trans(key), v_decayed, input_precision=PRECISION)
    at, valid = _matrix(kv_at + (chunk * heads + head) * d * e, d, e, D, E)
    tl.store(at, kv, mask=valid)
    tl.store(g_chunk_at + chunk * heads + head, g_chunk)


@triton.jit
def _add_back(
    k_at,
    v_at,
    g_at,
    starts_at,
    ends_at,
    d_kv_at,
    d_g_chunk_at,
    d_k_at,
    d_v_at,
    d_g_at,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    exists = row < tl.load(ends_at + chunk)
    key = load_rows(k_at + head // repeats * d, row, exists, k_stride, d, D)
    value = load_rows(v_at + head * e, row, exists, v_stride, e, E)
    g_cumsum, g_chunk = _g_cumsum(g_at, row, exists, head, heads, DECAYS, CHUNK)
    decay = tl.exp(g_chunk - g_cumsum)[:, None]
    at, valid = _matrix(d_kv_at + (chunk * heads + head) * d * e, d, e, D, E)
    d_kv = tl.load(at, mask=valid, other=0.0)
    d_k = tl.dot(value * decay, tl.trans(d_kv), input_precision=PRECISION)
    d_v = tl.dot(key, d_kv, input_precision=PRECISION) * decay
    store_rows(d_k_at + head * d, d_k, row, exists, heads * d, d, D)
    store_rows(d_v_at + head * e, d_v, row, exists, heads * e, e, E)
    if DECAYS:
        # The gradient of g_chunk - g_cumsum_j: a later decay shortens what earlier tokens add.
        d_rest = tl.sum(d_v * value, 1)
        earlier = tl.cumsum(d_rest, 0) - d_rest
        d_g = earlier + tl.load(d_g_chunk_at + chunk * heads + head)
        tl.store(d_g_at + row * heads + head, d_g, mask=exists)


@triton.jit
def _read(
    q_at,
    k_at,
    v_at,
    g_at,
    h_at,
    starts_at,
    ends_at,
    o_at,
    q_stride,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    exists = row < tl.load(ends_at + chunk)
    query = load_rows(q_at + head // repeats * d, row, exists, q_stride, d, D)
    key = load_rows(k_at + head // repeats * d, row, exists, k_stride, d, D)
    value = load_rows(v_at + head * e, row, exists, v_stride, e, E)
    g_cumsum, _ = _g_cumsum(g_at, row, exists, head, heads, DECAYS, CHUNK)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights = scores * _within(g_cumsum, CHUNK)
    at, valid = _matrix(h_at + (chunk * heads + head) * d * e, d, e, D, E)
    h = tl.load(at, mask=valid, other=0.0)
    o = tl.dot(query * tl.exp(g_cumsum)[:, None], h, input_precision=PRECISION)
    o += tl.dot(weights, value, input_precision=PRECISION)
    store_rows(o_at + head * e, o, row, exists, heads * e, e, E)


@triton.jit
def _read_back(
    q_at,
    k_at,
    v_at,
    g_at,
    h_at,
    starts_at,
    ends_at,
    d_o_at,
    d_q_at,
    d_k_at,
    d_v_at,
    d_g_at,
    d_h_at,
    q_stride,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    exists = row < tl.load(ends_at + chunk)
    query = load_rows(q_at + head // repeats * d, row, exists, q_stride, d, D)
    key = load_rows(k_at + head // repeats * d, row, exists, k_stride, d, D)
    value = load_rows(v_at + head * e, row, exists, v_stride, e, E)
    d_o = load_rows(d_o_at + head * e, row, exists, heads * e, e, E)
    g_cumsum, _ = _g_cumsum(g_at, row, exists, head, heads, DECAYS, CHUNK)
    decay = tl.exp(g_cumsum)[:, None]
    at, valid = _matrix(h_at + (chunk * heads + head) * d * e, d, e, D, E)
    h = tl.load(at, mask=valid, other=0.0)
    d_q_h = tl.dot(d_o, tl.trans(h), input_precision=PRECISION) * decay
    d_h = tl.dot(tl.trans(query * decay), d_o, input_precision=PRECISION)
    at, valid = _matrix(d_h_at + (chunk * heads + head) * d * e, d, e, D, E)
    tl.store(at, d_h, mask=valid)
    within = _within(g_cumsum, CHUNK)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights = scores * within
    d_v = tl.dot(tl.trans(weights), d_o, input_precision=PRECISION)
    d_weights = tl.dot(d_o, tl.trans(value), input_precision=PRECISION)
    d_scores = d_weights * within
    d_q = d_q_h + tl.dot(d_scores, key, input_precision=PRECISION)
    d_k = tl.dot(tl.trans(d_scores), query, input_precision=PRECISION)
    store_rows(d_q_at + head * d, d_q, row, exists, heads * d, d, D)
    store_rows(d_k_at + head * d, d_k, row, exists, heads * d, d, D)
    store_rows(d_v_at + head * e, d_v, row, exists, heads * e, e, E)
    if DECAYS:
        d_between = d_scores * scores
        d_g_cumsum = tl.sum(d_q_h * query, 1) + tl.sum(d_between, 1) - tl.sum(d_between, 0)
        # A decay counts in every g_cumsum from its token on: a sum from the end.
        d_g = tl.sum(d_g_cumsum, 0) - tl.cumsum(d_g_cumsum, 0) + d_g_cumsum
        tl.store(d_g_at + row * heads + head, d_g, mask=exists)


class _ChunkStates(torch.autograd.Function):
    """What each chunk adds to the state, and how it decays what was there before."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, g: Tensor | None, chunks: ChunkLayout, precision: str
    ) -> tuple[Tensor, Tensor]:
        k, v, g = side_by_side(k), side_by_side(v), None if g is None else g.contiguous()
        heads, d, e = v.shape[1], k.shape[2], v.shape[2]
        kv = v.new_empty(chunks.counts.total, heads, d, e, dtype=torch.float32)
        g_chunk = kv.new_empty(kv.shape[:2])
        tensors = (k, v, g, chunks.starts, chunks.ends, kv, g_chunk)
        _launch(_add, tensors, (k, v), g, chunks, precision)
        ctx.save_for_backward(k, v, g)
        ctx.chunks, ctx.precision = chunks, precision
        return kv, g_chunk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kv: Tensor, d_g_chunk: Tensor) -> tuple[Tensor | None, ...]:
        k, v, g = ctx.saved_tensors
        heads, chunks = v.shape[1], ctx.chunks
        d_k = v.new_empty(len(k), heads, k.shape[2], dtype=torch.float32)
        d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
        d_g = None if g is None else torch.empty_like(g, dtype=torch.float32)
        places = (chunks.starts, chunks.ends, d_kv.contiguous(), d_g_chunk.contiguous())
        tensors = (k, v, g, *places, d_k, d_v, d_g)
        _launch(_add_back, tensors, (k, v), g, chunks, ctx.precision)
        return _by_group(d_k, k), d_v, _like(d_g, g), None, None


class _ChunkOutputs(torch.autograd.Function):
    """The outputs of all tokens, given the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        h: Tensor,
        chunks: ChunkLayout,
        precision: str,
    ) -> Tensor:
        q, k, v, h = side_by_side(q), side_by_side(k), side_by_side(v), h.contiguous()
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        g = None if g is None else g.contiguous()
        tensors = (q, k, v, g, h, chunks.starts, chunks.ends, o)
        _launch(_read, tensors, (q, k, v), g, chunks, precision)
        ctx.save_for_backward(q, k, v, g, h)
        ctx.chunks, ctx.precision = chunks, precision
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, h = ctx.saved_tensors
        heads, chunks = v.shape[1], ctx.chunks
        d_q, d_k = (v.new_empty(len(k), heads, k.shape[2], dtype=torch.float32) for _ in range(2))
        d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
        d_h = torch.empty_like(h)
        d_g = None if g is None else torch.empty_like(g, dtype=torch.float32)
        places = (h, chunks.starts, chunks.ends, d_o.contiguous())
        tensors = (q, k, v, g, *places, d_q, d_k, d_v, d_g, d_h)
        _launch(_read_back, tensors, (q, k, v), g, chunks, ctx.precision)
        groups = (_by_group(d_q, q), _by_group(d_k, k))
        return *groups, d_v, _like(d_g, g), d_h, None, None


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    g: Tensor | None,
    chunks: ChunkLayout,
    precision: str,
) -> None:
    """Run a kernel for every chunk and head; the last two of `strided` are keys and values."""
    *_, k, v = strided
    (groups, d), (heads, e) = k.shape[1:], v.shape[1:]
    sizes = (*(x.stride(0) for x in strided), d, e, heads, heads // groups)
    # In place of a missing decay there is a pointer that is never read.
    pointers = (v if tensor is None else tensor for tensor in tensors)
    kernel[(chunks.counts.total, heads)](
        *pointers,
        *sizes,
        DECAYS=g is not None,
        CHUNK=chunks.size,
        D=max(16, triton.next_power_of_2(d)),
        E=max(16, triton.next_power_of_2(e)),
        PRECISION=precision,
        num_warps=8 if max(d, e, chunks.size) > 64 else 4,
        num_stages=1,
    )


def side_by_side(x: Tensor) -> Tensor:
    """The heads of a token side by side; tokens may be further apart."""
    together = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if together else x.contiguous()


def _by_group(gradient: Tensor, x: Tensor) -> Tensor:
    """The sum over heads that share a query or key."""
    groups = x.shape[1]
    if groups != gradient.shape[1]:
        gradient = gradient.unflatten(1, (groups, -1)).sum(2)
    return gradient.to(x.dtype)


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if gradient is None or x is None else gradient.to(x.dtype)


chunk_states: Callable[..., tuple[Tensor, Tensor]] = _ChunkStates.apply
chunk_outputs: Callable[..., Tensor] = _ChunkOutputs.apply
