"""Triton kernels that sum the attention weights of all heads in one pass over the keys.

As in flash attention (arXiv 2205.14135), each program takes a tile of queries of one head through
all blocks of keys: products on the tensor cores, statistics in float32, only sums over rows stored.
The weights of single pairs (`triton_pair_weights.py`) follow once the log-sum-exp is known.
Importing this file needs Triton: import it only where there is a CUDA device.
"""

from dataclasses import dataclass
from functools import partial

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
# Shared memory of 128 queries and two stages of 128 keys of 128 channels, with their marks; and
# with their values.
LARGE_TILE_BYTES, MIXED_TILE_BYTES = 110_000, 185_000
# Columns of the values before those of marks: ones, places, squares in two parts.
MOMENTS = 4
# Squares of places in a block are multiples of this, and a rest below it.
LOW_SQUARES = 64
# In the order in which the kernel stores them.
FIELDS = ("mass", "entropy", "squares", "largest", "distance", "variance", "level")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamInputs:
    """Packed queries and keys, the starts of sequences, and which keys a query may see."""

    query: Float[Tensor, "n h d"]
    key: Float[Tensor, "m g d"]
    query_starts: Int[Tensor, " b_plus_1"]
    key_starts: Int[Tensor, " b_plus_1"]
    key_position: Int[Tensor, " m"]
    longest: int
    reach: tuple[int, int]
    scale: float
    marks: Float[Tensor, "m marks"]
    value: Float[Tensor, "m g e"] | None
    slopes: Float[Tensor, " h"] | None
    sink: Float[Tensor, " h"] | None


