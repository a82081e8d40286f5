"""Triton kernels of the decaying recurrence: what each chunk adds to the state, and its outputs.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program computes one head of one chunk from its tokens alone, so that neither scores nor decays
of a chunk are ever stored. The states between chunks are joined by `triton_states`. With P the
decay from the start of the chunk up to and including a token, and T that of the whole chunk:

    added = sum_j exp(T - P_j) k_j v_j^T
    o_i = exp(P_i) q_i^T S + sum_{j <= i} exp(P_i - P_j) (q_i . k_j) v_j
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout


@triton.jit
def load_rows(at, row, there, stride, size, BLOCK: tl.constexpr):
    """Vectors of some tokens, zero beyond their channels and where there is no token."""
    column = tl.arange(0, BLOCK)[None, :]
    here = there[:, None] & (column < size)
    return tl.load(at + row[:, None] * stride + column, mask=here, other=0.0).to(tl.float32)


@triton.jit
def store_rows(at, value, row, there, stride, size, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    here = there[:, None] & (column < size)
    at = at + row[:, None] * stride + column
    tl.store(at, value.to(at.dtype.element_ty), mask=here)


@triton.jit
def _matrix(at, d, e, D: tl.constexpr, E: tl.constexpr):
    """Where the numbers of one state are, and which of them there are."""
    row, column = tl.arange(0, D)[:, None], tl.arange(0, E)[None, :]
    return at + row * e + column, (row < d) & (column < e)


@triton.jit
def _passed(decay_at, row, there, head, heads, DECAYS: tl.constexpr, CHUNK: tl.constexpr):
    """The decay up to each token, and that of the whole chunk."""
    step = tl.zeros([CHUNK], dtype=tl.float32)
    if DECAYS:
        step = tl.load(decay_at + row * heads + head, mask=there, other=0.0).to(tl.float32)
    return tl.cumsum(step, 0), tl.sum(step, 0)


@triton.jit
def _within(passed, CHUNK: tl.constexpr):
    """What is left of an earlier token (the column) at a later one (the row)."""
    token = tl.arange(0, CHUNK)
    seen = token[:, None] >= token[None, :]
    between = tl.where(seen, passed[:, None] - passed[None, :], 0.0)
    return tl.where(seen, tl.exp(between), 0.0)


@triton.jit
def _add(
    k_at,
    v_at,
    decay_at,
    starts_at,
    ends_at,
    added_at,
    whole_at,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    there = row < tl.load(ends_at + chunk)
    key = load_rows(k_at + head // repeats * d, row, there, k_stride, d, D)
    value = load_rows(v_at + head * e, row, there, v_stride, e, E)
    passed, whole = _passed(decay_at, row, there, head, heads, DECAYS, CHUNK)
    left = value * tl.exp(whole - passed)[:, None]
    added = tl.dot(tl.trans(key), left, input_precision=PRECISION)
    at, here = _matrix(added_at + (chunk * heads + head) * d * e, d, e, D, E)
    tl.store(at, added, mask=here)
    tl.store(whole_at + chunk * heads + head, whole)


@triton.jit
def _add_back(
    k_at,
    v_at,
    decay_at,
    starts_at,
    ends_at,
    pull_at,
    whole_pull_at,
    dk_at,
    dv_at,
    ddecay_at,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    there = row < tl.load(ends_at + chunk)
    key = load_rows(k_at + head // repeats * d, row, there, k_stride, d, D)
    value = load_rows(v_at + head * e, row, there, v_stride, e, E)
    passed, whole = _passed(decay_at, row, there, head, heads, DECAYS, CHUNK)
    left = tl.exp(whole - passed)[:, None]
    at, here = _matrix(pull_at + (chunk * heads + head) * d * e, d, e, D, E)
    pull = tl.load(at, mask=here, other=0.0)
    dk = tl.dot(value * left, tl.trans(pull), input_precision=PRECISION)
    dv = tl.dot(key, pull, input_precision=PRECISION) * left
    store_rows(dk_at + head * d, dk, row, there, heads * d, d, D)
    store_rows(dv_at + head * e, dv, row, there, heads * e, e, E)
    if DECAYS:
        # A later decay shortens what the tokens before it add.
        each = tl.sum(dv * value, 1)
        before = tl.cumsum(each, 0) - each
        step = before + tl.load(whole_pull_at + chunk * heads + head)
        tl.store(ddecay_at + row * heads + head, step, mask=there)


@triton.jit
def _read(
    q_at,
    k_at,
    v_at,
    decay_at,
    state_at,
    starts_at,
    ends_at,
    out_at,
    q_stride,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    there = row < tl.load(ends_at + chunk)
    query = load_rows(q_at + head // repeats * d, row, there, q_stride, d, D)
    key = load_rows(k_at + head // repeats * d, row, there, k_stride, d, D)
    value = load_rows(v_at + head * e, row, there, v_stride, e, E)
    passed, _ = _passed(decay_at, row, there, head, heads, DECAYS, CHUNK)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights = scores * _within(passed, CHUNK)
    at, here = _matrix(state_at + (chunk * heads + head) * d * e, d, e, D, E)
    state = tl.load(at, mask=here, other=0.0)
    out = tl.dot(query * tl.exp(passed)[:, None], state, input_precision=PRECISION)
    out += tl.dot(weights, value, input_precision=PRECISION)
    store_rows(out_at + head * e, out, row, there, heads * e, e, E)


@triton.jit
def _read_back(
    q_at,
    k_at,
    v_at,
    decay_at,
    state_at,
    starts_at,
    ends_at,
    pull_at,
    dq_at,
    dk_at,
    dv_at,
    ddecay_at,
    dstate_at,
    q_stride,
    k_stride,
    v_stride,
    d,
    e,
    heads,
    repeats,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts_at + chunk) + tl.arange(0, CHUNK)
    there = row < tl.load(ends_at + chunk)
    query = load_rows(q_at + head // repeats * d, row, there, q_stride, d, D)
    key = load_rows(k_at + head // repeats * d, row, there, k_stride, d, D)
    value = load_rows(v_at + head * e, row, there, v_stride, e, E)
    pull = load_rows(pull_at + head * e, row, there, heads * e, e, E)
    passed, _ = _passed(decay_at, row, there, head, heads, DECAYS, CHUNK)
    left = tl.exp(passed)[:, None]
    at, here = _matrix(state_at + (chunk * heads + head) * d * e, d, e, D, E)
    state = tl.load(at, mask=here, other=0.0)
    earlier = tl.dot(pull, tl.trans(state), input_precision=PRECISION) * left
    dstate = tl.dot(tl.trans(query * left), pull, input_precision=PRECISION)
    at, here = _matrix(dstate_at + (chunk * heads + head) * d * e, d, e, D, E)
    tl.store(at, dstate, mask=here)
    within = _within(passed, CHUNK)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights = scores * within
    dv = tl.dot(tl.trans(weights), pull, input_precision=PRECISION)
    dweights = tl.dot(pull, tl.trans(value), input_precision=PRECISION)
    dscores = dweights * within
    dq = earlier + tl.dot(dscores, key, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dscores), query, input_precision=PRECISION)
    store_rows(dq_at + head * d, dq, row, there, heads * d, d, D)
    store_rows(dk_at + head * d, dk, row, there, heads * d, d, D)
    store_rows(dv_at + head * e, dv, row, there, heads * e, e, E)
    if DECAYS:
        shares = dscores * scores
        each = tl.sum(earlier * query, 1) + tl.sum(shares, 1) - tl.sum(shares, 0)
        # A decay counts in all that comes from its token on.
        step = tl.sum(each, 0) - tl.cumsum(each, 0) + each
        tl.store(ddecay_at + row * heads + head, step, mask=there)


class _AddedStates(torch.autograd.Function):
    """What each chunk adds to the state, and how it decays what was there before."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, decay: Tensor | None, chunks: ChunkLayout, precision: str
    ) -> tuple[Tensor, Tensor]:
        k, v = side_by_side(k), side_by_side(v)
        heads, d, e = v.shape[1], k.shape[2], v.shape[2]
        added = v.new_empty(chunks.counts.total, heads, d, e, dtype=torch.float32)
        whole = added.new_empty(added.shape[:2])
        decay = None if decay is None else decay.contiguous()
        filler = v if decay is None else decay
        strides = (k.stride(0), v.stride(0))
        _launch(
            _add,
            (k, v, filler, chunks.starts, chunks.ends, added, whole, *strides),
            (k, v, decay, chunks, precision),
        )
        ctx.save_for_backward(k, v, decay)
        ctx.chunks, ctx.precision = chunks, precision
        return added, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor, whole_pull: Tensor) -> tuple[Tensor | None, ...]:
        k, v, decay = ctx.saved_tensors
        heads, chunks = v.shape[1], ctx.chunks
        dk = v.new_empty(len(k), heads, k.shape[2], dtype=torch.float32)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        ddecay = None if decay is None else torch.empty_like(decay, dtype=torch.float32)
        fillers = [v if each is None else each for each in (decay, ddecay)]
        places = (chunks.starts, chunks.ends, pull.contiguous(), whole_pull.contiguous())
        strides = (k.stride(0), v.stride(0))
        _launch(
            _add_back,
            (k, v, fillers[0], *places, dk, dv, fillers[1], *strides),
            (k, v, decay, chunks, ctx.precision),
        )
        return _by_group(dk, k), dv, _like(ddecay, decay), None, None


