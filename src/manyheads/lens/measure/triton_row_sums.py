"""Triton kernels that sum up the weights of all heads in one pass over the keys.

As in flash attention (arXiv 2205.14135) some queries of one head meet block after block of keys:
products on the tensor cores, statistics in float32, nothing kept of a block but sums of its rows.
Importing this file needs triton: import it where a CUDA device is at hand.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Powers of 2 are taken 15 above each row's largest score: float16 then holds weights down to 2^-39.
LIFT = tl.constexpr(15.0)
# Below every score, and finite: nothing times minus infinity would not be nothing.
FAR = tl.constexpr(-1e30)
# Where a row's largest score starts: above what is hidden, below what is seen.
LOW = tl.constexpr(-1e29)
TINY = tl.constexpr(1e-30)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# What 128 queries and three times 128 keys of 128 channels take, with their marks.
ROOM = 160_000
# In the order in which the kernel writes them.
FIELDS = ("mass", "entropy", "squares", "largest", "distance", "variance", "level")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Streamed:
    """What is streamed: packed queries and keys, where sequences begin, what queries may see."""

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
    """Join one block of keys to the sums; only at an `EDGE` may a row not see all of them."""
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
    # Centre and spread of the block by themselves, then joined to those before (Chan's rule):
    # squares of far places would leave no digits of a small difference.
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
    """Some queries of one head and all keys they see."""
    # Programs that run at the same time read the same keys; long ones start first.
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

    # Some row sees keys from `low` to `high`; all see whole blocks from `clear` to `clear_end`.
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
    # Times this, powers are weights; a row that sees nothing has none.
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


def stream(of: Streamed) -> tuple[dict[str, Float[Tensor, "n h"]], Float[Tensor, "n h marks"]]:
    """Every sum by name, `level` the log-sum-exp to base 2, and the weight on marked keys."""
    (queries, heads, size), device = of.query.shape, of.query.device
    out = torch.zeros(len(FIELDS), queries, heads, device=device)
    wide = max(16, triton.next_power_of_2(of.marks.shape[1])) if of.marks.shape[1] else 0
    marks = torch.zeros(len(of.marks), wide, device=device, dtype=torch.float16)
    marks[:, : of.marks.shape[1]] = of.marks
    marked = torch.zeros(queries, heads, wide, device=device)
    shape = shape_for(of.query, wide)
    tiles = triton.cdiv(of.longest, shape.rows)
    _stream[(tiles * heads * (len(of.query_starts) - 1),)](
        *(of.query, of.key, of.query_starts, of.key_starts, marks),
        *(of.query if each is None else each for each in (of.slopes, of.sink)),
        *(out, marked, tiles, heads, heads // of.key.shape[1], queries),
        *(of.scale * LOG2_E.value, *of.reach),
        *(*of.query.stride()[:2], *of.key.stride()[:2]),
        AHEAD=of.reach[1] > 0,
        ALIBI=of.slopes is not None,
        SINK=of.sink is not None,
        MARKS=wide,
        SPLIT=of.query.dtype == torch.float32,
        PRECISION="tf32x3" if of.query.dtype == torch.float32 else "tf32",
        ROWS=shape.rows,
        KEYS=shape.keys,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return dict(zip(FIELDS, out, strict=True)), marked[..., : of.marks.shape[1]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many queries and keys meet at once, and by how many warps."""

    rows: int
    keys: int
    warps: int
    stages: int


def shape_for(query: Float[Tensor, "n h d"], marks: int) -> Shape:
    """Found by trying on an H200, where 128 by 128 is 7% faster than 64 by 128.

    Smaller chips have no room for it, and float32 takes three products for one.
    """
    roomy = _room(query.device) > ROOM
    if query.dtype == torch.float32 or query.shape[2] > 128:
        return Shape(64, 32, 4, 2 if roomy else 1)
    return Shape(128, 128, 8, 3) if roomy and marks <= 16 else Shape(64, 64, 4, 2)


def _room(device: torch.device) -> int:
    """Bytes of a multiprocessor that its warps can share."""
    if device.type != "cuda":
        return 0
    known = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(known["max_shared_mem"])


@triton.jit
def _below(
    values_at,
    kept_at,
    limit_at,
    out_at,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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


def below(
    values: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    """How many values of the rows that count lie below a limit; the device need not wait."""
    values = values.contiguous()
    found = torch.zeros((), dtype=torch.int64, device=values.device)
    some = 4
    _below[(triton.cdiv(len(values), some),)](
        values, rows.to(torch.uint8), limit, found, *values.shape, ROWS=some, COLUMNS=1024
    )
    return found
