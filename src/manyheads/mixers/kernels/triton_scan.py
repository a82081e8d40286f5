"""Triton kernels of Mamba's scan over channels.

Importing this file needs triton: import it inside a function that runs on CUDA.

    h_t = exp(dt_t rate) h_{t-1} + dt_t x_t b_t        y_t = sum_s h_t[s] c_t[s]

A program keeps the states of a block of channels in registers and visits the tokens of one chunk:
once from zero for what the chunk adds, and, when the chunks of each sequence are joined, once from
the true state for the outputs. A chunk decays a state by exp(rate * sum of its dt). Only the states
before each chunk are kept for gradients, those within a chunk are computed again. Sums over
programs are made by torch, in the same order each time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout

# Tokens per chunk. Longer chunks need fewer states, and compute more of them again for gradients.
CHUNK = 32
# Numbers in the states of one program, and its warps. Blocks have fewer channels than a program has
# threads, so that values of a token are loaded straight to where they are used.
NUMBERS = 1024
WARPS = 4


@triton.jit
def _load(at, token, index, size):
    """The values of a token, zero beyond their number."""
    return tl.load(at + token * size + index, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def _store(at, value, token, index, size):
    at = at + token * size + index
    tl.store(at, value.to(at.dtype.element_ty), mask=index < size)


@triton.jit
def _load_matrix(at, number, channel, state, channels, states):
    """The states of some channels from the matrix of this number."""
    here = (channel < channels)[:, None] & (state < states)[None, :]
    at = at + (number * channels + channel)[:, None] * states + state[None, :]
    return tl.load(at, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _store_matrix(at, value, number, channel, state, channels, states):
    here = (channel < channels)[:, None] & (state < states)[None, :]
    at = at + (number * channels + channel)[:, None] * states + state[None, :]
    tl.store(at, value, mask=here)


@triton.jit
def _bounds(starts_at, ends_at, chunk, CHUNK: tl.constexpr):
    """The first token of a chunk, and the one after its last."""
    first = tl.load(starts_at + chunk)
    return first, tl.minimum(first + CHUNK, tl.load(ends_at + chunk))


@triton.jit
def _step(now, token, x_at, dt_at, b_at, rate, channel, state, channels, states):
    """The state after a token, given the one before it."""
    step = _load(dt_at, token, channel, channels)
    value = _load(x_at, token, channel, channels)
    b = _load(b_at, token, state, states)
    return tl.exp(step[:, None] * rate) * now + (step * value)[:, None] * b[None, :]


@triton.jit
def _walk(now, first, end, x_at, dt_at, b_at, rate, channel, state, channels, states):
    """The state before token `end`, given the one before token `first`."""
    for token in range(first, end):
        now = _step(now, token, x_at, dt_at, b_at, rate, channel, state, channels, states)
    return now


@triton.jit
def _add(
    x_at,
    dt_at,
    rate_at,
    b_at,
    starts_at,
    ends_at,
    added_at,
    passed_at,
    channels,
    states,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """What each chunk adds to the state, and the sum of its dt."""
    chunk = tl.program_id(0).to(tl.int64)
    channel, state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    first, end = _bounds(starts_at, ends_at, chunk, CHUNK)
    rate = _load_matrix(rate_at, 0, channel, state, channels, states)
    now = tl.zeros([BLOCK, S], dtype=tl.float32)
    passed = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(first, end):
        now = _step(now, token, x_at, dt_at, b_at, rate, channel, state, channels, states)
        passed += _load(dt_at, token, channel, channels)
    _store_matrix(added_at, now, chunk, channel, state, channels, states)
    tl.store(passed_at + chunk * channels + channel, passed, mask=channel < channels)


@triton.jit
def _join(
    added_at,
    passed_at,
    rate_at,
    given_at,
    offsets_at,
    met_at,
    last_at,
    channels,
    states,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """What each chunk of a sequence meets, from the first on or from the last, and what is left."""
    sequence = tl.program_id(0).to(tl.int64)
    channel, state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    rate = _load_matrix(rate_at, 0, channel, state, channels, states)
    now = _load_matrix(given_at, sequence, channel, state, channels, states)
    first = tl.load(offsets_at + sequence).to(tl.int64)
    end = tl.load(offsets_at + sequence + 1).to(tl.int64)
    for index in range(end - first):
        chunk = first + index
        if REVERSE:
            chunk = end - 1 - index
        added = _load_matrix(added_at, chunk, channel, state, channels, states)
        passed = tl.load(passed_at + chunk * channels + channel, mask=channel < channels, other=0.0)
        _store_matrix(met_at, now, chunk, channel, state, channels, states)
        now = tl.exp(passed[:, None] * rate) * now + added
    _store_matrix(last_at, now, sequence, channel, state, channels, states)


@triton.jit
def _read(
    x_at,
    dt_at,
    rate_at,
    b_at,
    c_at,
    before_at,
    starts_at,
    ends_at,
    y_at,
    channels,
    states,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """The outputs of the tokens of each chunk, given the state before it."""
    chunk = tl.program_id(0).to(tl.int64)
    channel, state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    first, end = _bounds(starts_at, ends_at, chunk, CHUNK)
    rate = _load_matrix(rate_at, 0, channel, state, channels, states)
    now = _load_matrix(before_at, chunk, channel, state, channels, states)
    for token in range(first, end):
        now = _step(now, token, x_at, dt_at, b_at, rate, channel, state, channels, states)
        c = _load(c_at, token, state, states)
        _store(y_at, tl.sum(now * c[None, :], 1), token, channel, channels)


@triton.jit
def _add_back(
    dt_at,
    rate_at,
    c_at,
    dy_at,
    starts_at,
    ends_at,
    added_at,
    channels,
    states,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """What the outputs of each chunk add to the gradient of the state before it."""
    chunk = tl.program_id(0).to(tl.int64)
    channel, state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    first, end = _bounds(starts_at, ends_at, chunk, CHUNK)
    rate = _load_matrix(rate_at, 0, channel, state, channels, states)
    grad = tl.zeros([BLOCK, S], dtype=tl.float32)
    for index in range(end - first):
        token = end - 1 - index
        step = _load(dt_at, token, channel, channels)
        c = _load(c_at, token, state, states)
        dy = _load(dy_at, token, channel, channels)
        grad = tl.exp(step[:, None] * rate) * (grad + dy[:, None] * c[None, :])
    _store_matrix(added_at, grad, chunk, channel, state, channels, states)


@triton.jit
def _read_back(
    x_at,
    dt_at,
    rate_at,
    b_at,
    c_at,
    before_at,
    after_grad_at,
    dy_at,
    starts_at,
    ends_at,
    dx_at,
    ddt_at,
    drate_at,
    db_at,
    dc_at,
    tokens,
    channels,
    states,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """All gradients of a chunk, given the state before it and the gradient of that after it.

    Those of the rate are sums over the chunk, those of b and c over the block of channels. Tokens
    are visited from the last to the first, and the state before each is computed anew: from that
    before its four tokens, which comes from that before its eight, which comes from the first.
    """
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, state = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    first, end = _bounds(starts_at, ends_at, chunk, CHUNK)
    db_at += block.to(tl.int64) * tokens * states
    dc_at += block.to(tl.int64) * tokens * states
    rate = _load_matrix(rate_at, 0, channel, state, channels, states)
    start = _load_matrix(before_at, chunk, channel, state, channels, states)
    grad = _load_matrix(after_grad_at, chunk, channel, state, channels, states)
    drate = tl.zeros([BLOCK, S], dtype=tl.float32)
    eights = (end - first + 7) // 8
    for index in range(eights):
        eight = first + (eights - 1 - index) * 8
        before_eight = _walk(
            start, first, eight, x_at, dt_at, b_at, rate, channel, state, channels, states
        )
        for half in range(2):
            four = tl.minimum(eight + 4 - half * 4, end)
            stop = tl.minimum(eight + 8 - half * 4, end)
            before_four = _walk(
                before_eight, eight, four, x_at, dt_at, b_at, rate, channel, state, channels, states
            )
            for back in range(stop - four):
                token = stop - 1 - back
                before = _walk(
                    before_four,
                    four,
                    token,
                    x_at,
                    dt_at,
                    b_at,
                    rate,
                    channel,
                    state,
                    channels,
                    states,
                )
                step = _load(dt_at, token, channel, channels)
                value = _load(x_at, token, channel, channels)
                dy = _load(dy_at, token, channel, channels)
                b = _load(b_at, token, state, states)
                c = _load(c_at, token, state, states)
                decay = tl.exp(step[:, None] * rate)
                kept, scale = decay * before, (step * value)[:, None]
                after = kept + scale * b[None, :]
                _store(dc_at, tl.sum(dy[:, None] * after, 0), token, state, states)
                grad += dy[:, None] * c[None, :]
                _store(db_at, tl.sum(grad * scale, 0), token, state, states)
                of_added, of_decay = tl.sum(grad * b[None, :], 1), grad * kept
                ddt = value * of_added + tl.sum(of_decay * rate, 1)
                _store(dx_at, step * of_added, token, channel, channels)
                _store(ddt_at, ddt, token, channel, channels)
                drate += of_decay * step[:, None]
                grad *= decay
    _store_matrix(drate_at, drate, chunk, channel, state, channels, states)


class _ChannelScan(torch.autograd.Function):
    """The output of every channel in float32, and the states after each sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        rate: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor,
        chunks: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        x, dt, rate, b, c = (each.contiguous() for each in (x, dt, rate, b, c))
        sizes, (blocks, shape) = tuple(rate.shape), _blocks(rate)
        places, grid = (chunks.starts, chunks.ends), (chunks.counts.total, blocks)
        added = rate.new_empty(chunks.counts.total, *sizes, dtype=torch.float32)
        passed = added.new_empty(added.shape[:2])
        _add[grid](x, dt, rate, b, *places, added, passed, *sizes, CHUNK=CHUNK, **shape)
        before, last = _joined(added, passed, rate, state, chunks, reverse=False)
        y = torch.empty_like(x, dtype=torch.float32)
        _read[grid](x, dt, rate, b, c, before, *places, y, *sizes, CHUNK=CHUNK, **shape)
        ctx.save_for_backward(x, dt, rate, b, c, before, passed)
        ctx.chunks, ctx.state_dtype = chunks, state.dtype
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, rate, b, c, before, passed = ctx.saved_tensors
        chunks, dy = ctx.chunks, dy.contiguous()
        sizes, (blocks, shape) = tuple(rate.shape), _blocks(rate)
        places, grid = (chunks.starts, chunks.ends), (chunks.counts.total, blocks)
        added = torch.empty_like(before)
        _add_back[grid](dt, rate, c, dy, *places, added, *sizes, CHUNK=CHUNK, **shape)
        after_grad, dstate = _joined(added, passed, rate, dlast, chunks, reverse=True)
        # The join was the last to read `added`, which has the shape of the sums for the rate.
        dx, ddt, drate = torch.empty_like(x), torch.empty_like(dt), added
        db, dc = (before.new_empty(blocks, *b.shape) for _ in range(2))
        results = (dx, ddt, drate, db, dc, len(x))
        inputs = (x, dt, rate, b, c, before, after_grad, dy)
        _read_back[grid](*inputs, *places, *results, *sizes, CHUNK=CHUNK, **shape)
        drate, db, dc = drate.sum(0).to(rate.dtype), db.sum(0).to(b.dtype), dc.sum(0).to(c.dtype)
        return dx, ddt, drate, db, dc, dstate.to(ctx.state_dtype), None


def _joined(
    added: Tensor,
    passed: Tensor,
    rate: Tensor,
    given: Tensor,
    chunks: ChunkLayout,
    *,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """What each chunk meets, and what is left after all chunks of each sequence."""
    blocks, shape = _blocks(rate)
    met, last = torch.empty_like(added), added.new_empty(given.shape)
    tensors = (added, passed, rate, given.contiguous(), chunks.counts.offsets, met, last)
    _join[(len(given), blocks)](*tensors, *rate.shape, REVERSE=reverse, **shape)
    return met, last


def _blocks(rate: Tensor) -> tuple[int, dict[str, int]]:
    """How many blocks the channels are cut into, and the sizes of one."""
    states = max(4, triton.next_power_of_2(rate.shape[1]))
    block = min(64, max(32, NUMBERS // states))
    sizes = {"BLOCK": block, "S": states, "num_warps": WARPS, "num_stages": 1}
    return triton.cdiv(rate.shape[0], block), sizes


def scan_by_triton(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor, chunks: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """The output of every channel in float32, and the states after each sequence.

    `chunks` has `CHUNK` tokens per chunk, and at least one token in all.
    """
    return _ChannelScan.apply(x, dt, rate, b, c, state, chunks)
