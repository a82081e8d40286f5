"""Triton kernels of the delta rule inside chunks: the gradients of their parts.

Importing this file needs triton: import it inside a function that runs on CUDA.

The letters are those of `triton_delta_chunks`; `d_x` is the gradient of `x`. With x the columns of
u and w, right = beta [v, k exp(g_cumsum)] what they are solved from, and x = inverse right:

    d_right = inverse^T d_x        d_overlaps = -d_right x^T below the diagonal

A product with a decay is read from both sides: the later token, a query or a key, gets the sum over
earlier keys, and each of these the sum over later tokens. The gradient of a log decay up to a token
is what the token has of its own gradient as the later one, less that as the earlier one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.mixers.kernels.triton_delta_tiles import (
    decay_limit,
    decay_of,
    halves,
    halvings,
    launch_options,
    load_tile,
    store_tile,
    tokens_of_chunk,
    undivided,
)
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout


@triton.jit
def _solve_back(
    v_at,
    beta_at,
    inverse_at,
    u_at,
    w_at,
    d_u_at,
    d_w_at,
    starts_at,
    ends_at,
    d_v_at,
    d_beta_at,
    d_overlaps_at,
    d_right_at,
    v_stride,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of values, of overlaps, and of `right`, the keys that w is solved from."""
    chunk, head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    channel = tl.arange(0, D)
    exists, in_chunk, of_head = channel < d, token < size, chunk * heads + head
    keys, values, square = of_head * size * d, of_head * size * e, of_head * size * size
    turned = load_tile(inverse_at + square, token, token, 1, size, in_chunk, in_chunk)
    d_w = load_tile(d_w_at + keys, token, channel, d, 1, in_chunk, exists)
    w_turned = load_tile(w_at + keys, channel, token, 1, d, exists, in_chunk)
    d_right = tl.dot(turned, d_w, input_precision=PRECISION)
    store_tile(d_right_at + keys, d_right, token, channel, d, in_chunk, exists)
    d_overlaps = tl.dot(d_right, w_turned, input_precision=PRECISION)
    first = start * heads + head
    beta = tl.load(beta_at + first + token * heads, mask=valid, other=0.0).to(tl.float32)
    d_beta = tl.zeros([SIZE], dtype=tl.float32)
    v_at, d_v_at = v_at + start * v_stride + head * e, d_v_at + first * e
    for begin in range(0, e, E):
        column = begin + tl.arange(0, E)
        below = column < e
        d_u = load_tile(d_u_at + values, token, column, e, 1, in_chunk, below)
        u_turned = load_tile(u_at + values, column, token, 1, e, below, in_chunk)
        value = load_tile(v_at, token, column, v_stride, 1, valid, below).to(tl.float32)
        d_values = tl.dot(turned, d_u, input_precision=PRECISION)
        d_overlaps += tl.dot(d_values, u_turned, input_precision=PRECISION)
        d_beta += tl.sum(d_values * value, 1)
        store_tile(d_v_at, d_values * beta[:, None], token, column, heads * e, valid, below)
    tl.store(d_beta_at + first + token * heads, d_beta, mask=valid)
    d_overlaps = tl.where(token[:, None] > token[None, :], -d_overlaps, 0.0)
    store_tile(d_overlaps_at + square, d_overlaps, token, token, size, in_chunk, in_chunk)


