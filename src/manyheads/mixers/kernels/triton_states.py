"""Triton kernels that carry a decaying state from chunk to chunk of every sequence.

Importing this file needs triton: import it inside a function that runs on CUDA.

    h_{c+1} = exp(g_chunk_c) h_c + kv_c

Letters, as in fla and the papers: `h` the state before each chunk, `h0` before and `ht` after each
sequence (or group of chunks), `kv` the sum of k v^T that a chunk adds, `g_chunk` and `g_group` the
log decay of a whole chunk or group, `d_x` the gradient of `x`.

A program walks over `FAN` neighboring chunks and carries some numbers of one head's state. Longer
sequences are walked twice: once for what every such group adds as a whole, then, when the groups
themselves have been joined in the same way, for the state before each of their chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Chunks that one program walks over, and the numbers of a state that it carries.
FAN = 32
BLOCK = 1024


@triton.jit
def _walk(
    kv_at,
    g_chunk_at,
    h0_at,
    starts_at,
    ends_at,
    h_at,
    ht_at,
    g_group_at,
    heads,
    size,
    CONTINUED: tl.constexpr,
    STORE: tl.constexpr,
    FAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    valid = cell < size
    start = tl.load(starts_at + group)
    count = tl.minimum(tl.load(ends_at + group) - start, FAN).to(tl.int32)
    own = (group * heads + head) * size + cell
    h = tl.zeros([BLOCK], dtype=tl.float32)
    if CONTINUED:
        h = tl.load(h0_at + own, mask=valid, other=0.0)
    g_group = 0.0
    for index in range(count):
        of_head = (start + index) * heads + head
        kv = tl.load(kv_at + of_head * size + cell, mask=valid, other=0.0)
        g_chunk = tl.load(g_chunk_at + of_head)
        if STORE:
            tl.store(h_at + of_head * size + cell, h, mask=valid)
        h = h * tl.exp(g_chunk) + kv
        g_group += g_chunk
    tl.store(ht_at + own, h, mask=valid)
    tl.store(g_group_at + group * heads + head, g_group)


@triton.jit
def _walk_back(
    d_h_at,
    g_chunk_at,
    d_ht_at,
    starts_at,
    ends_at,
    h_at,
    d_kv_at,
    d_g_chunk_at,
    d_h0_at,
    g_group_at,
    heads,
    size,
    CONTINUED: tl.constexpr,
    STORE: tl.constexpr,
    DECAYS: tl.constexpr,
    FAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    valid = cell < size
    start = tl.load(starts_at + group)
    count = tl.minimum(tl.load(ends_at + group) - start, FAN).to(tl.int32)
    own = (group * heads + head) * size + cell
    d_state = tl.zeros([BLOCK], dtype=tl.float32)
    if CONTINUED:
        d_state = tl.load(d_ht_at + own, mask=valid, other=0.0)
    g_group = 0.0
    for index in range(count):
        of_head = (start + count - 1 - index) * heads + head
        d_h = tl.load(d_h_at + of_head * size + cell, mask=valid, other=0.0)
        g_chunk = tl.load(g_chunk_at + of_head)
        if STORE:
            tl.store(d_kv_at + of_head * size + cell, d_state, mask=valid)
        d_state = d_state * tl.exp(g_chunk)
        if DECAYS:
            h = tl.load(h_at + of_head * size + cell, mask=valid, other=0.0)
            place = of_head * tl.num_programs(2) + tl.program_id(2)
            tl.store(d_g_chunk_at + place, tl.sum(d_state * h, 0))
        d_state += d_h
        g_group += g_chunk
    tl.store(d_h0_at + own, d_state, mask=valid)
    tl.store(g_group_at + group * heads + head, g_group)


class _JoinedStates(torch.autograd.Function):
    """The state before each chunk and after each sequence.

    `counts` is the number of chunks of each sequence. Without `decays`, `g_chunk` has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, kv: Tensor, g_chunk: Tensor, h0: Tensor, counts: Lengths, decays: bool
    ) -> tuple[Tensor, Tensor]:
        kv, g_chunk = kv.contiguous(), g_chunk.contiguous()
        h, ht = _carry(kv, g_chunk, h0, counts)
        ctx.save_for_backward(g_chunk, h)
        ctx.counts, ctx.decays = counts, decays
        return h, ht

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor, d_ht: Tensor) -> tuple[Tensor | None, ...]:
        g_chunk, h = ctx.saved_tensors
        states = h if ctx.decays else None
        d_kv, d_g_chunk, d_h0 = _carry_back(
            d_h.contiguous(), g_chunk, states, d_ht.contiguous(), ctx.counts
        )
        return d_kv, d_g_chunk, d_h0, None, None


