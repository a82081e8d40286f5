"""Triton kernels that sum the attention weights of all heads in one pass over the keys.

As in flash attention (arXiv 2205.14135), each program takes a tile of queries of one head through
all blocks of keys: products on the tensor cores, statistics in float32, only sums over rows stored.
The weights of single pairs (offsets, repeated tokens) follow once the log-sum-exp is known.
Importing this file needs Triton: import it only where there is a CUDA device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Powers of 2 are raised by 15 above the row maximum: float16 then holds weights down to 2^-39.
LIFT = tl.constexpr(15.0)
# Below every score, and finite: zero times minus infinity is NaN.
FAR = tl.constexpr(-1e30)
# The initial row maximum: above hidden scores, below visible ones.
LOW = tl.constexpr(-1e29)
TINY = tl.constexpr(1e-30)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Shared memory of 128 queries and three stages of 128 keys of 128 channels, with their marks.
LARGE_TILE_BYTES = 160_000
# In the order in which the kernel stores them.
FIELDS = ("mass", "entropy", "squares", "largest", "distance", "variance", "level")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamInputs:
    """Packed queries and keys, the starts of sequences, and which keys a query may see."""

    query: Float[Tensor, "n h d"]
    key: Float[Tensor, "m g d"]
    query_starts: Int[Tensor, " b_plus_1"]
    key_starts: Int[Tensor, " b_plus_1"]
    longest: int
    reach: tuple[int, int]
    scale: float
    marks: Float[Tensor, "m marks"]
    slopes: Float[Tensor, " h"] | None
    sink: Float[Tensor, " h"] | None


@triton.jit
def _meet(
    top,
    total,
    inverse,
    surprise,
    squares,
    moment,
    scatter,
    ahead,
    marked,
    q,
    place,
    key_at,
    marks_at,
    start,
    count,
    slope,
    scale,
    reach_before,
    reach_after,
    key_stride,
    EDGE: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIBI: tl.constexpr,
    MARKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Add one block of keys to the sums; only at an `EDGE` are some keys hidden from a row."""
    step = tl.arange(0, KEYS)
    key = start + step
    channel = tl.arange(0, PADDED)
    at = key_at + tl.cast(start, tl.int64) * key_stride
    at = at + step[:, None] * key_stride + channel[None, :]
    if EDGE:
        k = tl.load(at, mask=(key < count)[:, None] & (channel < SIZE)[None, :], other=0.0)
    elif SIZE == PADDED:
        k = tl.load(at)
    else:
        k = tl.load(at, mask=(channel < SIZE)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if EDGE or ALIBI or AHEAD:
        away = key[None, :] - place[:, None]
    if EDGE or ALIBI:
        scores = scores * scale
        if ALIBI:
            scores = scores - slope * tl.abs(away).to(tl.float32)
        if EDGE:
            seen = (key < count)[None, :] & (away >= -reach_before) & (away <= reach_after)
            scores = tl.where(seen, scores, FAR)
        best = tl.maximum(top, tl.max(scores, 1))
        below = scores - (best - LIFT)[:, None]
    else:
        best = tl.maximum(top, tl.max(scores, 1) * scale)
        below = scores * scale - (best - LIFT)[:, None]
    powers = tl.exp2(below)
    fade = tl.exp2(top - best)
    here = tl.sum(powers, 1)
    surprise = fade * (surprise + (top - best) * total) + tl.sum(powers * below, 1)
    squares = squares * (fade * fade) + tl.sum(powers * powers, 1)
    # Mean and variance of the block, then merged with those before (Chan's rule): squares of
    # distant positions would cancel.
    column = step.to(tl.float32)
    inside = tl.sum(powers * column[None, :], 1)
    middle = inside / tl.maximum(here, TINY)
    gap = column[None, :] - middle[:, None]
    offset = (start - place).to(tl.float32)
    apart = offset + middle - moment * inverse
    old = total * fade
    total = old + here
    inverse = 1.0 / tl.maximum(total, TINY)
    scatter = scatter * fade + tl.sum(powers * gap * gap, 1)
    scatter += apart * apart * old * (here * inverse)
    moment = moment * fade + (here * offset + inside)
    if AHEAD:
        ahead = ahead * fade + tl.sum(powers * tl.maximum(away, 0).to(tl.float32), 1)
    if MARKS > 0:
        mark = tl.arange(0, MARKS)
        at = marks_at + key[:, None] * MARKS + mark[None, :]
        if EDGE:
            marks = tl.load(at, mask=(key < count)[:, None], other=0.0)
        else:
            marks = tl.load(at)
        half = powers.to(tl.float16)
        marked = tl.dot(half, marks, acc=marked * fade[:, None])
        if SPLIT:
            rest = (powers - half.to(tl.float32)).to(tl.float16)
            marked = tl.dot(rest, marks, acc=marked)
    return best, total, inverse, surprise, squares, moment, scatter, ahead, marked


@triton.jit
def _stream(
    query_at,
    key_at,
    query_starts_at,
    key_starts_at,
    marks_at,
    slopes_at,
    sink_at,
    out_at,
    marked_at,
    tiles,
    heads,
    share,
    queries,
    scale,
    reach_before,
    reach_after,
    query_stride,
    query_head,
    key_stride,
    key_head,
    AHEAD: tl.constexpr,
    ALIBI: tl.constexpr,
    SINK: tl.constexpr,
    MARKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A tile of queries of one head and all keys that they see."""
    # Programs that run at the same time read the same keys; the longest start first.
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    sequence = tl.program_id(0) // tiles // heads
    query_start = tl.load(query_starts_at + sequence)
    key_start = tl.load(key_starts_at + sequence)
    rows = tl.load(query_starts_at + sequence + 1) - query_start
    count = tl.load(key_starts_at + sequence + 1) - key_start
    if tile * ROWS >= rows:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    shift = count - rows
    place = row + shift
    channel = tl.arange(0, PADDED)
    at = query_at + head * query_head + (query_start + row).to(tl.int64)[:, None] * query_stride
    inside = (row < rows)[:, None] & (channel < SIZE)[None, :]
    q = tl.load(at + channel[None, :], mask=inside, other=0.0)
    key_at += key_start.to(tl.int64) * key_stride + (head // share) * key_head
    marks_at += key_start.to(tl.int64) * MARKS
    slope = scale
    if ALIBI:
        slope = tl.load(slopes_at + head) * LOG2_E

    top = tl.full((ROWS,), LOW, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    inverse = tl.zeros((ROWS,), tl.float32)
    surprise = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    scatter = tl.zeros((ROWS,), tl.float32)
    ahead = tl.zeros((ROWS,), tl.float32)
    marked = tl.zeros((ROWS, MARKS if MARKS > 0 else 1), tl.float32)

    # Some row sees keys `low` to `high`; every row sees the blocks from `clear` to `clear_end`.
    first = tile * ROWS + shift
    last = tl.minimum(first + ROWS, count) - 1
    low = tl.maximum(first - reach_before, 0)
    high = tl.minimum(last + reach_after + 1, count)
    edges = tl.cdiv(tl.maximum(last - reach_before - low, 0), KEYS)
    clear = low + edges * KEYS
    clear_end = tl.minimum(first + reach_after + 1, count)
    clear_end = clear + tl.maximum(clear_end - clear, 0) // KEYS * KEYS
    for start in range(clear, clear_end, KEYS):
        top, total, inverse, surprise, squares, moment, scatter, ahead, marked = _meet(
            top, total, inverse, surprise, squares, moment, scatter, ahead, marked,
            q, place, key_at, marks_at, start, count, slope, scale, reach_before, reach_after,
            key_stride, False, AHEAD, ALIBI, MARKS, SPLIT, PRECISION, KEYS, SIZE, PADDED,
        )  # fmt: skip
    for step in range(edges + tl.cdiv(tl.maximum(high - clear_end, 0), KEYS)):
        start = tl.where(step < edges, low + step * KEYS, clear_end + (step - edges) * KEYS)
        top, total, inverse, surprise, squares, moment, scatter, ahead, marked = _meet(
            top, total, inverse, surprise, squares, moment, scatter, ahead, marked,
            q, place, key_at, marks_at, start, count, slope, scale, reach_before, reach_after,
            key_stride, True, AHEAD, ALIBI, MARKS, SPLIT, PRECISION, KEYS, SIZE, PADDED,
        )  # fmt: skip

    some = tl.maximum(total, TINY)
    level = tl.log2(some) + (top - LIFT)
    if SINK:
        sink = tl.load(sink_at + head) * LOG2_E
        larger = tl.maximum(level, sink)
        level = larger + tl.log2(tl.exp2(level - larger) + tl.exp2(sink - larger))
    # Powers times this are weights; a row without visible keys has none.
    factor = tl.where(total > 0, tl.exp2(top - LIFT - level), 0.0)
    mass = factor * total
    entropy = tl.where(total > 0, (level - (top - LIFT)) * mass - factor * surprise, 0.0) * LN_2
    distance = mass * ((2 * ahead - moment) / some)
    cell = (query_start + row).to(tl.int64) * heads + head
    held = row < rows
    field = tl.cast(queries, tl.int64) * heads
    tl.store(out_at + cell, mass, mask=held)
    tl.store(out_at + field + cell, entropy, mask=held)
    tl.store(out_at + 2 * field + cell, factor * squares * factor, mask=held)
    tl.store(out_at + 3 * field + cell, tl.exp2(top - level) * (total > 0), mask=held)
    tl.store(out_at + 4 * field + cell, distance, mask=held)
    tl.store(out_at + 5 * field + cell, scatter / some, mask=held)
    tl.store(out_at + 6 * field + cell, level, mask=held)
    if MARKS > 0:
        at = marked_at + cell[:, None] * MARKS + tl.arange(0, MARKS)[None, :]
        tl.store(at, marked * factor[:, None], mask=held[:, None])


def stream(
    inputs: StreamInputs,
) -> tuple[dict[str, Float[Tensor, "n h"]], Float[Tensor, "n h marks"]]:
    """Every sum by name (`level` is the log-sum-exp to base 2), and the weight on marked keys."""
    (queries, heads, size), device = inputs.query.shape, inputs.query.device
    out = torch.zeros(len(FIELDS), queries, heads, device=device)
    wide = max(16, triton.next_power_of_2(inputs.marks.shape[1])) if inputs.marks.shape[1] else 0
    marks = torch.zeros(len(inputs.marks), wide, device=device, dtype=torch.float16)
    marks[:, : inputs.marks.shape[1]] = inputs.marks
    marked = torch.zeros(queries, heads, wide, device=device)
    shape = choose_tile_shape(inputs.query, wide)
    tiles = triton.cdiv(inputs.longest, shape.rows)
    _stream[(tiles * heads * (len(inputs.query_starts) - 1),)](
        *(inputs.query, inputs.key, inputs.query_starts, inputs.key_starts, marks),
        *(inputs.query if tensor is None else tensor for tensor in (inputs.slopes, inputs.sink)),
        *(out, marked, tiles, heads, heads // inputs.key.shape[1], queries),
        *(inputs.scale * LOG2_E.value, *inputs.reach),
        *(*inputs.query.stride()[:2], *inputs.key.stride()[:2]),
        AHEAD=inputs.reach[1] > 0,
        ALIBI=inputs.slopes is not None,
        SINK=inputs.sink is not None,
        MARKS=wide,
        SPLIT=inputs.query.dtype == torch.float32,
        PRECISION="tf32x3" if inputs.query.dtype == torch.float32 else "tf32",
        ROWS=shape.rows,
        KEYS=shape.keys,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return dict(zip(FIELDS, out, strict=True)), marked[..., : inputs.marks.shape[1]]


@dataclass(frozen=True, slots=True)
class TileShape:
    """The queries and keys per tile, and the warps and stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


def choose_tile_shape(query: Float[Tensor, "n h d"], marks: int) -> TileShape:
    """Tuned on an H200, where 128 by 128 is 7% faster than 64 by 128.

    Smaller GPUs lack the shared memory for it, and float32 takes three products instead of one.
    """
    large = False
    if query.device.type == "cuda":
        driver = triton.runtime.driver.active
        properties = driver.utils.get_device_properties(query.device.index)
        large = int(properties["max_shared_mem"]) > LARGE_TILE_BYTES
    if query.dtype == torch.float32 or query.shape[2] > 128:
        return TileShape(64, 32, 4, 2 if large else 1)
    return TileShape(128, 128, 8, 3) if large and marks <= 16 else TileShape(64, 64, 4, 2)


@triton.jit
def _below(
    values_at, kept_at, limit_at, out_at, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(kept_at + row, mask=row < rows, other=0).to(tl.int32)
    limit = tl.load(limit_at).to(tl.float32)
    at = values_at + row.to(tl.int64)[:, None] * width
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(at + column[None, :], mask=inside, other=float("inf"))
        count += (value.to(tl.float32) < limit).to(tl.int32)
    total = tl.sum(tl.sum(count, 1) * kept, 0)
    tl.atomic_add(out_at, total.to(tl.int64))


def count_below(
    values: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    """The number of values below a limit in some rows, without synchronising the device."""
    values = values.contiguous()
    count = torch.zeros((), dtype=torch.int64, device=values.device)
    tile = 4
    _below[(triton.cdiv(len(values), tile),)](
        values, rows.to(torch.uint8), limit, count, *values.shape, ROWS=tile, COLUMNS=1024
    )
    return count


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