@triton.jit(
    do_not_specialize=[
        "tiles", "heads", "share", "queries", "reach_before", "reach_after",
    ]
)  # fmt: skip
def _stream(
    query_at,
    key_at,
    value_at,
    query_starts_at,
    key_starts_at,
    columns_at,
    slopes_at,
    sink_at,
    value_scale_at,
    out_at,
    summed_at,
    mixed_at,
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
    value_stride,
    value_head,
    MIX: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIBI: tl.constexpr,
    SINK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OUT: tl.constexpr,
    OUT_PADDED: tl.constexpr,
):
    """A tile of queries of one head and all keys that they see; with `MIX` also their output."""
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
    held = row < rows
    shift = count - rows
    place = row + shift
    channel = tl.arange(0, PADDED)
    column = tl.arange(0, COLUMNS)
    at = query_at + head * query_head + (query_start + row).to(tl.int64)[:, None] * query_stride
    q = tl.load(at + channel[None, :], mask=held[:, None] & (channel < SIZE)[None, :], other=0.0)
    lane = tl.arange(0, KEYS)
    key_at += key_start.to(tl.int64) * key_stride + (head // share) * key_head
    # Beyond the last key of the sequence they give zeros.
    keys = tl.make_tensor_descriptor(key_at, [count, SIZE], [key_stride, 1], [KEYS, PADDED])
    columns_at += key_start.to(tl.int64) * COLUMNS
    columns = tl.make_tensor_descriptor(columns_at, [count, COLUMNS], [COLUMNS, 1], [KEYS, COLUMNS])
    out_channel = tl.arange(0, OUT_PADDED)
    value_at += key_start.to(tl.int64) * value_stride + (head // share) * value_head
    if MIX:
        values = tl.make_tensor_descriptor(
            value_at, [count, OUT], [value_stride, 1], [KEYS, OUT_PADDED]
        )
    slope = scale
    if ALIBI:
        slope = tl.load(slopes_at + head) * LOG2_E
    hidden = FAR / scale

    top = tl.full((ROWS,), LOW, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    inverse = tl.zeros((ROWS,), tl.float32)
    surprise = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    scatter = tl.zeros((ROWS,), tl.float32)
    ahead = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, COLUMNS), tl.float32)
    mixed = tl.zeros((ROWS, OUT_PADDED if MIX else 1), tl.float32)

    # Some row sees blocks `low` to `high`; every row sees all of `clear` to `clear_end`.
    first = tile * ROWS + shift
    last = tl.minimum(first + ROWS, count) - 1
    low = tl.maximum(first - reach_before, 0) // KEYS
    high = tl.cdiv(tl.maximum(tl.minimum(last + reach_after + 1, count), 0), KEYS)
    clear = tl.cdiv(tl.maximum(last - reach_before, 0), KEYS)
    clear_end = tl.maximum(tl.minimum(first + reach_after + 1, count), 0) // KEYS
    for step in range(low, high):
        start = step * KEYS
        key = start + lane
        scores = tl.dot(q, tl.trans(keys.load([start, 0])), input_precision=PRECISION)
        if ALIBI:
            scores -= slope / scale * tl.abs(key[None, :] - place[:, None]).to(tl.float32)
        if (step < clear) | (step >= clear_end):
            away = key[None, :] - place[:, None]
            seen = (key < count)[None, :] & (away >= -reach_before) & (away <= reach_after)
            scores = tl.where(seen, scores, hidden)
        best = tl.maximum(top, tl.max(scores, 1) * scale)
        below = scores * scale - best[:, None]
        # The surprise is summed without the lift, which would multiply the rounding of `total`.
        powers = tl.exp2(below + LIFT)
        fade = tl.exp2(top - best)
        surprise = fade * (surprise + (top - best) * total) + tl.sum(powers * below, 1)
        squares = squares * (fade * fade) + tl.sum(powers * powers, 1)
        if AHEAD:
            later = tl.maximum(key[None, :] - place[:, None], 0).to(tl.float32)
            ahead = ahead * fade + tl.sum(powers * later, 1)
        # Ones, places in the block, their squares in two parts, and marks, by one product.
        half = powers.to(tl.float16)
        spread = columns.load([start, 0])
        block = tl.dot(half, spread)
        if SPLIT:
            block = tl.dot((powers - half.to(tl.float32)).to(tl.float16), spread, acc=block)
        if MIX:
            mixed = tl.dot(half, values.load([start, 0]), acc=mixed * fade[:, None])
        summed = summed * fade[:, None] + block
        here = tl.sum(tl.where((column == 0)[None, :], block, 0.0), 1)
        within = tl.sum(tl.where((column == 1)[None, :], block, 0.0), 1)
        second = tl.sum(tl.where(((column == 2) | (column == 3))[None, :], block, 0.0), 1)
        # Mean and variance of the block, then merged with those before (Chan's rule): squares of
        # distant positions would cancel.
        middle = within / tl.maximum(here, TINY)
        offset = (start + KEYS // 2 - place).to(tl.float32)
        apart = offset + middle - moment * inverse
        old = total * fade
        total = old + here
        inverse = 1.0 / tl.maximum(total, TINY)
        scatter = scatter * fade + tl.maximum(second - within * middle, 0.0)
        scatter += apart * apart * old * (here * inverse)
        moment = moment * fade + (here * offset + within)
        top = best

    some = tl.maximum(total, TINY)
    level = tl.log2(some) + (top - LIFT)
    if SINK:
        sink = tl.load(sink_at + head) * LOG2_E
        larger = tl.maximum(level, sink)
        level = larger + tl.log2(tl.exp2(level - larger) + tl.exp2(sink - larger))
    # Powers times this are weights; a row without visible keys has none.
    factor = tl.where(total > 0, tl.exp2(top - LIFT - level), 0.0)
    mass = factor * total
    entropy = tl.where(total > 0, (level - top) * mass - factor * surprise, 0.0) * LN_2
    distance = mass * ((2 * ahead - moment) / some)
    cell = (query_start + row).to(tl.int64) * heads + head
    field = tl.cast(queries, tl.int64) * heads
    tl.store(out_at + cell, mass, mask=held)
    tl.store(out_at + field + cell, entropy, mask=held)
    tl.store(out_at + 2 * field + cell, factor * squares * factor, mask=held)
    tl.store(out_at + 3 * field + cell, tl.exp2(top - level) * (total > 0), mask=held)
    tl.store(out_at + 4 * field + cell, distance, mask=held)
    tl.store(out_at + 5 * field + cell, scatter / some, mask=held)
    tl.store(out_at + 6 * field + cell, level, mask=held)
    at = summed_at + cell[:, None] * COLUMNS + column[None, :]
    tl.store(at, summed * factor[:, None], mask=held[:, None])
    if MIX:
        at = mixed_at + cell[:, None] * OUT + out_channel[None, :]
        mixed = mixed * (factor / tl.load(value_scale_at))[:, None]
        mixed = mixed.to(mixed_at.dtype.element_ty)
        tl.store(at, mixed, mask=held[:, None] & (out_channel < OUT)[None, :])


@dataclass(frozen=True, slots=True, eq=False)
class StreamedSums:
    """Sums by name (`level` is the log-sum-exp to base 2), weights on marked keys, and outputs."""

    fields: dict[str, Float[Tensor, "n h"]]
    marks: Float[Tensor, "n h marks"]
    output: Float[Tensor, "n h e"] | None


def stream(inputs: StreamInputs) -> StreamedSums:
    """Every sum, and the output where the values are given."""
    (queries, heads, size), device = inputs.query.shape, inputs.query.device
    marks, value = inputs.marks.shape[1], inputs.value
    columns = max(16, triton.next_power_of_2(MOMENTS + marks))
    shape = choose_tile_shape(inputs.query, columns, mixes=value is not None)
    wide = 16 if value is None else value.shape[2]
    out = torch.zeros(len(FIELDS), queries, heads, device=device)
    summed = torch.zeros(queries, heads, columns, device=device)
    output = None if value is None else value.new_zeros(queries, heads, wide)
    tiles = triton.cdiv(inputs.longest, shape.rows)
    # Descriptors of the keys of a sequence are made by each program, in memory of its own.
    triton.set_allocator(partial(_allocate, device))
    key = align_rows(inputs.key)
    scaled, scale = (key, out) if value is None else _scale_to_half(value)
    _stream[(tiles * heads * (len(inputs.query_starts) - 1),)](
        *(inputs.query, key, scaled, inputs.query_starts, inputs.key_starts),
        _value_columns(inputs, columns, shape.keys),
        *(inputs.query if tensor is None else tensor for tensor in (inputs.slopes, inputs.sink)),
        *(scale, out, summed, out if output is None else output),
        *(tiles, heads, heads // inputs.key.shape[1], queries),
        *(inputs.scale * LOG2_E.value, *inputs.reach),
        *(*inputs.query.stride()[:2], *key.stride()[:2], *scaled.stride()[:2]),
        MIX=value is not None,
        AHEAD=inputs.reach[1] > 0,
        ALIBI=inputs.slopes is not None,
        SINK=inputs.sink is not None,
        COLUMNS=columns,
        SPLIT=inputs.query.dtype == torch.float32,
        PRECISION="tf32x3" if inputs.query.dtype == torch.float32 else "tf32",
        ROWS=shape.rows,
        KEYS=shape.keys,
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        OUT=wide,
        OUT_PADDED=max(16, triton.next_power_of_2(wide)),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    fields = dict(zip(FIELDS, out, strict=True))
    return StreamedSums(fields, summed[..., MOMENTS : MOMENTS + marks], output)


def _allocate(device: torch.device, size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001
    return torch.empty(size, device=device, dtype=torch.int8)


def align_rows(x: Float[Tensor, "m g d"]) -> Float[Tensor, "m g d"]:
    """The same numbers, each head 16 bytes or a multiple of them from the next, as copies need."""
    apart = [stride * x.element_size() % 16 == 0 for stride in x.stride()[:2]]
    if x.stride(-1) == 1 and all(apart) and x.data_ptr() % 16 == 0:
        return x
    size = x.shape[2]
    padded = x.new_zeros(*x.shape[:2], size + -size % (16 // x.element_size()))
    padded[..., :size] = x
    return padded[..., :size]


def _scale_to_half(value: Float[Tensor, "m g e"]) -> tuple[Float[Tensor, "m g e"], Tensor]:
    """Values in float16, multiplied by a power of 2 that lets all of bfloat16 fit, and that power.

    Weights are in float16 for the sums, and a product needs the same dtype on both sides.
    """
    if value.dtype == torch.float16 or not value.numel():
        return align_rows(value), torch.ones(1, device=value.device)
    largest = value.abs().amax().float().clamp(min=1e-30)
    scale = torch.exp2(torch.floor(15 - largest.log2())).clamp(max=2.0**60)
    return align_rows((value * scale).half()), scale.reshape(1)


def _value_columns(inputs: StreamInputs, columns: int, block: int) -> Float[Tensor, "m columns"]:
    """What the weights are multiplied with: ones, places in a block of keys, squares, marks.

    All are exact in float16: of squares, which have more digits, the low bits are a column of
    their own.
    """
    keys, device = len(inputs.marks), inputs.query.device
    values = torch.zeros(keys, columns, device=device, dtype=torch.float16)
    if keys:
        place = inputs.key_position % block - block // 2
        square = place.square()
        low = square % LOW_SQUARES
        moments = (torch.ones_like(place), place, square - low, low)
        values[:, :MOMENTS] = torch.stack(moments, dim=1)
        values[:, MOMENTS : MOMENTS + inputs.marks.shape[1]] = inputs.marks
    return values


@dataclass(frozen=True, slots=True)
class TileShape:
    """The queries and keys per tile, and the warps and stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


def choose_tile_shape(
    query: Float[Tensor, "n h d"], columns: int, *, mixes: bool = False
) -> TileShape:
    """Tuned on an H200 with heads of 128; float32 takes three products instead of one.

    Milliseconds at 131,072 tokens, 8 heads and two stages: 128 by 128 49.9, with three stages 59.8,
    128 by 64 59.6, 64 by 128 57.7; with the values 82.0, 128 by 64 with three stages 90.7.
    """
    shared = 0
    if query.device.type == "cuda":
        driver = triton.runtime.driver.active
        properties = driver.utils.get_device_properties(query.device.index)
        shared = int(properties["max_shared_mem"])
    if query.dtype == torch.float32 or query.shape[2] > 128:
        return TileShape(64, 32, 4, 2 if shared > LARGE_TILE_BYTES else 1)
    if mixes and shared <= MIXED_TILE_BYTES:
        return TileShape(64, 32, 4, 2)
    large = shared > LARGE_TILE_BYTES and columns <= 16
    return TileShape(128, 128, 8, 2) if large or mixes else TileShape(64, 64, 4, 2)


@triton.jit(do_not_specialize=["rows", "width"])
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
