"""Triton kernels for attention within a window over packed sequences, with rotary inside.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program reads a block of packed tokens, of whatever sequences, and the keys between the first and
the last that any of them sees: there is no padding, no table of blocks, and nothing to compile for
another batch. Heads and blocks share one axis of the grid, as the other axes end at 65,535.

Scores are the products of the first and of the second halves of the channels, which are what rotary
positions turn against each other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.devices import triton_precision
from manyheads.parts.positions.triton_rotary import turn_heads

# Wider than any text. Positions plus this stay within 32 bits.
UNLIMITED = 2**29
# Compiled once for all of them.
OF_THE_BATCH = ("tokens", "before", "after")

# Tokens of a block, tokens that stream past it, warps, stages; by channels of a head.
Tile = tuple[int, int, int, int]
FORWARD: dict[int, Tile] = {32: (64, 64, 4, 2), 64: (64, 64, 4, 3), 128: (64, 32, 4, 2)}
WIDE: dict[int, Tile] = {32: (128, 64, 8, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3)}
QUERIES: dict[int, Tile] = {32: (64, 32, 4, 3), 64: (64, 32, 4, 3), 128: (64, 32, 4, 2)}
KEYS: dict[int, Tile] = {32: (64, 32, 4, 3), 64: (64, 32, 4, 3), 128: (64, 32, 4, 2)}
# In windows of so many keys most of them are seen by a whole block of queries.
WIDE_FROM = 512


@triton.jit
def _reach(row, tokens, owner_at, offset_at, before, after):
    """The first token that each row reaches, and the one behind the last."""
    inside = row < tokens
    owner = tl.load(owner_at + row, mask=inside, other=0)
    start = tl.load(offset_at + owner, mask=inside, other=0)
    end = tl.load(offset_at + owner + 1, mask=inside, other=0)
    low = tl.where(inside, tl.maximum(start, row - before), 2147483647)
    high = tl.where(inside, tl.minimum(end, row + after + 1), 0)
    return low, high


@triton.jit
def _halves(
    x_at, first, tokens, stride, COUNT: tl.constexpr, HALF: tl.constexpr, BOUNDED: tl.constexpr
):
    """Both halves of the channels of `COUNT` tokens from `first` on."""
    row = tl.arange(0, COUNT)[:, None]
    at = x_at + tl.cast(first, tl.int64) * stride + row * stride + tl.arange(0, HALF)[None, :]
    if BOUNDED:
        inside = first + row < tokens
        return tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    return tl.load(at), tl.load(at + HALF)


@triton.jit
def _rows(
    x_at, first, tokens, stride, COUNT: tl.constexpr, SIZE: tl.constexpr, BOUNDED: tl.constexpr
):
    """All channels of `COUNT` tokens from `first` on."""
    row = tl.arange(0, COUNT)[:, None]
    at = x_at + tl.cast(first, tl.int64) * stride + row * stride + tl.arange(0, SIZE)[None, :]
    if BOUNDED:
        return tl.load(at, mask=first + row < tokens, other=0.0)
    return tl.load(at)


@triton.jit
def _turned(left, right, cos_at, sin_at, first, tokens, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Both halves rotated, in float32."""
    row = tl.arange(0, COUNT)[:, None]
    angle = tl.cast(first, tl.int64) * HALF + row * HALF + tl.arange(0, HALF)[None, :]
    inside = first + row < tokens
    cos = tl.load(cos_at + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_at + angle, mask=inside, other=0.0).to(tl.float32)
    left, right = left.to(tl.float32), right.to(tl.float32)
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _turned_back(
    left, right, cos_at, sin_at, first, tokens, COUNT: tl.constexpr, HALF: tl.constexpr
):
    """Both halves rotated the other way."""
    # The gradient of a rotation by an angle is the rotation by minus that angle.
    right, left = _turned(right, left, cos_at, sin_at, first, tokens, COUNT, HALF)
    return left, right


