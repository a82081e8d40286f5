"""Triton kernels for one new token per sequence, where reading the weights takes all the time.

Importing this file needs triton: import it only where there is a CUDA device.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# Up to this many columns a program holds the whole of x in registers.
SHORT = 8192
# Measured on an H200: rows per iteration, and programs per multiprocessor. Of long rows as many as
# there are registers for: with more, the last ones would wait for the first.
ROWS, PROGRAMS, PROGRAMS_OF_LONG_ROWS = 1, 8, 3


@triton.jit
def _load(at, in_row, EVEN: tl.constexpr, KEEP: tl.constexpr):
    if EVEN:
        return tl.load(at, eviction_policy=KEEP).to(tl.float32)
    return tl.load(at, mask=in_row, other=0.0, eviction_policy=KEEP).to(tl.float32)


@triton.jit
def _add_bias_and_residual(
    y, bias_at, residual_at, row, rows, start, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):
    inside = row < rows
    if BIAS:
        y += tl.load(bias_at + start + row, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual_at + row, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _wait_for_the_kernel_before(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _rows_of(weight_at, row, rows, column, columns, in_row):
    at = weight_at + row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & in_row[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _short_row_product(
    x_at,
    weight_at,
    norm_at,
    bias_at,
    residual_at,
    y_at,
    rows,
    columns,
    eps,
    shift,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = residual + weight @ norm(x) + bias; gated: SiLU of one half of the rows times the other.

    A program normalizes x once and multiplies it with several rows, the next of which are on their
    way meanwhile.
    """
    column = tl.arange(0, COLUMNS)
    in_row = column < columns
    if EVEN:
        in_row = column < COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_at = weight_at + rows.to(tl.int64) * columns
    weight = _rows_of(weight_at, row, rows, column, columns, in_row)
    gate = weight
    if GATED:
        gate = _rows_of(gate_at, row, rows, column, columns, in_row)
    _wait_for_the_kernel_before(EARLY)
    x = _load(x_at + column, in_row, EVEN, "evict_last")
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
        x *= scale * (_load(norm_at + column, in_row, EVEN, "evict_last") + shift)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        next_row = row + tl.num_programs(0) * ROWS
        next_weight = _rows_of(weight_at, next_row, rows, column, columns, in_row)
        next_gate = next_weight
        if GATED:
            next_gate = _rows_of(gate_at, next_row, rows, column, columns, in_row)
        y = tl.sum(x[None, :] * weight.to(tl.float32), 1)
        if GATED:
            other = tl.sum(x[None, :] * gate.to(tl.float32), 1)
            y = _add_bias_and_residual(y, bias_at, residual_at, row, rows, 0, BIAS, False)
            other = _add_bias_and_residual(
                other, bias_at, residual_at, row, rows, rows, BIAS, False
            )
            y = y / (1.0 + tl.exp(-y)) * other
        else:
            y = _add_bias_and_residual(y, bias_at, residual_at, row, rows, 0, BIAS, RESIDUAL)
        tl.store(y_at + row, y.to(y_at.dtype.element_ty), mask=row < rows)
        weight = next_weight
        gate = next_gate


