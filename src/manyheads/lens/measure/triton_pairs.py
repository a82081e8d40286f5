"""Triton kernels for the weights of chosen pairs, once the log-sum-exp of each row is known.

Importing this file needs triton: import it where a CUDA device is at hand.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.lens.measure.triton_row_sums import Streamed

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at_offsets(
    query_at,
    key_at,
    place_at,
    origin_at,
    count_at,
    offsets_at,
    slopes_at,
    level_at,
    out_at,
    queries,
    heads,
    share,
    columns,
    scale,
    reach_before,
    reach_after,
    query_stride,
    query_head,
    key_stride,
    key_head,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The weight on the first key, then on the key at each offset."""
    head = tl.program_id(0) % heads
    row = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    held = row < queries
    place = tl.load(place_at + row, mask=held, other=0)
    origin = tl.load(origin_at + row, mask=held, other=0)
    count = tl.load(count_at + row, mask=held, other=0)
    cell = row.to(tl.int64) * heads + head
    level = tl.load(level_at + cell, mask=held, other=0.0)
    channel = tl.arange(0, PADDED)
    inside = held[:, None] & (channel < SIZE)[None, :]
    at = query_at + head * query_head + row.to(tl.int64)[:, None] * query_stride + channel[None, :]
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    key_at += head // share * key_head
    for column in range(columns):
        offset = tl.load(offsets_at + tl.maximum(column - 1, 0))
        key = tl.where(column == 0, 0, place + offset)
        away = key - place
        seen = held & (key >= 0) & (key < count)
        seen = seen & (away >= -reach_before) & (away <= reach_after)
        at = key_at + (origin + key).to(tl.int64)[:, None] * key_stride + channel[None, :]
        k = tl.load(at, mask=seen[:, None] & (channel < SIZE)[None, :], other=0.0).to(tl.float32)
        score = tl.sum(q * k, 1) * scale
        if ALIBI:
            score -= tl.load(slopes_at + head) * LOG2_E * tl.abs(away).to(tl.float32)
        weight = tl.exp2(tl.where(seen, score - level, float("-inf")))
        tl.store(out_at + cell * columns + column, weight, mask=held)


@triton.jit
def _on_repeats(
    query_at,
    key_at,
    place_at,
    order_at,
    group_at,
    slopes_at,
    level_at,
    out_at,
    tiles,
    queries,
    heads,
    share,
    scale,
    reach_before,
    query_stride,
    query_head,
    key_stride,
    key_head,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rows in the order of their words: earlier copies are all there is from a group's start on."""
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    rank = tile * ROWS + tl.arange(0, ROWS)
    held = rank < queries
    row = tl.load(order_at + rank, mask=held, other=0)
    group = tl.load(group_at + rank, mask=held, other=queries)
    place = tl.load(place_at + row)
    cell = row.to(tl.int64) * heads + head
    level = tl.load(level_at + cell)
    channel = tl.arange(0, PADDED)
    at = query_at + head * query_head + row.to(tl.int64)[:, None] * query_stride + channel[None, :]
    q = tl.load(at, mask=held[:, None] & (channel < SIZE)[None, :], other=0.0)
    key_at += head // share * key_head
    slope = scale
    if ALIBI:
        slope = tl.load(slopes_at + head) * LOG2_E
    duplicate = tl.zeros((ROWS,), tl.float32)
    induction = tl.zeros((ROWS,), tl.float32)
    end = tl.minimum(tile * ROWS + ROWS, queries)
    for start in range(tl.min(group, 0), end, KEYS):
        other = start + tl.arange(0, KEYS)
        there = other < end
        token = tl.load(order_at + other, mask=there, other=0)
        stands = tl.load(place_at + token)
        earlier = (other[None, :] >= group[:, None]) & (other[None, :] < rank[:, None])
        for further in tl.static_range(2):
            # The last token of all has none after it; nobody comes later who could see that.
            real = there & (token + further < queries)
            at = key_at + (token + further).to(tl.int64)[:, None] * key_stride + channel[None, :]
            k = tl.load(at, mask=real[:, None] & (channel < SIZE)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            away = (stands + further)[None, :] - place[:, None]
            if ALIBI:
                scores -= slope * tl.abs(away).to(tl.float32)
            seen = earlier & (away >= -reach_before)
            weights = tl.exp2(tl.where(seen, scores - level[:, None], float("-inf")))
            if further == 0:
                duplicate += tl.sum(weights, 1)
            else:
                induction += tl.sum(weights, 1)
    tl.store(out_at + cell, duplicate, mask=held)
    tl.store(out_at + tl.cast(queries, tl.int64) * heads + cell, induction, mask=held)


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """A query stands at `place` among the `count` keys of its sequence that begin at `origin`."""

    place: Int[Tensor, " n"]
    origin: Int[Tensor, " n"]
    count: Int[Tensor, " n"]


def at_offsets(
    of: Streamed, standing: Standing, level: Float[Tensor, "n h"], offsets: tuple[int, ...]
) -> Float[Tensor, "n h columns"]:
    """Weights on the first key and on the key at each offset."""
    queries, heads, size = of.query.shape
    columns, rows = 1 + len(offsets), 32
    out = torch.empty(queries, heads, columns, device=of.query.device)
    ahead = torch.tensor(offsets or (0,), dtype=torch.int32).to(of.query.device, non_blocking=True)
    _at_offsets[(triton.cdiv(queries, rows) * heads,)](
        *(of.query, of.key, standing.place, standing.origin, standing.count, ahead),
        *(of.query if of.slopes is None else of.slopes, level, out),
        *(queries, heads, heads // of.key.shape[1], columns),
        *(of.scale * LOG2_E.value, *of.reach),
        *(*of.query.stride()[:2], *of.key.stride()[:2]),
        ALIBI=of.slopes is not None,
        ROWS=rows,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return out


def on_repeats(
    of: Streamed,
    standing: Standing,
    level: Float[Tensor, "n h"],
    order: Int[Tensor, " n"],
    group: Int[Tensor, " n"],
) -> Float[Tensor, "2 n h"]:
    """Weights on earlier copies of a query's token, and on the tokens after them.

    `order` holds the tokens sorted by sequence and word, `group` for each of these where its word
    begins. A text costs what its repeats are: pairs of the same word, and no other.
    """
    queries, heads, size = of.query.shape
    whole = of.query.dtype == torch.float32
    rows = keys = 32 if whole or size > 128 else 64
    out = torch.empty(2, queries, heads, device=of.query.device)
    tiles = triton.cdiv(queries, rows)
    _on_repeats[(tiles * heads,)](
        *(of.query, of.key, standing.place, order, group),
        *(of.query if of.slopes is None else of.slopes, level, out),
        *(tiles, queries, heads, heads // of.key.shape[1]),
        *(of.scale * LOG2_E.value, of.reach[0]),
        *(*of.query.stride()[:2], *of.key.stride()[:2]),
        ALIBI=of.slopes is not None,
        PRECISION="tf32x3" if whole else "tf32",
        ROWS=rows,
        KEYS=keys,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=4,
        num_stages=2,
    )
    return out