@triton.jit
def _store_halves(at, left, right, first, tokens, stride, COUNT: tl.constexpr, HALF: tl.constexpr):
    row = tl.arange(0, COUNT)[:, None]
    at += tl.cast(first, tl.int64) * stride + row * stride + tl.arange(0, HALF)[None, :]
    kind = at.dtype.element_ty
    tl.store(at, left.to(kind), mask=first + row < tokens)
    tl.store(at + HALF, right.to(kind), mask=first + row < tokens)


@triton.jit
def _mix(
    q_left,
    q_right,
    k_at,
    v_at,
    start,
    tokens,
    k_row,
    v_row,
    low,
    high,
    largest,
    total,
    mixed,
    scale,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax and its mean of values, with `STEP` more keys."""
    k_left, k_right = _halves(k_at, start, tokens, k_row, STEP, HALF, MASKED)
    score = tl.dot(q_left, tl.trans(k_left), input_precision=PRECISION)
    score = tl.dot(q_right, tl.trans(k_right), score, input_precision=PRECISION)
    # In powers of two, which are what the device computes.
    score = score * (scale * 1.4426950408889634)
    if MASKED:
        column = start + tl.arange(0, STEP)[None, :]
        sees = (column >= low[:, None]) & (column < high[:, None])
        score = tl.where(sees, score, float("-inf"))
    now = tl.maximum(largest, tl.max(score, 1))
    top = now
    if MASKED:
        # A row without visible keys so far subtracts 0: infinity minus infinity is NaN.
        top = tl.where(now == float("-inf"), 0.0, now)
    weight = tl.exp2(score - top[:, None])
    shrink = tl.exp2(largest - top)
    total = total * shrink + tl.sum(weight, 1)
    value = _rows(v_at, start, tokens, v_row, STEP, 2 * HALF, MASKED)
    mixed = tl.dot(
        weight.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION
    )
    return now, total, mixed


@triton.jit(do_not_specialize=OF_THE_BATCH)
def _forward(
    q_at,
    k_at,
    v_at,
    cos_at,
    sin_at,
    out_at,
    lse_at,
    owner_at,
    offset_at,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    before,
    after,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    head, first = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * BLOCK
    row = first + tl.arange(0, BLOCK)
    low, high = _reach(row, tokens, owner_at, offset_at, before, after)
    k_at += head // SHARED * k_head
    v_at += head // SHARED * v_head
    q_left, q_right = _halves(q_at + head * q_head, first, tokens, q_row, BLOCK, HALF, True)
    if TURN:
        kind = q_at.dtype.element_ty
        q_left, q_right = _turned(q_left, q_right, cos_at, sin_at, first, tokens, BLOCK, HALF)
        q_left, q_right = q_left.to(kind), q_right.to(kind)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, 2 * HALF], tl.float32)
    begin, end = tl.min(low, 0), tl.max(high, 0)
    clear, clear_end = end, end
    if WIDE:
        # Most keys are seen by all queries of the block, and need no mask.
        inside = row < tokens
        last_low = tl.max(tl.where(inside, low, 0), 0)
        first_high = tl.min(tl.where(inside, high, 2147483647), 0)
        clear = tl.minimum(begin + tl.cdiv(last_low - begin, STEP) * STEP, end)
        clear_end = clear + tl.maximum(first_high - clear, 0) // STEP * STEP
    for start in range(begin, clear, STEP):
        largest, total, mixed = _mix(
            q_left,
            q_right,
            k_at,
            v_at,
            start,
            tokens,
            k_row,
            v_row,
            low,
            high,
            largest,
            total,
            mixed,
            scale,
            HALF,
            PRECISION,
            STEP,
            True,
        )
    if WIDE:
        for start in range(clear, clear_end, STEP):
            largest, total, mixed = _mix(
                q_left,
                q_right,
                k_at,
                v_at,
                start,
                tokens,
                k_row,
                v_row,
                low,
                high,
                largest,
                total,
                mixed,
                scale,
                HALF,
                PRECISION,
                STEP,
                False,
            )
        for start in range(clear_end, end, STEP):
            largest, total, mixed = _mix(
                q_left,
                q_right,
                k_at,
                v_at,
                start,
                tokens,
                k_row,
                v_row,
                low,
                high,
                largest,
                total,
                mixed,
                scale,
                HALF,
                PRECISION,
                STEP,
                True,
            )
    # Rows behind the last token divide by one.
    total = tl.where(total > 0, total, 1.0)
    mixed = mixed / total[:, None]
    at = row.to(tl.int64)[:, None] * HEADS + head
    channel = tl.arange(0, 2 * HALF)[None, :]
    kind = out_at.dtype.element_ty
    tl.store(out_at + at * (2 * HALF) + channel, mixed.to(kind), mask=(row < tokens)[:, None])
    lse = (largest + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_at + tl.cast(head, tl.int64) * tokens + row, lse, mask=row < tokens)


@triton.jit(do_not_specialize=OF_THE_BATCH)
def _query_gradient(
    q_at,
    k_at,
    v_at,
    cos_at,
    sin_at,
    out_at,
    push_at,
    lse_at,
    delta_at,
    joined_at,
    owner_at,
    offset_at,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    joined_row,
    before,
    after,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    head, first = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * BLOCK
    row = first + tl.arange(0, BLOCK)
    inside = row < tokens
    low, high = _reach(row, tokens, owner_at, offset_at, before, after)
    k_at += head // SHARED * k_head
    v_at += head // SHARED * v_head
    out_row = HEADS * 2 * HALF
    q_left, q_right = _halves(q_at + head * q_head, first, tokens, q_row, BLOCK, HALF, True)
    out = _rows(out_at + head * 2 * HALF, first, tokens, out_row, BLOCK, 2 * HALF, True)
    push = _rows(push_at + head * 2 * HALF, first, tokens, out_row, BLOCK, 2 * HALF, True)
    place = tl.cast(head, tl.int64) * tokens + row
    lse = tl.load(lse_at + place, mask=inside, other=0.0) * 1.4426950408889634
    delta = tl.sum(out.to(tl.float32) * push.to(tl.float32), 1)
    tl.store(delta_at + place, delta, mask=inside)
    left = tl.zeros([BLOCK, HALF], tl.float32)
    right = tl.zeros([BLOCK, HALF], tl.float32)
    for start in range(tl.min(low, 0), tl.max(high, 0), STEP):
        column = start + tl.arange(0, STEP)[None, :]
        k_left, k_right = _halves(k_at, start, tokens, k_row, STEP, HALF, True)
        value = _rows(v_at, start, tokens, v_row, STEP, 2 * HALF, True)
        score = tl.dot(q_left, tl.trans(k_left), input_precision=PRECISION)
        score = tl.dot(q_right, tl.trans(k_right), score, input_precision=PRECISION)
        sees = (column >= low[:, None]) & (column < high[:, None])
        weight = tl.exp2(score * (scale * 1.4426950408889634) - lse[:, None])
        weight = tl.where(sees, weight, 0.0)
        d_weight = tl.dot(push, tl.trans(value), input_precision=PRECISION)
        d_score = (weight * (d_weight - delta[:, None])).to(k_left.dtype)
        left = tl.dot(d_score, k_left, left, input_precision=PRECISION)
        right = tl.dot(d_score, k_right, right, input_precision=PRECISION)
    left, right = left * scale, right * scale
    if TURN:
        left, right = _turned_back(left, right, cos_at, sin_at, first, tokens, BLOCK, HALF)
    _store_halves(joined_at + head * 2 * HALF, left, right, first, tokens, joined_row, BLOCK, HALF)


@triton.jit(do_not_specialize=OF_THE_BATCH)
def _key_gradient(
    q_at,
    k_at,
    v_at,
    cos_at,
    sin_at,
    push_at,
    lse_at,
    delta_at,
    joined_at,
    owner_at,
    offset_at,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    joined_row,
    before,
    after,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    key_heads: tl.constexpr = HEADS // SHARED
    key_head, first = tl.program_id(0) % key_heads, tl.program_id(0) // key_heads * BLOCK
    row = first + tl.arange(0, BLOCK)
    # A key is seen by the queries that would see as far in the other direction.
    low, high = _reach(row, tokens, owner_at, offset_at, after, before)
    out_row = HEADS * 2 * HALF
    k_left, k_right = _halves(k_at + key_head * k_head, first, tokens, k_row, BLOCK, HALF, True)
    value = _rows(v_at + key_head * v_head, first, tokens, v_row, BLOCK, 2 * HALF, True)
    left = tl.zeros([BLOCK, HALF], tl.float32)
    right = tl.zeros([BLOCK, HALF], tl.float32)
    d_value = tl.zeros([BLOCK, 2 * HALF], tl.float32)
    begin, end = tl.min(low, 0), tl.max(high, 0)
    for head in range(key_head * SHARED, key_head * SHARED + SHARED):
        place = tl.cast(head, tl.int64) * tokens
        for start in range(begin, end, STEP):
            query = start + tl.arange(0, STEP)
            inside = query < tokens
            q_left, q_right = _halves(q_at + head * q_head, start, tokens, q_row, STEP, HALF, True)
            push = _rows(push_at + head * 2 * HALF, start, tokens, out_row, STEP, 2 * HALF, True)
            lse = tl.load(lse_at + place + query, mask=inside, other=0.0) * 1.4426950408889634
            delta = tl.load(delta_at + place + query, mask=inside, other=0.0)
            score = tl.dot(k_left, tl.trans(q_left), input_precision=PRECISION)
            score = tl.dot(k_right, tl.trans(q_right), score, input_precision=PRECISION)
            sees = (query[None, :] >= low[:, None]) & (query[None, :] < high[:, None])
            weight = tl.exp2(score * (scale * 1.4426950408889634) - lse[None, :])
            weight = tl.where(sees, weight, 0.0)
            d_value = tl.dot(weight.to(push.dtype), push, d_value, input_precision=PRECISION)
            d_weight = tl.dot(value, tl.trans(push), input_precision=PRECISION)
            d_score = (weight * (d_weight - delta[None, :])).to(q_left.dtype)
            left = tl.dot(d_score, q_left, left, input_precision=PRECISION)
            right = tl.dot(d_score, q_right, right, input_precision=PRECISION)
    left, right = left * scale, right * scale
    if TURN:
        left, right = _turned_back(left, right, cos_at, sin_at, first, tokens, BLOCK, HALF)
    joined_at += (HEADS + key_head) * 2 * HALF
    _store_halves(joined_at, left, right, first, tokens, joined_row, BLOCK, HALF)
    # Values have no positions.
    at = joined_at + key_heads * 2 * HALF + row.to(tl.int64)[:, None] * joined_row
    at += tl.arange(0, 2 * HALF)[None, :]
    tl.store(at, d_value.to(at.dtype.element_ty), mask=(row < tokens)[:, None])


@torch.library.custom_op("manyheads::window", mutates_args=())
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    owner: Tensor,
    offsets: Tensor,
    before: int,
    after: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (n, h, d), and log-sum-exp (h, n), of self-attention within a window.

    Queries are (n, h, d), keys and values (n, g, d), cosines and sines (n, 1, d / 2), if queries
    and keys are to be rotated. `owner` is the sequence of each token and `offsets` where sequences
    begin. torch parses these annotations and does not know those with shapes.
    """
    q, k, v = (_with_adjacent_channels(x) for x in (q, k, v))
    tokens, heads, size = q.shape
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    wide = before + after >= WIDE_FROM
    tile = (WIDE if wide else FORWARD)[size]
    # Triton starts kernels on the current device.
    with torch.cuda.device_of(q):
        if cos is not None and sin is not None:
            cos, sin = cos.contiguous(), sin.contiguous()
            # Once, because as many programs read a key as there are blocks of queries around it.
            k = turn_heads(k, cos, sin)
            # A few products hide the rotation of queries; many are faster with queries as they lie.
            q, cos, sin = (turn_heads(q, cos, sin), None, None) if wide else (q, cos, sin)
        _forward[(heads * triton.cdiv(tokens, tile[0]),)](
            *(q, k, v, *_pointers(q, cos, sin), out, lse, owner, offsets, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], before, after, scale),
            WIDE=wide,
            **_options(q, k, cos, tile),
        )
    return out, lse