@triton.jit
def _long_row_product(
    x_at,
    weight_at,
    bias_at,
    residual_at,
    y_at,
    rows,
    columns,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = residual + weight @ x + bias, one program per row."""
    _wait_for_the_kernel_before(EARLY)
    row = tl.program_id(0) + tl.arange(0, 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    weight_row = weight_at + tl.program_id(0).to(tl.int64) * columns
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = _load(x_at + column, column < columns, EVEN, "evict_last")
        total += x * _load(weight_row + column, column < columns, EVEN, "evict_first")
    y = tl.sum(total, 0) + tl.zeros((1,), tl.float32)
    y = _add_bias_and_residual(y, bias_at, residual_at, row, rows, 0, BIAS, RESIDUAL)
    tl.store(y_at + row, y.to(y_at.dtype.element_ty))


def _early(x: Tensor) -> dict[str, bool]:
    """Launch a kernel before the one in front of it has ended, where the device can.

    It loads weights, then waits.
    """
    early = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": early}


def product(
    x: Float[Tensor, "1 c"],
    weight: Float[Tensor, "rows c"],
    *,
    norm: tuple[Float[Tensor, " c"], float, float] | None = None,
    bias: Float[Tensor, " rows"] | None = None,
    residual: Float[Tensor, "1 out"] | None = None,
    gated: bool = False,
) -> Float[Tensor, "1 out"]:
    """residual + weight @ norm(x) + bias; `norm` is an RMS norm's weight, its shift and its eps."""
    columns = x.shape[1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    y = x.new_empty(1, rows)
    ends = {"BIAS": bias is not None, "RESIDUAL": residual is not None} | _early(x)
    added = (x if bias is None else bias, x if residual is None else residual)
    if norm is None and not gated and columns > SHORT:
        _long_row_product[(rows,)](
            x,
            weight,
            *added,
            y,
            rows,
            columns,
            COLUMNS=1024,
            EVEN=columns % 1024 == 0,
            num_warps=4,
            num_stages=3,
            **ends,
        )
        return y
    scale, shift, eps = norm if norm is not None else (x, 0.0, 0.0)
    whole = triton.next_power_of_2(columns)
    long = whole > SHORT // 2
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = processors * (PROGRAMS_OF_LONG_ROWS if long else PROGRAMS)
    _short_row_product[(min(triton.cdiv(rows, ROWS), programs),)](
        x,
        weight,
        scale,
        *added,
        y,
        rows,
        columns,
        eps,
        shift,
        ROWS=ROWS,
        COLUMNS=whole,
        EVEN=columns == whole,
        NORM=norm is not None,
        GATED=gated,
        num_warps=8 if long else 4,
        **ends,
    )
    return y


@triton.jit
def _load_half(at, norm_at, norm_scale, row, channel, shift, stride, NORM: tl.constexpr):
    x = tl.load(at + row[:, None] * stride + channel[None, :]).to(tl.float32)
    if NORM:
        x *= norm_scale[:, None]
        x *= tl.load(norm_at + channel).to(tl.float32)[None, :] + shift
    return x


@triton.jit
def _keys_and_values(
    k_at,
    v_at,
    sequence_at,
    start,
    filled,
    new_slot,
    kv_heads,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Some rows of the cache: both halves of the keys, the values, and which rows are seen."""
    HALF: tl.constexpr = SIZE // 2
    slots = start + tl.arange(0, KEYS)
    channel = tl.arange(0, HALF)
    seen = (slots < filled) & (slots != new_slot)
    at = sequence_at + slots[:, None].to(tl.int64) * kv_heads * SIZE
    keys1 = tl.load(k_at + at + channel[None, :], mask=seen[:, None], other=0.0)
    keys2 = tl.load(k_at + at + channel[None, :] + HALF, mask=seen[:, None], other=0.0)
    values = tl.load(v_at + at + tl.arange(0, SIZE)[None, :], mask=seen[:, None], other=0.0)
    return keys1, keys2, values, seen


@triton.jit
def _fold(q1, q2, keys1, keys2, values, seen, scale, highest, total, output):
    """One more block of keys into the running maximum, sum and output of each query."""
    scores = (tl.dot(q1, tl.trans(keys1)) + tl.dot(q2, tl.trans(keys2))) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - new_highest[:, None])
    rescale = tl.exp(highest - new_highest)
    total = total * rescale + tl.sum(weights, 1)
    output = output * rescale[:, None] + tl.dot(weights.to(values.dtype), values)
    return new_highest, total, output


@triton.jit
def _attend(
    projected_at,
    k_at,
    v_at,
    positions_at,
    frequencies_at,
    query_norm_at,
    key_norm_at,
    y_at,
    capacity,
    heads,
    kv_heads,
    scale,
    stretch,
    eps,
    shift,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate query and key, store key and value, attend: one key head of one sequence.

    The cache and the positions were written before the kernel in front, which only projects: where
    few programs have to be quick (AHEAD), they load the first keys while it still runs.
    """
    group, sequence = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = SIZE // 2
    channel = tl.arange(0, HALF)
    if not AHEAD:
        _wait_for_the_kernel_before(EARLY)
    position = tl.load(positions_at + sequence)
    new_slot = (position % capacity).to(tl.int32)
    # The new key is counted apart, where its store may not have arrived yet.
    filled = tl.minimum(position, capacity).to(tl.int32)
    sequence_at = (sequence * capacity * kv_heads + group).to(tl.int64) * SIZE
    if ROTATE:
        angle = position.to(tl.float32) * tl.load(frequencies_at + channel)
        cos = (tl.cos(angle) * stretch)[None, :]
        sin = (tl.sin(angle) * stretch)[None, :]
    if AHEAD:
        keys1, keys2, values, seen = _keys_and_values(
            k_at, v_at, sequence_at, 0, filled, new_slot, kv_heads, SIZE, KEYS
        )
        _wait_for_the_kernel_before(EARLY)
    token_at = projected_at + sequence * (heads + 2 * kv_heads) * SIZE
    member = tl.arange(0, PADDED)
    query_row = group * SHARED + tl.minimum(member, SHARED - 1)
    key_row = heads + group + tl.zeros((1,), tl.int32)
    query_scale = tl.full((PADDED,), 1.0, tl.float32)
    key_scale = tl.full((1,), 1.0, tl.float32)
    if NORM:
        whole = tl.arange(0, SIZE)
        q = tl.load(token_at + query_row[:, None] * SIZE + whole[None, :]).to(tl.float32)
        k = tl.load(token_at + key_row[:, None] * SIZE + whole[None, :]).to(tl.float32)
        query_scale = 1.0 / tl.sqrt(tl.sum(q * q, 1) / SIZE + eps)
        key_scale = 1.0 / tl.sqrt(tl.sum(k * k, 1) / SIZE + eps)
    q1 = _load_half(token_at, query_norm_at, query_scale, query_row, channel, shift, SIZE, NORM)
    q2 = _load_half(
        token_at, query_norm_at, query_scale, query_row, channel + HALF, shift, SIZE, NORM
    )
    k1 = _load_half(token_at, key_norm_at, key_scale, key_row, channel, shift, SIZE, NORM)
    k2 = _load_half(token_at, key_norm_at, key_scale, key_row, channel + HALF, shift, SIZE, NORM)
    if ROTATE:
        q1, q2 = q1 * cos - q2 * sin, q2 * cos + q1 * sin
        k1, k2 = k1 * cos - k2 * sin, k2 * cos + k1 * sin
    cache_dtype = k_at.dtype.element_ty
    q1, q2, k1, k2 = q1.to(cache_dtype), q2.to(cache_dtype), k1.to(cache_dtype), k2.to(cache_dtype)
    channels = tl.arange(0, SIZE)
    value = tl.load(token_at + (heads + kv_heads + group) * SIZE + channels)
    new_at = ((sequence * capacity + new_slot) * kv_heads + group).to(tl.int64) * SIZE
    one = tl.zeros((1,), tl.int32)
    tl.store(k_at + new_at + one[:, None] + channel[None, :], k1)
    tl.store(k_at + new_at + one[:, None] + channel[None, :] + HALF, k2)
    tl.store(v_at + new_at + channels, value)
    highest = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1)
    highest = (highest + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)) * scale
    total = tl.full((PADDED,), 1.0, tl.float32)
    output = tl.zeros((PADDED, SIZE), tl.float32) + value.to(tl.float32)[None, :]
    if AHEAD:
        for start in range(0, filled, KEYS):
            next1, next2, next_values, next_seen = _keys_and_values(
                k_at, v_at, sequence_at, start + KEYS, filled, new_slot, kv_heads, SIZE, KEYS
            )
            highest, total, output = _fold(
                q1, q2, keys1, keys2, values, seen, scale, highest, total, output
            )
            keys1, keys2, values, seen = next1, next2, next_values, next_seen
    else:
        for start in range(0, filled, KEYS):
            keys1, keys2, values, seen = _keys_and_values(
                k_at, v_at, sequence_at, start, filled, new_slot, kv_heads, SIZE, KEYS
            )
            highest, total, output = _fold(
                q1, q2, keys1, keys2, values, seen, scale, highest, total, output
            )
    output_at = (sequence * heads + group * SHARED + member[:, None]) * SIZE + channels[None, :]
    tl.store(
        y_at + output_at,
        (output / total[:, None]).to(y_at.dtype.element_ty),
        mask=(member < SHARED)[:, None],
    )


def _attend_tile(programs: int) -> tuple[int, int, int, bool]:
    """Keys per iteration, warps, stages, and whether the first keys are loaded ahead.

    Measured on an H200: few programs have to be quick, many share what the device has.
    """
    if programs <= 32:
        return 256, 8, 1, True
    if programs < 512:
        return 128, 4, 3, False
    return (128, 4, 2, False) if programs < 1024 else (64, 2, 2, False)


def attend(
    projected: Float[Tensor, "b rows"],
    k: Float[Tensor, "b capacity g d"],
    v: Float[Tensor, "b capacity g d"],
    positions: Int[Tensor, " b"],
    *,
    heads: int,
    scale: float,
    frequencies: Float[Tensor, " half"] | None,
    stretch: float = 1.0,
    norms: tuple[Float[Tensor, " d"], Float[Tensor, " d"], float, float] | None = None,
) -> Float[Tensor, "b hd"]:
    """From the projection (query, key, value) to the output of the heads; the cache is updated.

    `norms` are the weights of the RMS norms of queries and keys, their shift and their eps.
    """
    batch, capacity, kv_heads, size = k.shape
    shared = heads // kv_heads
    query_norm, key_norm, shift, eps = norms if norms is not None else (k, k, 0.0, 0.0)
    y = projected.new_empty(batch, heads * size)
    keys, warps, stages, ahead = _attend_tile(batch * kv_heads)
    _attend[(kv_heads, batch)](
        projected,
        k,
        v,
        positions,
        k if frequencies is None else frequencies,
        query_norm,
        key_norm,
        y,
        capacity,
        heads,
        kv_heads,
        scale,
        stretch,
        eps,
        shift,
        SIZE=size,
        SHARED=shared,
        PADDED=max(16, triton.next_power_of_2(shared)),
        KEYS=keys if size <= 64 else keys // 2,
        ROTATE=frequencies is not None,
        NORM=norms is not None,
        AHEAD=ahead,
        num_warps=warps,
        num_stages=stages,
        **_early(k),
    )
    return y


@triton.jit
def _rms_norm(x_at, norm_at, y_at, columns, eps, shift, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    in_row = column < columns
    weight = tl.load(norm_at + column, mask=in_row, other=0.0).to(tl.float32) + shift
    _wait_for_the_kernel_before(EARLY)
    start = tl.program_id(0).to(tl.int64) * columns
    x = tl.load(x_at + start + column, mask=in_row, other=0.0).to(tl.float32)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)) * weight
    tl.store(y_at + start + column, y.to(y_at.dtype.element_ty), mask=in_row)