class _ChunkOutputs(torch.autograd.Function):
    """The outputs of all tokens, given the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: Tensor,
        chunks: ChunkLayout,
        precision: str,
    ) -> Tensor:
        q, k, v, state = side_by_side(q), side_by_side(k), side_by_side(v), state.contiguous()
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        decay = None if decay is None else decay.contiguous()
        filler = v if decay is None else decay
        strides = (q.stride(0), k.stride(0), v.stride(0))
        _launch(
            _read,
            (q, k, v, filler, state, chunks.starts, chunks.ends, out, *strides),
            (k, v, decay, chunks, precision),
        )
        ctx.save_for_backward(q, k, v, decay, state)
        ctx.chunks, ctx.precision = chunks, precision
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, state = ctx.saved_tensors
        heads, chunks = v.shape[1], ctx.chunks
        dq, dk = (v.new_empty(len(k), heads, k.shape[2], dtype=torch.float32) for _ in range(2))
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dstate = torch.empty_like(state)
        ddecay = None if decay is None else torch.empty_like(decay, dtype=torch.float32)
        fillers = [v if each is None else each for each in (decay, ddecay)]
        places = (state, chunks.starts, chunks.ends, pull.contiguous())
        strides = (q.stride(0), k.stride(0), v.stride(0))
        _launch(
            _read_back,
            (q, k, v, fillers[0], *places, dq, dk, dv, fillers[1], dstate, *strides),
            (k, v, decay, chunks, ctx.precision),
        )
        groups = (_by_group(dq, q), _by_group(dk, k))
        return *groups, dv, _like(ddecay, decay), dstate, None, None


def _launch(
    kernel: Any,
    tensors: tuple[Any, ...],
    about: tuple[Tensor, Tensor, Tensor | None, ChunkLayout, str],
) -> None:
    k, v, decay, chunks, precision = about
    (groups, d), (heads, e) = k.shape[1:], v.shape[1:]
    kernel[(chunks.counts.total, heads)](
        *tensors,
        d,
        e,
        heads,
        heads // groups,
        DECAYS=decay is not None,
        CHUNK=chunks.size,
        D=max(16, triton.next_power_of_2(d)),
        E=max(16, triton.next_power_of_2(e)),
        PRECISION=precision,
        num_warps=8 if max(d, e, chunks.size) > 64 else 4,
        num_stages=1,
    )


def side_by_side(x: Tensor) -> Tensor:
    """The heads of a token side by side; tokens may be further apart."""
    together = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if together else x.contiguous()


def _by_group(gradient: Tensor, x: Tensor) -> Tensor:
    """The sum over heads that share a query or key."""
    groups = x.shape[1]
    if groups != gradient.shape[1]:
        gradient = gradient.unflatten(1, (groups, -1)).sum(2)
    return gradient.to(x.dtype)


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if gradient is None or x is None else gradient.to(x.dtype)


def added_states(
    k: Tensor, v: Tensor, decay: Tensor | None, chunks: ChunkLayout, precision: str
) -> tuple[Tensor, Tensor]:
    """What each chunk adds to the state, and how it decays what was there before."""
    return _AddedStates.apply(k, v, decay, chunks, precision)


def chunk_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    chunks: ChunkLayout,
    precision: str,
) -> Tensor:
    """The outputs of all tokens, given the state before each chunk."""
    return _ChunkOutputs.apply(q, k, v, decay, state, chunks, precision)