@window_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    cos: Tensor | None,  # noqa: ARG001
    sin: Tensor | None,  # noqa: ARG001
    owner: Tensor,  # noqa: ARG001
    offsets: Tensor,  # noqa: ARG001
    before: int,  # noqa: ARG001
    after: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


@torch.library.custom_op("manyheads::window_backward", mutates_args=())
def _window_backward(
    push: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    owner: Tensor,
    offsets: Tensor,
    before: int,
    after: int,
    scale: float,
) -> Tensor:
    """The gradients of queries, keys and values as one tensor (n, h + 2 g, d)."""
    q, k, v = (_with_adjacent_channels(x) for x in (q, k, v))
    push = push.contiguous()
    tokens, heads, size = q.shape
    joined = torch.empty((tokens, heads + 2 * k.shape[1], size), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return joined
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        if cos is not None and sin is not None:
            cos, sin = cos.contiguous(), sin.contiguous()
            q, k = turn_heads(q, cos, sin), turn_heads(k, cos, sin)
        tail = (push, lse, delta, joined, owner, offsets, tokens, *q.stride()[:2], *k.stride()[:2])
        tail = (*tail, *v.stride()[:2], joined.stride(0), before, after, scale)
        angles = _pointers(q, cos, sin)
        _query_gradient[(heads * triton.cdiv(tokens, QUERIES[size][0]),)](
            *(q, k, v, *angles, out, *tail), **_options(q, k, cos, QUERIES[size])
        )
        _key_gradient[(k.shape[1] * triton.cdiv(tokens, KEYS[size][0]),)](
            *(q, k, v, *angles, *tail), **_options(q, k, cos, KEYS[size])
        )
    return joined


@_window_backward.register_fake
def _(
    push: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    *rest: Any,  # noqa: ARG001
) -> Tensor:
    shape = (q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2])
    return torch.empty(shape, dtype=q.dtype, device=q.device)


def _with_adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _pointers(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    # Without rotation the kernels read neither.
    return (q, q) if cos is None or sin is None else (cos, sin)


def _options(q: Tensor, k: Tensor, cos: Tensor | None, tile: Tile) -> dict[str, Any]:
    block, step, warps, stages = tile
    return {
        "HEADS": q.shape[1],
        "SHARED": q.shape[1] // k.shape[1],
        "HALF": q.shape[2] // 2,
        "TURN": cos is not None,
        "PRECISION": triton_precision(q),
        "BLOCK": block,
        "STEP": step,
        "num_warps": warps,
        "num_stages": stages,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cos, sin, owner, offsets, ctx.before, ctx.after, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cos, sin, owner, offsets)


def _back(ctx: Any, push: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, *rest = ctx.saved_tensors
    joined = _window_backward(push, q, k, *rest, ctx.before, ctx.after, ctx.scale)
    # If all three are parts of one projection, a compiler removes this and what would join them.
    parts = joined.split_with_sizes([q.shape[1], k.shape[1], k.shape[1]], 1)
    return (*parts, *[None] * 7)


window_attention.register_autograd(_back, setup_context=_keep)