@triton.jit
def _products_back_by_channel(
    key,
    query,
    g_at,
    d_overlaps,
    d_overlaps_turned,
    d_weights,
    d_weights_turned,
    token,
    channel,
    valid,
    d,
    g_stride,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of later keys, of queries and of earlier keys from those of their products."""
    exists = channel < d
    g = load_tile(g_at, token, channel, g_stride, 1, valid, exists)
    whole = undivided(g, g_at, token, channel, valid, d, g_stride, LEVELS, LIMIT)
    d_later = tl.zeros([SIZE, D], dtype=tl.float32)
    d_query, d_earlier = d_later, d_later
    for level in range(whole - 1, LEVELS):
        middle, later_half, earlier_half, same = halves(token, level, whole)
        middle_valid = tl.sum(valid.to(tl.int32), 0) > middle
        g_middle = load_tile(g_at, middle, channel, g_stride, 1, middle_valid, exists)
        later = tl.where(later_half[:, None], decay_of(g - g_middle, LIMIT), 0.0)
        earlier = tl.where(earlier_half[:, None], decay_of(g_middle - g, LIMIT), 0.0)
        decayed = key * earlier
        block = tl.where(same, d_overlaps, 0.0)
        d_later += later * tl.dot(block, decayed, input_precision=PRECISION)
        block = tl.where(same, d_weights, 0.0)
        d_query += later * tl.dot(block, decayed, input_precision=PRECISION)
        block = tl.where(same, d_overlaps_turned, 0.0)
        d_products = tl.dot(block, key * later, input_precision=PRECISION)
        block = tl.where(same, d_weights_turned, 0.0)
        d_products += tl.dot(block, query * later, input_precision=PRECISION)
        d_earlier += earlier * d_products
    return d_later, d_query, d_earlier


@triton.jit
def _parts_back(
    q_at,
    k_at,
    beta_at,
    g_cumsum_at,
    d_overlaps_at,
    d_weights_at,
    d_right_at,
    d_q_decayed_at,
    d_k_decayed_at,
    d_g_chunk_at,
    starts_at,
    ends_at,
    d_q_at,
    d_k_at,
    d_beta_at,
    d_g_cumsum_at,
    q_stride,
    k_stride,
    heads,
    size,
    d,
    BY_CHANNEL: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of queries, keys and decay, and the rest of that of beta."""
    chunk, head, start, token, valid = tokens_of_chunk(starts_at, ends_at, size, SIZE)
    channel = tl.arange(0, D)
    exists, in_chunk, of_head = channel < d, token < size, chunk * heads + head
    keys, square = of_head * size * d, of_head * size * size
    k_at, q_at = k_at + start * k_stride + head * d, q_at + start * q_stride + head * d
    key = load_tile(k_at, token, channel, k_stride, 1, valid, exists).to(tl.float32)
    query = load_tile(q_at, token, channel, q_stride, 1, valid, exists).to(tl.float32)
    first = start * heads + head
    beta = tl.load(beta_at + first + token * heads, mask=valid, other=0.0).to(tl.float32)
    count = tl.sum(valid.to(tl.int32), 0)
    visible, ahead = token[:, None] >= token[None, :], token[:, None] <= token[None, :]
    d_overlaps = load_tile(d_overlaps_at + square, token, token, size, 1, in_chunk, in_chunk)
    d_weights = load_tile(d_weights_at + square, token, token, size, 1, in_chunk, in_chunk)
    d_weights = tl.where(visible, d_weights, 0.0)
    # Rows are earlier tokens, columns the later ones, whose rate of writing counts.
    d_overlaps_turned = load_tile(d_overlaps_at + square, token, token, 1, size, in_chunk, in_chunk)
    d_overlaps_turned = d_overlaps_turned * beta[None, :]
    d_weights_turned = load_tile(d_weights_at + square, token, token, 1, size, in_chunk, in_chunk)
    d_weights_turned = tl.where(ahead, d_weights_turned, 0.0)
    if BY_CHANNEL:
        g_at = g_cumsum_at + first * d
        d_later, d_query, d_earlier = _products_back_by_channel(
            key,
            query,
            g_at,
            d_overlaps,
            d_overlaps_turned,
            d_weights,
            d_weights_turned,
            token,
            channel,
            valid,
            d,
            heads * d,
            SIZE,
            LEVELS,
            D,
            LIMIT,
            PRECISION,
        )
        g = load_tile(g_at, token, channel, heads * d, 1, valid, exists)
        g_chunk = tl.load(g_at + (count - 1) * heads * d + channel, mask=exists, other=0.0)[None, :]
    else:
        g = tl.load(g_cumsum_at + first + token * heads, mask=valid, other=0.0)
        between = tl.where(visible, decay_of(g[:, None] - g[None, :]), 0.0)
        d_later = tl.dot(d_overlaps * between, key, input_precision=PRECISION)
        d_query = tl.dot(d_weights * between, key, input_precision=PRECISION)
        between = tl.where(ahead, decay_of(g[None, :] - g[:, None]), 0.0)
        d_earlier = tl.dot(d_overlaps_turned * between, key, input_precision=PRECISION)
        d_earlier += tl.dot(d_weights_turned * between, query, input_precision=PRECISION)
        g = g[:, None]
        g_chunk = tl.load(g_cumsum_at + first + (count - 1) * heads)
    decay = decay_of(g)
    d_right = load_tile(d_right_at + keys, token, channel, d, 1, in_chunk, exists) * decay
    d_beta_at += first + token * heads
    d_beta = tl.load(d_beta_at, mask=valid, other=0.0) + tl.sum(key * (d_right + d_later), 1)
    tl.store(d_beta_at, d_beta, mask=valid)
    d_q_decayed = load_tile(d_q_decayed_at + keys, token, channel, d, 1, in_chunk, exists)
    d_query += d_q_decayed * decay
    d_k_decayed = load_tile(d_k_decayed_at + keys, token, channel, d, 1, in_chunk, exists)
    d_k_decayed *= decay_of(g_chunk - g)
    d_later = (d_later + d_right) * beta[:, None]
    d_earlier += d_k_decayed
    store_tile(d_q_at + first * d, d_query, token, channel, heads * d, valid, exists)
    store_tile(d_k_at + first * d, d_later + d_earlier, token, channel, heads * d, valid, exists)
    d_g = key * (d_later - d_earlier) + query * d_query
    # The decay of the chunk is that up to its last token.
    d_g_chunk = tl.sum(key * d_k_decayed, 0)
    last = token == count - 1
    if BY_CHANNEL:
        d_g_chunk += tl.load(d_g_chunk_at + of_head * d + channel, mask=exists, other=0.0)
        d_g += tl.where(last[:, None], d_g_chunk[None, :], 0.0)
        store_tile(d_g_cumsum_at + first * d, d_g, token, channel, heads * d, valid, exists)
    else:
        d_g_sum = tl.sum(d_g_chunk, 0) + tl.load(d_g_chunk_at + of_head)
        d_g_sum = tl.sum(d_g, 1) + tl.where(last, d_g_sum, 0.0)
        tl.store(d_g_cumsum_at + first + token * heads, d_g_sum, mask=valid)


def gradients_of_parts(
    saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], chunks: ChunkLayout, precision: str
) -> tuple[Tensor, ...]:
    """Those of queries, keys, values, beta and the log decay from those of the parts of chunks."""
    q, k, v, beta, g_cumsum, u, w, inverse = saved
    d_q_decayed, d_weights, d_u, d_w, d_k_decayed, d_g_chunk = gradients
    heads, size, d, e = q.shape[1], chunks.size, q.shape[2], v.shape[2]
    places, grid = (chunks.starts, chunks.ends), (chunks.counts.total, heads)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_beta, d_g_cumsum = torch.empty_like(beta, dtype=torch.float32), torch.empty_like(g_cumsum)
    d_overlaps, d_right = torch.empty_like(inverse), torch.empty_like(w)
    options = launch_options(size, d, e, precision)
    inputs = (v, beta, inverse, u, w, d_u, d_w, *places)
    results = (d_v, d_beta, d_overlaps, d_right)
    _solve_back[grid](*inputs, *results, v.stride(0), heads, size, d, e, **options)
    # The second kernel holds more numbers at a time.
    options = launch_options(size, d, e, precision, heavy=True)
    options.pop("E")
    _parts_back[grid](
        *(q, k, beta, g_cumsum, d_overlaps, d_weights, d_right),
        *(d_q_decayed, d_k_decayed, d_g_chunk, *places, d_q, d_k, d_beta, d_g_cumsum),
        *(q.stride(0), k.stride(0), heads, size, d),
        BY_CHANNEL=g_cumsum.ndim == 3,
        LEVELS=halvings(size),
        LIMIT=decay_limit(precision),
        **options,
    )
    return d_q, d_k, d_v, d_beta.to(beta.dtype), d_g_cumsum
