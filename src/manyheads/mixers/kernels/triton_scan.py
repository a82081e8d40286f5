"""Triton kernels of Mamba's scan over channels.

Importing this file needs triton: import it inside a function that runs on CUDA.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = sum_s h_t[s] C_t[s]

A program keeps the states of a block of channels in registers and visits the tokens of one chunk:
once from zero for what the chunk adds, `h_local`, and, when the chunks of each sequence are joined,
once from the true state `h` before the chunk for the outputs. `h0` and `ht` are the states before
and after a sequence, `dt_sum` is the sum of a chunk's dt, so that the chunk decays a state by
exp(dt_sum A), and `d_x` is the gradient of `x`. The loop over tokens is `naive_selective_scan`.

Only the states before each chunk are stored for gradients, those within a chunk are computed again.
Sums over programs are made by torch, in the same order each time.
"""

from collections.abc import Callable
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
    valid = (channel < channels)[:, None] & (state < states)[None, :]
    at = at + (number * channels + channel)[:, None] * states + state[None, :]
    return tl.load(at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _store_matrix(at, value, number, channel, state, channels, states):
    valid = (channel < channels)[:, None] & (state < states)[None, :]
    at = at + (number * channels + channel)[:, None] * states + state[None, :]
    tl.store(at, value, mask=valid)


@triton.jit
def _bounds(starts_at, ends_at, chunk, CHUNK: tl.constexpr):
    """The first token of a chunk, and the one after its last."""
    first = tl.load(starts_at + chunk)
    return first, tl.minimum(first + CHUNK, tl.load(ends_at + chunk))


@triton.jit
def _step(h, token, x_at, dt_at, B_at, A, channel, state, channels, states):
    """The state after a token, given the one before it."""
    dt = _load(dt_at, token, channel, channels)
    x = _load(x_at, token, channel, channels)
    B = _load(B_at, token, state, states)
    return tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]


@triton.jit
def _walk(h, first, end, x_at, dt_at, B_at, A, channel, state, channels, states):
    """The state before token `end`, given the one before token `first`."""
    for token in range(first, end):
        h = _step(h, token, x_at, dt_at, B_at, A, channel, state, channels, states)
    return h