def rms_norm(
    x: Float[Tensor, "b c"], weight: Float[Tensor, " c"], shift: float, eps: float
) -> Float[Tensor, "b c"]:
    """An RMS norm of each row; `shift` is added to its weight."""
    y = torch.empty_like(x)
    columns = x.shape[1]
    whole = triton.next_power_of_2(columns)
    _rms_norm[(len(x),)](
        x,
        weight,
        y,
        columns,
        eps,
        shift,
        COLUMNS=whole,
        num_warps=4 if whole <= 4096 else 8,
        **_early(x),
    )
    return y


@triton.jit
def _silu_product(x_at, y_at, hidden, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    _wait_for_the_kernel_before(EARLY)
    gate = tl.load(x_at + row * 2 * hidden + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_at + row * 2 * hidden + hidden + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * x
    tl.store(y_at + row * hidden + column, y.to(y_at.dtype.element_ty), mask=inside)


def silu_product(x: Float[Tensor, "b hidden2"]) -> Float[Tensor, "b hidden"]:
    """SiLU of the first half of each row times the second."""
    hidden = x.shape[1] // 2
    y = x.new_empty(len(x), hidden)
    _silu_product[(len(x), triton.cdiv(hidden, 1024))](x, y, hidden, COLUMNS=1024, **_early(x))
    return y


@triton.jit
def _rotate_and_store(
    projected_at,
    k_at,
    v_at,
    positions_at,
    sequences_at,
    frequencies_at,
    query_norm_at,
    key_norm_at,
    capacity,
    heads,
    kv_heads,
    stretch,
    eps,
    shift,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate queries and keys in place, and store keys and values: some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    query, turned = head < heads, (head < heads + kv_heads)[:, None]
    inside = (head < heads + 2 * kv_heads)[:, None]
    position, sequence = tl.load(positions_at + token), tl.load(sequences_at + token)
    at = projected_at + (token * (heads + 2 * kv_heads) + head)[:, None] * SIZE + channel[None, :]
    _wait_for_the_kernel_before(EARLY)
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        query_a = tl.load(query_norm_at + channel).to(tl.float32)[None, :]
        query_b = tl.load(query_norm_at + HALF + channel).to(tl.float32)[None, :]
        key_a = tl.load(key_norm_at + channel).to(tl.float32)[None, :]
        key_b = tl.load(key_norm_at + HALF + channel).to(tl.float32)[None, :]
        a = tl.where(turned, a * scale * (tl.where(query[:, None], query_a, key_a) + shift), a)
        b = tl.where(turned, b * scale * (tl.where(query[:, None], query_b, key_b) + shift), b)
    if ROTATE:
        angle = position.to(tl.float32) * tl.load(frequencies_at + channel)
        cos, sin = (tl.cos(angle) * stretch)[None, :], (tl.sin(angle) * stretch)[None, :]
        a, b = tl.where(turned, a * cos - b * sin, a), tl.where(turned, b * cos + a * sin, b)
    kind = projected_at.dtype.element_ty
    tl.store(at, a.to(kind), mask=turned)
    tl.store(at + HALF, b.to(kind), mask=turned)
    slot = (sequence * capacity + position % capacity) * kv_heads
    as_key = turned & (head >= heads)[:, None]
    key_at = k_at + (slot + head - heads)[:, None] * SIZE + channel[None, :]
    tl.store(key_at, a.to(kind), mask=as_key)
    tl.store(key_at + HALF, b.to(kind), mask=as_key)
    as_value = inside & (head >= heads + kv_heads)[:, None]
    value_at = v_at + (slot + head - heads - kv_heads)[:, None] * SIZE + channel[None, :]
    tl.store(value_at, a.to(kind), mask=as_value)
    tl.store(value_at + HALF, b.to(kind), mask=as_value)


def rotate_and_store(
    projected: Float[Tensor, "n rows"],
    k: Float[Tensor, "b capacity g d"],
    v: Float[Tensor, "b capacity g d"],
    positions: Int[Tensor, " n"],
    sequences: Int[Tensor, " n"],
    *,
    heads: int,
    frequencies: Float[Tensor, " half"] | None,
    stretch: float = 1.0,
    norms: tuple[Float[Tensor, " d"], Float[Tensor, " d"], float, float] | None = None,
) -> None:
    """Rotate the queries and keys of many tokens in place; their keys and values go to the cache.

    `norms` are the weights of the RMS norms of queries and keys, their shift and their eps.
    """
    _, capacity, kv_heads, size = k.shape
    query_norm, key_norm, shift, eps = norms if norms is not None else (k, k, 0.0, 0.0)
    per_program = 16
    _rotate_and_store[(len(projected), triton.cdiv(heads + 2 * kv_heads, per_program))](
        projected,
        k,
        v,
        positions,
        sequences,
        k if frequencies is None else frequencies,
        query_norm,
        key_norm,
        capacity,
        heads,
        kv_heads,
        stretch,
        eps,
        shift,
        SIZE=size,
        HEADS=per_program,
        ROTATE=frequencies is not None,
        NORM=norms is not None,
        num_warps=4,
        **_early(k),
    )


@triton.jit
def _gather_rows(table_at, ids_at, y_at, columns, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    _wait_for_the_kernel_before(EARLY)
    row = tl.load(ids_at + tl.program_id(0))
    x = tl.load(table_at + row * columns + column, mask=column < columns)
    tl.store(y_at + tl.program_id(0).to(tl.int64) * columns + column, x, mask=column < columns)


def gather_rows(table: Float[Tensor, "v c"], ids: Int[Tensor, " b"]) -> Float[Tensor, "b c"]:
    """Some rows of a table; that of torch takes five times as long for a few."""
    columns = table.shape[1]
    y = table.new_empty(len(ids), columns)
    _gather_rows[(len(ids),)](
        table, ids, y, columns, COLUMNS=triton.next_power_of_2(columns), **_early(table)
    )
    return y
