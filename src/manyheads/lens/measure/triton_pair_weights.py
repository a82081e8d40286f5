"""Triton kernels for the weights of single pairs: at offsets, and on earlier copies of a token.

They need the log-sum-exp of each row, from the pass of `triton_row_sums.py`.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.lens.measure.triton_row_sums import LOG2_E, StreamInputs, count_below

# What has been compiled, or is being compiled, in this process.
_COMPILED: set[tuple[object, ...]] = set()


@triton.jit(
    do_not_specialize=["queries", "heads", "share", "columns", "reach_before", "reach_after"]
)
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


@triton.jit(do_not_specialize=["tiles", "queries", "heads", "share", "reach_before"])
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
    """Rows sorted by token: the earlier copies of a row are those from its group's start on."""
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
            # The last token has none after it, and no later row needs it.
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
class QueryPositions:
    """Each query is at `place` among the `count` keys of its sequence, which start at `origin`."""

    place: Int[Tensor, " n"]
    origin: Int[Tensor, " n"]
    count: Int[Tensor, " n"]


def offset_weights(
    inputs: StreamInputs,
    positions: QueryPositions,
    level: Float[Tensor, "n h"],
    offsets: tuple[int, ...],
) -> Float[Tensor, "n h columns"]:
    """Weights on the first key and on the key at each offset."""
    queries, heads, size = inputs.query.shape
    columns, rows = 1 + len(offsets), 32
    out = torch.empty(queries, heads, columns, device=inputs.query.device)
    ahead = torch.tensor(offsets or (0,), dtype=torch.int32).to(
        inputs.query.device, non_blocking=True
    )
    _at_offsets[(triton.cdiv(queries, rows) * heads,)](
        *(inputs.query, inputs.key, positions.place, positions.origin, positions.count, ahead),
        *(inputs.query if inputs.slopes is None else inputs.slopes, level, out),
        *(queries, heads, heads // inputs.key.shape[1], columns),
        *(inputs.scale * LOG2_E.value, *inputs.reach),
        *(*inputs.query.stride()[:2], *inputs.key.stride()[:2]),
        ALIBI=inputs.slopes is not None,
        ROWS=rows,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return out


def repeat_weights(
    inputs: StreamInputs,
    positions: QueryPositions,
    level: Float[Tensor, "n h"],
    order: Int[Tensor, " n"],
    group: Int[Tensor, " n"],
) -> Float[Tensor, "2 n h"]:
    """Weights on earlier copies of a query's token, and on the tokens after them.

    `order` holds the tokens sorted by sequence and id, `group` the start of each one's run of equal
    ids. The cost grows with the number of repeated pairs.
    """
    queries, heads, size = inputs.query.shape
    full = inputs.query.dtype == torch.float32
    rows = keys = 32 if full or size > 128 else 64
    out = torch.empty(2, queries, heads, device=inputs.query.device)
    tiles = triton.cdiv(queries, rows)
    _on_repeats[(tiles * heads,)](
        *(inputs.query, inputs.key, positions.place, order, group),
        *(inputs.query if inputs.slopes is None else inputs.slopes, level, out),
        *(tiles, queries, heads, heads // inputs.key.shape[1]),
        *(inputs.scale * LOG2_E.value, inputs.reach[0]),
        *(*inputs.query.stride()[:2], *inputs.key.stride()[:2]),
        ALIBI=inputs.slopes is not None,
        PRECISION="tf32x3" if full else "tf32",
        ROWS=rows,
        KEYS=keys,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=4,
        num_stages=2,
    )
    return out


def compile_in_background(inputs: StreamInputs, positions: QueryPositions) -> list[Future[None]]:
    """Compile the kernels of single pairs and of medians on one token, if they were not before.

    A process that compiles its first kernel for some seconds compiles these beside it.
    """
    query = inputs.query
    kind = (query.device, query.dtype, query.shape[2], inputs.slopes is None)
    if kind in _COMPILED or not len(query) or query.device.type != "cuda":
        return []
    _COMPILED.add(kind)
    first = replace(inputs, query=query[:1], key=inputs.key[:1])
    at = QueryPositions(positions.place[:1], positions.origin[:1], positions.count[:1])
    level = torch.zeros(1, query.shape[1], device=query.device)
    order = torch.zeros(1, dtype=torch.int32, device=query.device)
    row = torch.ones(1, dtype=torch.bool, device=query.device)
    sizes = torch.zeros(1, query.shape[2], dtype=query.dtype, device=query.device)
    works = (
        partial(offset_weights, first, at, level, ()),
        partial(repeat_weights, first, at, level, order, order),
        partial(count_below, sizes, row, sizes[0, 0]),
    )
    # Threads would make the driver twice.
    triton.runtime.driver.active.get_current_device()
    pool = ThreadPoolExecutor(len(works))
    compiled = [pool.submit(_run_on, query.device, work) for work in works]
    pool.shutdown(wait=False)
    return compiled


def _run_on(device: torch.device, work: partial[Tensor]) -> None:
    with torch.cuda.device(device):
        work()