def _carry(kv: Tensor, g_chunk: Tensor, h0: Tensor, counts: Lengths) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after each sequence, given those before the sequences."""
    groups = ChunkLayout.of(counts, FAN)
    if groups.counts.longest <= 1:
        present = groups.sequence_of_first
        h, after, _ = _walk_groups(kv, g_chunk, h0[present], groups, store=True)
        return h, h0.index_copy(0, present, after)
    _, kv_group, g_group = _walk_groups(kv, g_chunk, None, groups, store=False)
    h_group, ht = _carry(kv_group, g_group, h0, groups.counts)
    h, _, _ = _walk_groups(kv, g_chunk, h_group, groups, store=True)
    return h, ht


def _carry_back(
    d_h: Tensor, g_chunk: Tensor, h: Tensor | None, d_ht: Tensor, counts: Lengths
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of what each chunk adds, of its decay, and of the states before sequences."""
    groups = ChunkLayout.of(counts, FAN)
    if groups.counts.longest <= 1:
        present = groups.sequence_of_first
        d_kv, d_g_chunk, d_h0, _ = _walk_groups_back(
            d_h, g_chunk, h, d_ht[present], groups, store=True
        )
        return d_kv, d_g_chunk, d_ht.index_copy(0, present, d_h0)
    _, _, d_h_group, g_group = _walk_groups_back(d_h, g_chunk, None, None, groups, store=False)
    d_ht_group, _, d_h0 = _carry_back(d_h_group, g_group, None, d_ht, groups.counts)
    d_kv, d_g_chunk, _, _ = _walk_groups_back(d_h, g_chunk, h, d_ht_group, groups, store=True)
    return d_kv, d_g_chunk, d_h0


def _walk_groups(
    kv: Tensor, g_chunk: Tensor, h0: Tensor | None, groups: ChunkLayout, *, store: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk if `store`, that after each group, and the group's decay."""
    heads, size = kv.shape[1], kv.shape[2] * kv.shape[3]
    h = torch.empty_like(kv) if store else kv
    ht = kv.new_empty(groups.counts.total, *kv.shape[1:])
    g_group = g_chunk.new_empty(groups.counts.total, heads)
    before, grid = ht if h0 is None else h0.contiguous(), (len(ht), heads, triton.cdiv(size, BLOCK))
    tensors = (kv, g_chunk, before, groups.starts, groups.ends, h, ht, g_group)
    kind = {"CONTINUED": h0 is not None, "STORE": store}
    _walk[grid](*tensors, heads, size, **kind, FAN=FAN, BLOCK=BLOCK)
    return h, ht, g_group


def _walk_groups_back(
    d_h: Tensor,
    g_chunk: Tensor,
    h: Tensor | None,
    d_ht: Tensor | None,
    groups: ChunkLayout,
    *,
    store: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of what each chunk adds if `store`, of its decay where there are states `h`,
    and of the state before each group; also the group's decay."""
    heads, size = d_h.shape[1], d_h.shape[2] * d_h.shape[3]
    blocks = triton.cdiv(size, BLOCK)
    d_kv = torch.empty_like(d_h) if store else d_h
    parts = None if h is None else g_chunk.new_empty(len(d_h), heads, blocks)
    d_h0 = d_h.new_empty(groups.counts.total, *d_h.shape[1:])
    g_group = g_chunk.new_empty(groups.counts.total, heads)
    after = d_h0 if d_ht is None else d_ht.contiguous()
    inputs = (d_h, g_chunk, after, groups.starts, groups.ends, d_h if h is None else h)
    results = (d_kv, g_chunk if parts is None else parts, d_h0, g_group)
    kind = {"CONTINUED": d_ht is not None, "STORE": store, "DECAYS": h is not None}
    grid = (groups.counts.total, heads, blocks)
    _walk_back[grid](*inputs, *results, heads, size, **kind, FAN=FAN, BLOCK=BLOCK)
    return d_kv, None if parts is None else parts.sum(-1), d_h0, g_group


joined_states: Callable[..., tuple[Tensor, Tensor]] = _JoinedStates.apply
