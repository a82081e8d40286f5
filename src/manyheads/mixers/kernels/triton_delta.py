"""Triton kernels of the delta rule: products inside chunks, and the walk of the state over chunks.

Importing this file needs triton: import it inside a function that runs on CUDA.

With the letters of the WY form (arXiv 2406.06484, 2412.06464) and of fla, for each chunk:

    v_new = u - w h        h <- exp(g_chunk) h + k_decayed^T v_new

`h` is the state before a chunk, `h0` before and `ht` after a sequence. `u` is what the tokens write
if `h` is zero, `w` how `h` corrects that, `k_decayed` the keys times the decay up to the end of the
chunk, `g_chunk` the log decay of the chunk, and `d_x` the gradient of `x`. The loop over tokens is
`naive_delta_rule`.

The columns of the state never meet, so a program carries some of them for one head through a whole
sequence. No product is ever transposed: Triton 3.4 to 3.7 gets that wrong on Hopper.

With a decay per channel, `g_cumsum` from the start of the chunk up to a token, a program computes
the products of one head of one chunk, key by key, so that exp never sees a positive number:

    products_ij = sum_d q_id k_jd exp(g_cumsum_id - g_cumsum_jd)        for j <= i
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.ragged import Lengths

# Columns of the state that one program carries.
COLUMNS = 32


@triton.jit
def _places(rows, columns, of_row, of_column, row_stride, column_stride):
    """Where the numbers of a matrix are, and which of them there are."""
    valid = (rows < of_row)[:, None] & (columns < of_column)[None, :]
    return rows[:, None] * row_stride + columns[None, :] * column_stride, valid


@triton.jit
def _products(
    key_at,
    query_at,
    g_cumsum_at,
    overlaps_at,
    weights_at,
    size,
    d,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_rows, rows_valid = _places(token, channel, size, d, d, 1)
    in_square, square_valid = _places(token, token, size, size, size, 1)
    rows, square = matrix * size * d, matrix * size * size
    key = tl.load(key_at + rows + in_rows, mask=rows_valid, other=0.0)
    query = tl.load(query_at + rows + in_rows, mask=rows_valid, other=0.0)
    g_cumsum = tl.load(g_cumsum_at + rows + in_rows, mask=rows_valid, other=0.0)
    overlaps = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    weights = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    for index in range(size):
        at = rows + index * d + channel
        key_row = tl.load(key_at + at, mask=channel < d, other=0.0)
        g_row = tl.load(g_cumsum_at + at, mask=channel < d, other=0.0)
        later = ((token >= index) & (token < size))[:, None]
        decay = tl.exp(tl.where(later, g_cumsum - g_row[None, :], 0.0))
        decayed = tl.where(later, decay * key_row[None, :], 0.0)
        own = (token == index)[None, :]
        overlaps = tl.where(own, tl.sum(key * decayed, 1)[:, None], overlaps)
        weights = tl.where(own, tl.sum(query * decayed, 1)[:, None], weights)
    tl.store(overlaps_at + square + in_square, overlaps, mask=square_valid)
    tl.store(weights_at + square + in_square, weights, mask=square_valid)


@triton.jit
def _products_back(
    key_at,
    query_at,
    g_cumsum_at,
    d_overlaps_at,
    d_weights_at,
    d_key_at,
    d_query_at,
    d_g_cumsum_at,
    size,
    d,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_rows, rows_valid = _places(token, channel, size, d, d, 1)
    rows, square = matrix * size * d, matrix * size * size
    key = tl.load(key_at + rows + in_rows, mask=rows_valid, other=0.0)
    query = tl.load(query_at + rows + in_rows, mask=rows_valid, other=0.0)
    g_cumsum = tl.load(g_cumsum_at + rows + in_rows, mask=rows_valid, other=0.0)
    # Of the later token of a pair, whose keys are the earlier ones; then of these keys.
    d_query = tl.zeros([SIZE, D], dtype=tl.float32)
    d_later = tl.zeros([SIZE, D], dtype=tl.float32)
    d_earlier = tl.zeros([SIZE, D], dtype=tl.float32)
    for index in range(size):
        at = rows + index * d + channel
        key_row = tl.load(key_at + at, mask=channel < d, other=0.0)
        query_row = tl.load(query_at + at, mask=channel < d, other=0.0)
        g_row = tl.load(g_cumsum_at + at, mask=channel < d, other=0.0)
        # This token as the key of later ones: a column of the products.
        later = (token >= index) & (token < size)
        column = square + token * size + index
        d_overlap = tl.load(d_overlaps_at + column, mask=later, other=0.0)
        d_weight = tl.load(d_weights_at + column, mask=later, other=0.0)
        decay = tl.exp(tl.where(later[:, None], g_cumsum - g_row[None, :], 0.0)) * key_row[None, :]
        d_later += d_overlap[:, None] * decay
        d_query += d_weight[:, None] * decay
        # This token as the query of earlier ones: a row of the products.
        earlier = token <= index
        row = square + index * size + token
        d_overlap = tl.load(d_overlaps_at + row, mask=earlier, other=0.0)
        d_weight = tl.load(d_weights_at + row, mask=earlier, other=0.0)
        decay = tl.exp(tl.where(earlier[:, None], g_row[None, :] - g_cumsum, 0.0))
        d_earlier += (
            d_overlap[:, None] * key_row[None, :] + d_weight[:, None] * query_row[None, :]
        ) * decay
    d_g_cumsum = key * (d_later - d_earlier) + query * d_query
    tl.store(d_key_at + rows + in_rows, d_later + d_earlier, mask=rows_valid)
    tl.store(d_query_at + rows + in_rows, d_query, mask=rows_valid)
    tl.store(d_g_cumsum_at + rows + in_rows, d_g_cumsum, mask=rows_valid)


class _DecayedProducts(torch.autograd.Function):
    """Products of keys, then of queries, with earlier keys of their chunk; 0 with later ones.

    `g_cumsum` is the log decay of every channel from the start of the chunk up to each token.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, query: Tensor, g_cumsum: Tensor) -> tuple[Tensor, Tensor]:
        key, query, g_cumsum = key.contiguous(), query.contiguous(), g_cumsum.contiguous()
        overlaps, weights = (key.new_empty(*key.shape[:-1], key.shape[-2]) for _ in range(2))
        _launch_products(_products, (key, query, g_cumsum, overlaps, weights))
        ctx.save_for_backward(key, query, g_cumsum)
        return overlaps, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_overlaps: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = ctx.saved_tensors
        d_key, d_query, d_g_cumsum = (torch.empty_like(tensor) for tensor in inputs)
        gradients = (d_overlaps.contiguous(), d_weights.contiguous())
        _launch_products(_products_back, (*inputs, *gradients, d_key, d_query, d_g_cumsum))
        return d_key, d_query, d_g_cumsum


