"""Triton kernels that carry a decaying state from chunk to chunk of every sequence.

Importing this file needs triton: import it inside a function that runs on CUDA.

    S_{c+1} = exp(whole_c) S_c + added_c

A program walks over `FAN` neighboring chunks and carries some numbers of one head's state. Longer
sequences are walked twice: once for what every such group adds as a whole, then, when the groups
themselves have been joined in the same way, for the state before each of their chunks.
"""

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
    added_at,
    whole_at,
    given_at,
    starts_at,
    ends_at,
    entering_at,
    after_at,
    passed_at,
    heads,
    size,
    GIVEN: tl.constexpr,
    STORE: tl.constexpr,
    FAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    here = cell < size
    start = tl.load(starts_at + group)
    count = tl.minimum(tl.load(ends_at + group) - start, FAN).to(tl.int32)
    own = (group * heads + head) * size + cell
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if GIVEN:
        state = tl.load(given_at + own, mask=here, other=0.0)
    passed = 0.0
    for index in range(count):
        of_head = (start + index) * heads + head
        added = tl.load(added_at + of_head * size + cell, mask=here, other=0.0)
        whole = tl.load(whole_at + of_head)
        if STORE:
            tl.store(entering_at + of_head * size + cell, state, mask=here)
        state = state * tl.exp(whole) + added
        passed += whole
    tl.store(after_at + own, state, mask=here)
    tl.store(passed_at + group * heads + head, passed)


@triton.jit
def _walk_back(
    pull_at,
    whole_at,
    given_at,
    starts_at,
    ends_at,
    entering_at,
    dadded_at,
    dwhole_at,
    before_at,
    passed_at,
    heads,
    size,
    GIVEN: tl.constexpr,
    STORE: tl.constexpr,
    DECAYS: tl.constexpr,
    FAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    here = cell < size
    start = tl.load(starts_at + group)
    count = tl.minimum(tl.load(ends_at + group) - start, FAN).to(tl.int32)
    own = (group * heads + head) * size + cell
    gradient = tl.zeros([BLOCK], dtype=tl.float32)
    if GIVEN:
        gradient = tl.load(given_at + own, mask=here, other=0.0)
    passed = 0.0
    for index in range(count):
        of_head = (start + count - 1 - index) * heads + head
        pull = tl.load(pull_at + of_head * size + cell, mask=here, other=0.0)
        whole = tl.load(whole_at + of_head)
        if STORE:
            tl.store(dadded_at + of_head * size + cell, gradient, mask=here)
        gradient = gradient * tl.exp(whole)
        if DECAYS:
            entering = tl.load(entering_at + of_head * size + cell, mask=here, other=0.0)
            place = of_head * tl.num_programs(2) + tl.program_id(2)
            tl.store(dwhole_at + place, tl.sum(gradient * entering, 0))
        gradient += pull
        passed += whole
    tl.store(before_at + own, gradient, mask=here)
    tl.store(passed_at + group * heads + head, passed)


class _JoinedStates(torch.autograd.Function):
    """The state before each chunk and after each sequence."""

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, whole: Tensor, before: Tensor, counts: Lengths, decays: bool
    ) -> tuple[Tensor, Tensor]:
        added, whole = added.contiguous(), whole.contiguous()
        entering, last = _carry(added, whole, before, counts)
        ctx.save_for_backward(whole, entering)
        ctx.counts, ctx.decays = counts, decays
        return entering, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor, last_pull: Tensor) -> tuple[Tensor | None, ...]:
        whole, entering = ctx.saved_tensors
        known = entering if ctx.decays else None
        dadded, dwhole, before = _carry_back(
            pull.contiguous(), whole, known, last_pull.contiguous(), ctx.counts
        )
        return dadded, dwhole, before, None, None


def _carry(added: Tensor, whole: Tensor, before: Tensor, counts: Lengths) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after each sequence, given those before the sequences."""
    groups = ChunkLayout.of(counts, FAN)
    if groups.counts.longest <= 1:
        present = groups.sequence_of_first
        entering, after, _ = _walk_groups(added, whole, before[present], groups, store=True)
        return entering, before.index_copy(0, present, after)
    _, totals, passed = _walk_groups(added, whole, None, groups, store=False)
    given, last = _carry(totals, passed, before, groups.counts)
    entering, _, _ = _walk_groups(added, whole, given, groups, store=True)
    return entering, last


def _carry_back(
    pull: Tensor, whole: Tensor, entering: Tensor | None, last_pull: Tensor, counts: Lengths
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of what each chunk adds, of its decay, and of the states before sequences."""
    groups = ChunkLayout.of(counts, FAN)
    if groups.counts.longest <= 1:
        present = groups.sequence_of_first
        dadded, dwhole, before, _ = _walk_groups_back(
            pull, whole, entering, last_pull[present], groups, store=True
        )
        return dadded, dwhole, last_pull.index_copy(0, present, before)
    _, _, totals, passed = _walk_groups_back(pull, whole, None, None, groups, store=False)
    given, _, before = _carry_back(totals, passed, None, last_pull, groups.counts)
    dadded, dwhole, _, _ = _walk_groups_back(pull, whole, entering, given, groups, store=True)
    return dadded, dwhole, before


def _walk_groups(
    added: Tensor, whole: Tensor, given: Tensor | None, groups: ChunkLayout, *, store: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk if asked for, that after each group, and the group's decay."""
    heads, size = added.shape[1], added.shape[2] * added.shape[3]
    entering = torch.empty_like(added) if store else added
    after = added.new_empty(groups.counts.total, *added.shape[1:])
    passed = whole.new_empty(groups.counts.total, heads)
    _walk[(groups.counts.total, heads, triton.cdiv(size, BLOCK))](
        added,
        whole,
        after if given is None else given.contiguous(),
        groups.starts,
        groups.ends,
        entering,
        after,
        passed,
        heads,
        size,
        GIVEN=given is not None,
        STORE=store,
        FAN=FAN,
        BLOCK=BLOCK,
    )
    return entering, after, passed


def _walk_groups_back(
    pull: Tensor,
    whole: Tensor,
    entering: Tensor | None,
    given: Tensor | None,
    groups: ChunkLayout,
    *,
    store: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of what each chunk adds if asked for, of its decay where the states are given,
    and of the state before each group; also the group's decay."""
    heads, size = pull.shape[1], pull.shape[2] * pull.shape[3]
    blocks = triton.cdiv(size, BLOCK)
    dadded = torch.empty_like(pull) if store else pull
    parts = None if entering is None else whole.new_empty(len(pull), heads, blocks)
    before = pull.new_empty(groups.counts.total, *pull.shape[1:])
    passed = whole.new_empty(groups.counts.total, heads)
    _walk_back[(groups.counts.total, heads, blocks)](
        pull,
        whole,
        before if given is None else given.contiguous(),
        groups.starts,
        groups.ends,
        pull if entering is None else entering,
        dadded,
        whole if parts is None else parts,
        before,
        passed,
        heads,
        size,
        GIVEN=given is not None,
        STORE=store,
        DECAYS=entering is not None,
        FAN=FAN,
        BLOCK=BLOCK,
    )
    return dadded, None if parts is None else parts.sum(-1), before, passed


def joined_states(
    added: Tensor, whole: Tensor, before: Tensor, counts: Lengths, *, decays: bool
) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after each sequence.

    Given are what each chunk adds, how it decays the state, the states before the sequences and
    how many chunks each sequence has. Without `decays` those of the chunks have no gradient.
    """
    return _JoinedStates.apply(added, whole, before, counts, decays)
