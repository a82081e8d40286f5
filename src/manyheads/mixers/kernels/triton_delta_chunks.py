"""Triton kernels of the delta rule inside chunks: all that does not depend on the state.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program computes one head of one chunk from its tokens alone. With the letters of the WY form
(arXiv 2406.06484, 2412.06464) and of fla, `g_cumsum` the log decay from the start of the chunk up
to a token, `g_chunk` that of the chunk, and sums over the channels d and the tokens j <= i:

    overlaps_ij = beta_i sum_d k_id k_jd exp(g_cumsum_id - g_cumsum_jd)         for j < i
    weights_ij = sum_d q_id k_jd exp(g_cumsum_id - g_cumsum_jd)
    inverse = (1 + overlaps)^-1
    u = inverse (beta v)                           w = inverse (beta k exp(g_cumsum))
    q_decayed = q exp(g_cumsum)                    k_decayed = k exp(g_chunk - g_cumsum)

and when the walk over chunks (`triton_delta`) has given `h` and `v_new`:

    o = q_decayed h + weights v_new

The loop over tokens is `naive_delta_rule`. With a decay per channel the matrix product takes apart
exp(g_cumsum_id - g_cumsum_jd), and exp(-g_cumsum_jd) overflows where a channel forgets fast. So the
decay of a query and that of a key are taken from a token between them: tokens of the second half of
a block with those of its first half, for blocks of 64, 32, ... 2 tokens. Then no exponent is above
zero. Blocks in which every channel decays little are not halved: there decays are taken from the
first token, and no exponent is above a limit that costs no digits.

No product is ever transposed, tiles are read from memory in both orders instead: Triton 3.4 to 3.7
gets some transposed ones wrong on Hopper.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.kernels.triton_decay import side_by_side
from manyheads.mixers.kernels.triton_delta_gradients import gradients_of_parts
from manyheads.mixers.kernels.triton_delta_tiles import (
    COLUMNS,
    decay_limit,
    decay_of,
    halves,
    halvings,
    launch_options,
    load_tile,
    store_tile,
    tile_side,
    tokens_of_chunk,
    undivided,
)
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout


@triton.jit
def _cumsum(
    x_at,
    starts_at,
    ends_at,
    out_at,
    columns,
    size,
    REVERSE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _chunk, _head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = start * columns
    x = load_tile(x_at + first, token, column, columns, 1, valid, column < columns)
    out = tl.cumsum(x.to(tl.float32), 0, reverse=REVERSE)
    store_tile(out_at + first, out, token, column, columns, valid, column < columns)


@triton.jit
def _inverse(overlaps, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + overlaps)^-1 for a matrix below the diagonal: blocks of 16 row by row, then joined."""
    BLOCKS: tl.constexpr = SIZE // 16
    block, token = tl.arange(0, BLOCKS), tl.arange(0, SIZE)
    same = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(overlaps, (BLOCKS, 16, BLOCKS, 16))
    blocks = tl.sum(tl.where(same, blocks, 0.0), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.zeros([BLOCKS, 16, 16], dtype=tl.float32))
    for index in range(15):
        factor = tl.sum(tl.where(column == index, blocks, 0.0), 2)
        solved = tl.sum(tl.where(row == index, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * solved[:, None, :]
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (SIZE, SIZE))
    for level in tl.static_range(4, 7):
        if (1 << level) < SIZE:
            # A block of the lower left joins two inverses: -inverse block inverse.
            half = token >> level
            below = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
            joining = tl.where(below, overlaps, 0.0)
            joining = tl.dot(inverse, joining, input_precision=PRECISION)
            inverse -= tl.dot(joining, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _products_by_channel(
    key,
    query,
    key_turned,
    g_at,
    token,
    channel,
    valid,
    d,
    g_stride,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decayed products of keys, and of queries, with earlier keys."""
    exists = channel < d
    g = load_tile(g_at, token, channel, g_stride, 1, valid, exists)
    g_turned = load_tile(g_at, channel, token, 1, g_stride, exists, valid)
    whole = undivided(g, g_at, token, channel, valid, d, g_stride, LEVELS, LIMIT)
    products = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    weights = products
    for level in range(whole - 1, LEVELS):
        middle, later_half, earlier_half, same = halves(token, level, whole)
        middle_valid = tl.sum(valid.to(tl.int32), 0) > middle
        g_middle = load_tile(g_at, middle, channel, g_stride, 1, middle_valid, exists)
        later = tl.where(later_half[:, None], decay_of(g - g_middle, LIMIT), 0.0)
        g_middle = load_tile(g_at, channel, middle, 1, g_stride, exists, middle_valid)
        earlier = tl.where(earlier_half[None, :], decay_of(g_middle - g_turned, LIMIT), 0.0)
        earlier *= key_turned
        product = tl.dot(key * later, earlier, input_precision=PRECISION)
        products += tl.where(same, product, 0.0)
        product = tl.dot(query * later, earlier, input_precision=PRECISION)
        weights += tl.where(same, product, 0.0)
    visible = token[:, None] >= token[None, :]
    return tl.where(visible, products, 0.0), tl.where(visible, weights, 0.0)


@triton.jit
def _parts(
    q_at,
    k_at,
    v_at,
    beta_at,
    g_cumsum_at,
    starts_at,
    ends_at,
    q_decayed_at,
    weights_at,
    u_at,
    w_at,
    k_decayed_at,
    g_chunk_at,
    inverse_at,
    q_stride,
    k_stride,
    v_stride,
    heads,
    size,
    d,
    e,
    BY_CHANNEL: tl.constexpr,
    LEARNS: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    channel = tl.arange(0, D)
    exists, in_chunk = channel < d, token < size
    k_at, q_at = k_at + start * k_stride + head * d, q_at + start * q_stride + head * d
    key = load_tile(k_at, token, channel, k_stride, 1, valid, exists)
    key_turned = load_tile(k_at, channel, token, 1, k_stride, exists, valid)
    query = load_tile(q_at, token, channel, q_stride, 1, valid, exists)
    first = start * heads + head
    beta = tl.load(beta_at + first + token * heads, mask=valid, other=0.0).to(tl.float32)[:, None]
    count = tl.sum(valid.to(tl.int32), 0)
    visible, of_head = token[:, None] >= token[None, :], chunk * heads + head
    if BY_CHANNEL:
        key, key_turned = key.to(tl.float32), key_turned.to(tl.float32)
        query = query.to(tl.float32)
        g_at = g_cumsum_at + first * d
        products, weights = _products_by_channel(
            key,
            query,
            key_turned,
            g_at,
            token,
            channel,
            valid,
            d,
            heads * d,
            SIZE,
            LEVELS,
            LIMIT,
            PRECISION,
        )
        g = load_tile(g_at, token, channel, heads * d, 1, valid, exists)
        g_chunk = tl.load(g_at + (count - 1) * heads * d + channel, mask=exists, other=0.0)
        tl.store(g_chunk_at + of_head * d + channel, g_chunk, mask=exists)
        g_chunk = g_chunk[None, :]
    else:
        g = tl.load(g_cumsum_at + first + token * heads, mask=valid, other=0.0)
        between = tl.where(visible, decay_of(g[:, None] - g[None, :]), 0.0)
        products = tl.dot(key, key_turned, input_precision=PRECISION) * between
        weights = tl.dot(query, key_turned, input_precision=PRECISION) * between
        key, query, g = key.to(tl.float32), query.to(tl.float32), g[:, None]
        g_chunk = tl.load(g_cumsum_at + first + (count - 1) * heads)
        tl.store(g_chunk_at + of_head, g_chunk)
    keys, values, square = of_head * size * d, of_head * size * e, of_head * size * size
    store_tile(weights_at + square, weights, token, token, size, in_chunk, in_chunk)
    k_decayed = key * decay_of(g_chunk - g)
    store_tile(k_decayed_at + keys, k_decayed, token, channel, d, in_chunk, exists)
    decay = decay_of(g)
    store_tile(q_decayed_at + keys, query * decay, token, channel, d, in_chunk, exists)
    overlaps = tl.where(token[:, None] > token[None, :], beta * products, 0.0)
    inverse = _inverse(overlaps, SIZE, PRECISION)
    if LEARNS:
        store_tile(inverse_at + square, inverse, token, token, size, in_chunk, in_chunk)
    w = tl.dot(inverse, beta * key * decay, input_precision=PRECISION)
    store_tile(w_at + keys, w, token, channel, d, in_chunk, exists)
    v_at += start * v_stride + head * e
    for begin in range(0, e, E):
        column = begin + tl.arange(0, E)
        value = load_tile(v_at, token, column, v_stride, 1, valid, column < e).to(tl.float32)
        u = tl.dot(inverse, beta * value, input_precision=PRECISION)
        store_tile(u_at + values, u, token, column, e, in_chunk, column < e)


@triton.jit
def _outputs(
    q_decayed_at,
    weights_at,
    h_at,
    v_new_at,
    starts_at,
    ends_at,
    o_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    channel, column = tl.arange(0, D), tl.program_id(2) * E + tl.arange(0, E)
    exists, in_chunk, of_head = channel < d, token < size, chunk * heads + head
    square = weights_at + of_head * size * size
    weights = load_tile(square, token, token, size, 1, in_chunk, in_chunk)
    q_decayed_at += of_head * size * d
    q_decayed = load_tile(q_decayed_at, token, channel, d, 1, in_chunk, exists)
    h = load_tile(h_at + of_head * d * e, channel, column, e, 1, exists, column < e)
    v_new = load_tile(v_new_at + of_head * size * e, token, column, e, 1, in_chunk, column < e)
    o = tl.dot(q_decayed, h, input_precision=PRECISION)
    o += tl.dot(weights, v_new, input_precision=PRECISION)
    store_tile(o_at + (start * heads + head) * e, o, token, column, heads * e, valid, column < e)


@triton.jit
def _outputs_back(
    d_o_at,
    q_decayed_at,
    weights_at,
    h_at,
    v_new_at,
    starts_at,
    ends_at,
    d_q_decayed_at,
    d_weights_at,
    d_h_at,
    d_v_new_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    channel = tl.arange(0, D)
    exists, in_chunk, of_head = channel < d, token < size, chunk * heads + head
    keys, square = of_head * size * d, of_head * size * size
    values, states = of_head * size * e, of_head * d * e
    q_decayed = load_tile(q_decayed_at + keys, channel, token, 1, d, exists, in_chunk)
    weights = load_tile(weights_at + square, token, token, 1, size, in_chunk, in_chunk)
    d_q_decayed = tl.zeros([SIZE, D], dtype=tl.float32)
    d_weights = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    d_o_at += (start * heads + head) * e
    for begin in range(0, e, E):
        column = begin + tl.arange(0, E)
        below = column < e
        d_o = load_tile(d_o_at, token, column, heads * e, 1, valid, below).to(tl.float32)
        h = load_tile(h_at + states, column, channel, 1, e, below, exists)
        v_new = load_tile(v_new_at + values, column, token, 1, e, below, in_chunk)
        d_q_decayed += tl.dot(d_o, h, input_precision=PRECISION)
        d_weights += tl.dot(d_o, v_new, input_precision=PRECISION)
        d_h = tl.dot(q_decayed, d_o, input_precision=PRECISION)
        store_tile(d_h_at + states, d_h, channel, column, e, exists, below)
        d_v_new = tl.dot(weights, d_o, input_precision=PRECISION)
        store_tile(d_v_new_at + values, d_v_new, token, column, e, in_chunk, below)
    store_tile(d_q_decayed_at + keys, d_q_decayed, token, channel, d, in_chunk, exists)
    store_tile(d_weights_at + square, d_weights, token, token, size, in_chunk, in_chunk)


class _Cumsum(torch.autograd.Function):
    """The sum of the log decays of each chunk up to every token."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, chunks: ChunkLayout) -> Tensor:
        ctx.chunks, ctx.dtype = chunks, g.dtype
        return _cumsum_of_chunks(g.contiguous(), chunks, reverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_g_cumsum: Tensor) -> tuple[Tensor | None, ...]:
        d_g = _cumsum_of_chunks(d_g_cumsum.contiguous(), ctx.chunks, reverse=True)
        return d_g.to(ctx.dtype), None


def _cumsum_of_chunks(x: Tensor, chunks: ChunkLayout, *, reverse: bool) -> Tensor:
    out, columns = torch.empty_like(x, dtype=torch.float32), x[0].numel()
    block = min(COLUMNS, triton.next_power_of_2(columns))
    _cumsum[(chunks.counts.total, triton.cdiv(columns, block))](
        x,
        chunks.starts,
        chunks.ends,
        out,
        columns,
        chunks.size,
        REVERSE=reverse,
        SIZE=tile_side(chunks.size),
        COLUMNS=block,
        num_warps=4,
    )
    return out


class _Parts(torch.autograd.Function):
    """`q_decayed`, `weights`, `u`, `w`, `k_decayed` and `g_chunk`, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g_cumsum: Tensor,
        chunks: ChunkLayout,
        precision: str,
    ) -> tuple[Tensor, ...]:
        q, k, v, beta = side_by_side(q), side_by_side(k), side_by_side(v), beta.contiguous()
        (_, heads, d), e, size = q.shape, v.shape[2], chunks.size

        def empty(*shape: int) -> Tensor:
            return q.new_empty(chunks.counts.total, heads, *shape, dtype=torch.float32)

        u, (q_decayed, w, k_decayed) = empty(size, e), (empty(size, d) for _ in range(3))
        weights, learns = empty(size, size), any(ctx.needs_input_grad)
        g_chunk = empty(*g_cumsum.shape[2:])
        inverse = empty(size, size) if learns else weights
        inputs = (q, k, v, beta, g_cumsum, chunks.starts, chunks.ends)
        results = (q_decayed, weights, u, w, k_decayed, g_chunk, inverse)
        sizes = (q.stride(0), k.stride(0), v.stride(0), heads, size, d, e)
        options = launch_options(size, d, e, precision)
        _parts[(chunks.counts.total, heads)](
            *inputs,
            *results,
            *sizes,
            BY_CHANNEL=g_cumsum.ndim == 3,
            LEARNS=learns,
            LEVELS=halvings(size),
            LIMIT=decay_limit(precision),
            **options,
        )
        ctx.save_for_backward(q, k, v, beta, g_cumsum, u, w, inverse)
        ctx.chunks, ctx.precision = chunks, precision
        return q_decayed, weights, u, w, k_decayed, g_chunk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        return (
            *gradients_of_parts(ctx.saved_tensors, gradients, ctx.chunks, ctx.precision),
            None,
            None,
        )


class _Outputs(torch.autograd.Function):
    """The outputs of all tokens, as `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        q_decayed: Tensor,
        weights: Tensor,
        h: Tensor,
        v_new: Tensor,
        chunks: ChunkLayout,
        dtype: torch.dtype,
        precision: str,
    ) -> Tensor:
        heads, (size, d), e = h.shape[1], q_decayed.shape[2:], h.shape[3]
        o = h.new_empty(chunks.slot_of_token.shape[0], heads, e, dtype=dtype)
        options = launch_options(size, d, e, precision)
        inputs = (q_decayed, weights, h, v_new, chunks.starts, chunks.ends)
        grid = (chunks.counts.total, heads, triton.cdiv(e, options["E"]))
        _outputs[grid](*inputs, o, heads, size, d, e, **options)
        ctx.save_for_backward(q_decayed, weights, h, v_new)
        ctx.chunks, ctx.precision = chunks, precision
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        inputs, chunks = ctx.saved_tensors, ctx.chunks
        q_decayed, _, h, _ = inputs
        heads, (size, d), e = h.shape[1], q_decayed.shape[2:], h.shape[3]
        # Of the weights only those of earlier tokens count.
        results = [torch.empty_like(tensor) for tensor in inputs]
        tensors = (d_o.contiguous(), *inputs, chunks.starts, chunks.ends, *results)
        options = launch_options(size, d, e, ctx.precision)
        _outputs_back[(chunks.counts.total, heads)](*tensors, heads, size, d, e, **options)
        return *results, None, None, None


cumsum_in_chunks: Callable[[Tensor, ChunkLayout], Tensor] = _Cumsum.apply
chunk_parts: Callable[..., tuple[Tensor, ...]] = _Parts.apply
chunk_outputs: Callable[..., Tensor] = _Outputs.apply