@triton.jit
def _add(
    x_at,
    dt_at,
    A_at,
    B_at,
    starts_at,
    ends_at,
    h_local_at,
    dt_sum_at,
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
    A = _load_matrix(A_at, 0, channel, state, channels, states)
    h = tl.zeros([BLOCK, S], dtype=tl.float32)
    dt_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(first, end):
        h = _step(h, token, x_at, dt_at, B_at, A, channel, state, channels, states)
        dt_sum += _load(dt_at, token, channel, channels)
    _store_matrix(h_local_at, h, chunk, channel, state, channels, states)
    tl.store(dt_sum_at + chunk * channels + channel, dt_sum, mask=channel < channels)


@triton.jit
def _join(
    h_local_at,
    dt_sum_at,
    A_at,
    h0_at,
    offsets_at,
    h_at,
    ht_at,
    channels,
    states,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """The state before each chunk and after the sequence; with REVERSE, from the last chunk on, the
    gradient of the state after each chunk and before the sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    channel, state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    A = _load_matrix(A_at, 0, channel, state, channels, states)
    h = _load_matrix(h0_at, sequence, channel, state, channels, states)
    first = tl.load(offsets_at + sequence).to(tl.int64)
    end = tl.load(offsets_at + sequence + 1).to(tl.int64)
    for index in range(end - first):
        chunk = first + index
        if REVERSE:
            chunk = end - 1 - index
        h_local = _load_matrix(h_local_at, chunk, channel, state, channels, states)
        dt_sum = tl.load(dt_sum_at + chunk * channels + channel, mask=channel < channels, other=0.0)
        _store_matrix(h_at, h, chunk, channel, state, channels, states)
        h = tl.exp(dt_sum[:, None] * A) * h + h_local
    _store_matrix(ht_at, h, sequence, channel, state, channels, states)


@triton.jit
def _read(
    x_at,
    dt_at,
    A_at,
    B_at,
    C_at,
    h_at,
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
    A = _load_matrix(A_at, 0, channel, state, channels, states)
    h = _load_matrix(h_at, chunk, channel, state, channels, states)
    for token in range(first, end):
        h = _step(h, token, x_at, dt_at, B_at, A, channel, state, channels, states)
        C = _load(C_at, token, state, states)
        _store(y_at, tl.sum(h * C[None, :], 1), token, channel, channels)


@triton.jit
def _add_back(
    dt_at,
    A_at,
    C_at,
    d_y_at,
    starts_at,
    ends_at,
    d_h_local_at,
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
    A = _load_matrix(A_at, 0, channel, state, channels, states)
    d_h = tl.zeros([BLOCK, S], dtype=tl.float32)
    for index in range(end - first):
        token = end - 1 - index
        dt = _load(dt_at, token, channel, channels)
        C = _load(C_at, token, state, states)
        d_y = _load(d_y_at, token, channel, channels)
        d_h = tl.exp(dt[:, None] * A) * (d_h + d_y[:, None] * C[None, :])
    _store_matrix(d_h_local_at, d_h, chunk, channel, state, channels, states)


@triton.jit
def _read_back(
    x_at,
    dt_at,
    A_at,
    B_at,
    C_at,
    h_at,
    d_h_after_at,
    d_y_at,
    starts_at,
    ends_at,
    d_x_at,
    d_dt_at,
    d_A_at,
    d_B_at,
    d_C_at,
    tokens,
    channels,
    states,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """All gradients of a chunk, given the state before it and the gradient of that after it.

    Those of A are sums over the chunk, those of B and C over the block of channels. Tokens
    are visited from the last to the first, and the state before each is computed anew: from that
    before its four tokens, which comes from that before its eight, which comes from the first.
    """
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, state = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    first, end = _bounds(starts_at, ends_at, chunk, CHUNK)
    d_B_at += block.to(tl.int64) * tokens * states
    d_C_at += block.to(tl.int64) * tokens * states
    A = _load_matrix(A_at, 0, channel, state, channels, states)
    h = _load_matrix(h_at, chunk, channel, state, channels, states)
    d_h = _load_matrix(d_h_after_at, chunk, channel, state, channels, states)
    d_A = tl.zeros([BLOCK, S], dtype=tl.float32)
    eights = (end - first + 7) // 8
    for index in range(eights):
        eight = first + (eights - 1 - index) * 8
        h_eight = _walk(h, first, eight, x_at, dt_at, B_at, A, channel, state, channels, states)
        for half in range(2):
            four = tl.minimum(eight + 4 - half * 4, end)
            stop = tl.minimum(eight + 8 - half * 4, end)
            h_four = _walk(
                h_eight, eight, four, x_at, dt_at, B_at, A, channel, state, channels, states
            )
            for back in range(stop - four):
                token = stop - 1 - back
                h_before = _walk(
                    h_four, four, token, x_at, dt_at, B_at, A, channel, state, channels, states
                )
                dt = _load(dt_at, token, channel, channels)
                x = _load(x_at, token, channel, channels)
                d_y = _load(d_y_at, token, channel, channels)
                B = _load(B_at, token, state, states)
                C = _load(C_at, token, state, states)
                decay = tl.exp(dt[:, None] * A)
                h_decayed, scale = decay * h_before, (dt * x)[:, None]
                h_after = h_decayed + scale * B[None, :]
                _store(d_C_at, tl.sum(d_y[:, None] * h_after, 0), token, state, states)
                d_h += d_y[:, None] * C[None, :]
                _store(d_B_at, tl.sum(d_h * scale, 0), token, state, states)
                d_dtx, d_log_decay = tl.sum(d_h * B[None, :], 1), d_h * h_decayed
                d_dt = x * d_dtx + tl.sum(d_log_decay * A, 1)
                _store(d_x_at, dt * d_dtx, token, channel, channels)
                _store(d_dt_at, d_dt, token, channel, channels)
                d_A += d_log_decay * dt[:, None]
                d_h *= decay
    _store_matrix(d_A_at, d_A, chunk, channel, state, channels, states)


class _ChannelScan(torch.autograd.Function):
    """The output of every channel in float32, and the states after each sequence.

    `chunks` has `CHUNK` tokens per chunk, and at least one token in all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        h0: Tensor,
        chunks: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C = (tensor.contiguous() for tensor in (x, dt, A, B, C))
        sizes, (blocks, shape) = tuple(A.shape), _blocks(A)
        places, grid = (chunks.starts, chunks.ends), (chunks.counts.total, blocks)
        h_local = A.new_empty(chunks.counts.total, *sizes, dtype=torch.float32)
        dt_sum = h_local.new_empty(h_local.shape[:2])
        _add[grid](x, dt, A, B, *places, h_local, dt_sum, *sizes, CHUNK=CHUNK, **shape)
        h, ht = _joined(h_local, dt_sum, A, h0, chunks, reverse=False)
        y = torch.empty_like(x, dtype=torch.float32)
        _read[grid](x, dt, A, B, C, h, *places, y, *sizes, CHUNK=CHUNK, **shape)
        ctx.save_for_backward(x, dt, A, B, C, h, dt_sum)
        ctx.chunks, ctx.state_dtype = chunks, h0.dtype
        return y, ht

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_ht: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, h, dt_sum = ctx.saved_tensors
        chunks, d_y = ctx.chunks, d_y.contiguous()
        sizes, (blocks, shape) = tuple(A.shape), _blocks(A)
        places, grid = (chunks.starts, chunks.ends), (chunks.counts.total, blocks)
        d_h_local = torch.empty_like(h)
        _add_back[grid](dt, A, C, d_y, *places, d_h_local, *sizes, CHUNK=CHUNK, **shape)
        d_h_after, d_h0 = _joined(d_h_local, dt_sum, A, d_ht, chunks, reverse=True)
        # The join was the last to read `d_h_local`, which has the shape of the sums for A.
        d_x, d_dt, d_A = torch.empty_like(x), torch.empty_like(dt), d_h_local
        d_B, d_C = (h.new_empty(blocks, *B.shape) for _ in range(2))
        results = (d_x, d_dt, d_A, d_B, d_C, len(x))
        inputs = (x, dt, A, B, C, h, d_h_after, d_y)
        _read_back[grid](*inputs, *places, *results, *sizes, CHUNK=CHUNK, **shape)
        d_A, d_B, d_C = d_A.sum(0).to(A.dtype), d_B.sum(0).to(B.dtype), d_C.sum(0).to(C.dtype)
        return d_x, d_dt, d_A, d_B, d_C, d_h0.to(ctx.state_dtype), None


def _joined(
    h_local: Tensor, dt_sum: Tensor, A: Tensor, h0: Tensor, chunks: ChunkLayout, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """`h` and `ht`; with `reverse` their gradients, given that of the state after each sequence."""
    blocks, shape = _blocks(A)
    h, ht = torch.empty_like(h_local), h_local.new_empty(h0.shape)
    tensors = (h_local, dt_sum, A, h0.contiguous(), chunks.counts.offsets, h, ht)
    _join[(len(h0), blocks)](*tensors, *A.shape, REVERSE=reverse, **shape)
    return h, ht


def _blocks(A: Tensor) -> tuple[int, dict[str, int]]:
    """How many blocks the channels are cut into, and the sizes of one."""
    states = max(4, triton.next_power_of_2(A.shape[1]))
    block = min(64, max(32, NUMBERS // states))
    sizes = {"BLOCK": block, "S": states, "num_warps": WARPS, "num_stages": 1}
    return triton.cdiv(A.shape[0], block), sizes


scan_by_triton: Callable[..., tuple[Tensor, Tensor]] = _ChannelScan.apply