decayed_products: Callable[..., tuple[Tensor, Tensor]] = _DecayedProducts.apply


def _launch_products(kernel: Any, tensors: tuple[Tensor, ...]) -> None:
    """Run a kernel for every chunk and head; the first of the tensors is their keys."""
    chunks, heads, size, d = tensors[0].shape
    kernel[(chunks * heads,)](
        *tensors,
        size,
        d,
        SIZE=max(16, triton.next_power_of_2(size)),
        D=max(16, triton.next_power_of_2(d)),
        num_warps=4,
        num_stages=1,
    )


@triton.jit
def _walk(
    u_at,
    w_at,
    k_decayed_at,
    g_chunk_at,
    h0_at,
    offsets_at,
    h_at,
    v_new_at,
    ht_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(offsets_at + sequence).to(tl.int64)
    count = (tl.load(offsets_at + sequence + 1) - start).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    column = tl.program_id(2) * E + tl.arange(0, E)
    in_state, state_valid = _places(channel, column, d, e, e, 1)
    in_value, value_valid = _places(token, column, size, e, e, 1)
    in_key, key_valid = _places(token, channel, size, d, d, 1)
    in_turned, turned_valid = _places(channel, token, d, size, 1, d)
    own = (sequence * heads + head) * d * e
    h = tl.load(h0_at + own + in_state, mask=state_valid, other=0.0)
    for index in range(count):
        of_head = (start + index) * heads + head
        key_start, value_start = of_head * size * d, of_head * size * e
        w = tl.load(w_at + key_start + in_key, mask=key_valid, other=0.0)
        k_decayed = tl.load(k_decayed_at + key_start + in_turned, mask=turned_valid, other=0.0)
        u = tl.load(u_at + value_start + in_value, mask=value_valid, other=0.0)
        g_chunk = tl.load(g_chunk_at + of_head * d + channel, mask=channel < d, other=0.0)
        tl.store(h_at + of_head * d * e + in_state, h, mask=state_valid)
        v_new = u - tl.dot(w, h, input_precision=PRECISION)
        tl.store(v_new_at + value_start + in_value, v_new, mask=value_valid)
        kv = tl.dot(k_decayed, v_new, input_precision=PRECISION)
        h = h * tl.exp(g_chunk)[:, None] + kv
    tl.store(ht_at + own + in_state, h, mask=state_valid)


@triton.jit
def _walk_back(
    d_h_at,
    d_v_new_at,
    d_ht_at,
    w_at,
    k_decayed_at,
    g_chunk_at,
    offsets_at,
    d_h_after_at,
    d_u_at,
    d_h0_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(offsets_at + sequence).to(tl.int64)
    count = (tl.load(offsets_at + sequence + 1) - start).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    column = tl.program_id(2) * E + tl.arange(0, E)
    in_state, state_valid = _places(channel, column, d, e, e, 1)
    in_value, value_valid = _places(token, column, size, e, e, 1)
    in_key, key_valid = _places(token, channel, size, d, d, 1)
    in_turned, turned_valid = _places(channel, token, d, size, 1, d)
    own = (sequence * heads + head) * d * e
    d_state = tl.load(d_ht_at + own + in_state, mask=state_valid, other=0.0)
    for index in range(count):
        of_head = (start + count - 1 - index) * heads + head
        key_start, value_start = of_head * size * d, of_head * size * e
        state_start = of_head * d * e
        w = tl.load(w_at + key_start + in_turned, mask=turned_valid, other=0.0)
        k_decayed = tl.load(k_decayed_at + key_start + in_key, mask=key_valid, other=0.0)
        d_v_new = tl.load(d_v_new_at + value_start + in_value, mask=value_valid, other=0.0)
        d_h = tl.load(d_h_at + state_start + in_state, mask=state_valid, other=0.0)
        g_chunk = tl.load(g_chunk_at + of_head * d + channel, mask=channel < d, other=0.0)
        tl.store(d_h_after_at + state_start + in_state, d_state, mask=state_valid)
        d_u = d_v_new + tl.dot(k_decayed, d_state, input_precision=PRECISION)
        tl.store(d_u_at + value_start + in_value, d_u, mask=value_valid)
        d_read = tl.dot(w, d_u, input_precision=PRECISION)
        d_state = d_state * tl.exp(g_chunk)[:, None] + d_h - d_read
    tl.store(d_h0_at + own + in_state, d_state, mask=state_valid)


class _Walk(torch.autograd.Function):
    """The state before each chunk, what each chunk writes, and the state after each sequence.

    These are `h`, `v_new` and `ht`; `counts` is the number of chunks of each sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        w: Tensor,
        k_decayed: Tensor,
        g_chunk: Tensor,
        h0: Tensor,
        counts: Lengths,
        precision: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        u, w, k_decayed, g_chunk, h0 = (x.contiguous() for x in (u, w, k_decayed, g_chunk, h0))
        h = h0.new_empty(len(u), *h0.shape[1:])
        v_new, ht = torch.empty_like(u), torch.empty_like(h0)
        inputs = (u, w, k_decayed, g_chunk, h0, counts.offsets)
        _launch(_walk, (*inputs, h, v_new, ht), w, h0, precision)
        ctx.save_for_backward(w, k_decayed, g_chunk, h, v_new)
        ctx.counts, ctx.precision = counts, precision
        return h, v_new, ht

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor, d_v_new: Tensor, d_ht: Tensor) -> tuple[Tensor | None, ...]:
        w, k_decayed, g_chunk, h, v_new = ctx.saved_tensors
        gradients = [tensor.contiguous() for tensor in (d_h, d_v_new, d_ht)]
        d_h_after, d_u, d_h0 = (torch.empty_like(tensor) for tensor in gradients)
        inputs = (*gradients, w, k_decayed, g_chunk, ctx.counts.offsets)
        _launch(_walk_back, (*inputs, d_h_after, d_u, d_h0), w, d_h0, ctx.precision)
        d_w = -d_u @ h.transpose(2, 3)
        d_k_decayed = v_new @ d_h_after.transpose(2, 3)
        d_g_chunk = g_chunk.exp() * torch.linalg.vecdot(d_h_after, h)
        return d_u, d_w, d_k_decayed, d_g_chunk, d_h0, None, None


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], w: Tensor, states: Tensor, precision: str
) -> None:
    """Run a walk over every sequence, head and block of columns."""
    size, (sequences, heads, d, e) = w.shape[2], states.shape
    wide = max(d, size) > 64
    kernel[(sequences, heads, triton.cdiv(e, COLUMNS))](
        *tensors,
        heads,
        size,
        d,
        e,
        SIZE=max(16, triton.next_power_of_2(size)),
        D=max(16, triton.next_power_of_2(d)),
        E=COLUMNS,
        PRECISION=precision,
        num_warps=8 if wide else 4,
        # The next chunk is loaded during the products of this one, where there is room for it.
        num_stages=1 if wide else 2,
    )


walk_over_chunks: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Walk.apply
