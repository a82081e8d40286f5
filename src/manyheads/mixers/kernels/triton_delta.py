"""Triton kernels of the delta rule: products inside chunks, and the walk of the state over chunks.

Importing this file needs triton: import it inside a function that runs on CUDA.

With the state S before a chunk, which `corrected` reads and `kept` writes:

    new = written - corrected S        S <- exp(whole) S + kept^T new

The columns of the state never meet, so a program carries some of them for one head through a whole
sequence. No product is ever transposed: Triton 3.4 to 3.7 gets that wrong on Hopper.

With a decay P per channel from the start of the chunk up to a token, a program computes the
products of one head of one chunk, key by key, so that exp never sees a positive number:

    products_ij = sum_d q_id k_jd exp(P_id - P_jd)        for j <= i
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.ragged import Lengths

# Columns of the state that one program carries.
COLUMNS = 32


@triton.jit
def _places(rows, columns, of_row, of_column, row_stride, column_stride):
    """Where the numbers of a matrix are, and which of them there are."""
    here = (rows < of_row)[:, None] & (columns < of_column)[None, :]
    return rows[:, None] * row_stride + columns[None, :] * column_stride, here


@triton.jit
def _products(
    key_at,
    query_at,
    passed_at,
    overlaps_at,
    weights_at,
    size,
    d,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_rows, rows_here = _places(token, channel, size, d, d, 1)
    in_square, square_here = _places(token, token, size, size, size, 1)
    rows, square = matrix * size * d, matrix * size * size
    key = tl.load(key_at + rows + in_rows, mask=rows_here, other=0.0)
    query = tl.load(query_at + rows + in_rows, mask=rows_here, other=0.0)
    passed = tl.load(passed_at + rows + in_rows, mask=rows_here, other=0.0)
    overlaps = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    weights = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    for index in range(size):
        at = rows + index * d + channel
        one = tl.load(key_at + at, mask=channel < d, other=0.0)
        until = tl.load(passed_at + at, mask=channel < d, other=0.0)
        later = ((token >= index) & (token < size))[:, None]
        left = tl.exp(tl.where(later, passed - until[None, :], 0.0))
        decayed = tl.where(later, left * one[None, :], 0.0)
        own = (token == index)[None, :]
        overlaps = tl.where(own, tl.sum(key * decayed, 1)[:, None], overlaps)
        weights = tl.where(own, tl.sum(query * decayed, 1)[:, None], weights)
    tl.store(overlaps_at + square + in_square, overlaps, mask=square_here)
    tl.store(weights_at + square + in_square, weights, mask=square_here)


@triton.jit
def _products_back(
    key_at,
    query_at,
    passed_at,
    overlaps_pull_at,
    weights_pull_at,
    dkey_at,
    dquery_at,
    dpassed_at,
    size,
    d,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_rows, rows_here = _places(token, channel, size, d, d, 1)
    rows, square = matrix * size * d, matrix * size * size
    key = tl.load(key_at + rows + in_rows, mask=rows_here, other=0.0)
    query = tl.load(query_at + rows + in_rows, mask=rows_here, other=0.0)
    passed = tl.load(passed_at + rows + in_rows, mask=rows_here, other=0.0)
    # Of the later token of a pair, whose keys are the earlier ones; then of these keys.
    dquery = tl.zeros([SIZE, D], dtype=tl.float32)
    dlater = tl.zeros([SIZE, D], dtype=tl.float32)
    dearlier = tl.zeros([SIZE, D], dtype=tl.float32)
    for index in range(size):
        at = rows + index * d + channel
        one = tl.load(key_at + at, mask=channel < d, other=0.0)
        other = tl.load(query_at + at, mask=channel < d, other=0.0)
        until = tl.load(passed_at + at, mask=channel < d, other=0.0)
        # This token as the key of later ones: a column of the products.
        later = (token >= index) & (token < size)
        column = square + token * size + index
        overlap = tl.load(overlaps_pull_at + column, mask=later, other=0.0)
        weight = tl.load(weights_pull_at + column, mask=later, other=0.0)
        left = tl.exp(tl.where(later[:, None], passed - until[None, :], 0.0)) * one[None, :]
        dlater += overlap[:, None] * left
        dquery += weight[:, None] * left
        # This token as the query of earlier ones: a row of the products.
        earlier = token <= index
        row = square + index * size + token
        overlap = tl.load(overlaps_pull_at + row, mask=earlier, other=0.0)
        weight = tl.load(weights_pull_at + row, mask=earlier, other=0.0)
        left = tl.exp(tl.where(earlier[:, None], until[None, :] - passed, 0.0))
        dearlier += (overlap[:, None] * one[None, :] + weight[:, None] * other[None, :]) * left
    dpassed = key * (dlater - dearlier) + query * dquery
    tl.store(dkey_at + rows + in_rows, dlater + dearlier, mask=rows_here)
    tl.store(dquery_at + rows + in_rows, dquery, mask=rows_here)
    tl.store(dpassed_at + rows + in_rows, dpassed, mask=rows_here)


class _DecayedProducts(torch.autograd.Function):
    """Products of keys and queries with earlier keys of their chunk, decayed per channel."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, query: Tensor, passed: Tensor) -> tuple[Tensor, Tensor]:
        key, query, passed = key.contiguous(), query.contiguous(), passed.contiguous()
        overlaps, weights = (key.new_empty(*key.shape[:-1], key.shape[-2]) for _ in range(2))
        _launch_products(_products, (key, query, passed, overlaps, weights))
        ctx.save_for_backward(key, query, passed)
        return overlaps, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, overlaps_pull: Tensor, weights_pull: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = ctx.saved_tensors
        dkey, dquery, dpassed = (torch.empty_like(each) for each in given)
        pulls = (overlaps_pull.contiguous(), weights_pull.contiguous())
        _launch_products(_products_back, (*given, *pulls, dkey, dquery, dpassed))
        return dkey, dquery, dpassed


def _launch_products(kernel: Any, tensors: tuple[Tensor, ...]) -> None:
    """Run a kernel for every chunk and head; the first of the tensors is their keys."""
    chunks, heads, size, d = tensors[0].shape
    kernel[(chunks * heads,)](
        *tensors,
        size,
        d,
        SIZE=max(16, triton.next_power_of_2(size)),
        D=max(16, triton.next_power_of_2(d)),
        num_warps=4,
        num_stages=1,
    )


def decayed_products(key: Tensor, query: Tensor, passed: Tensor) -> tuple[Tensor, Tensor]:
    """Products of keys, then of queries, with earlier keys of their chunk; 0 with later ones.

    `passed` is the decay of every channel from the start of the chunk up to each token.
    """
    return _DecayedProducts.apply(key, query, passed)


@triton.jit
def _walk(
    written_at,
    corrected_at,
    kept_at,
    whole_at,
    before_at,
    offsets_at,
    entering_at,
    new_at,
    last_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(offsets_at + sequence).to(tl.int64)
    count = (tl.load(offsets_at + sequence + 1) - start).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    column = tl.program_id(2) * E + tl.arange(0, E)
    in_state, state_here = _places(channel, column, d, e, e, 1)
    in_value, value_here = _places(token, column, size, e, e, 1)
    in_key, key_here = _places(token, channel, size, d, d, 1)
    in_turned, turned_here = _places(channel, token, d, size, 1, d)
    own = (sequence * heads + head) * d * e
    state = tl.load(before_at + own + in_state, mask=state_here, other=0.0)
    for index in range(count):
        of_head = (start + index) * heads + head
        key, value = of_head * size * d, of_head * size * e
        corrected = tl.load(corrected_at + key + in_key, mask=key_here, other=0.0)
        kept = tl.load(kept_at + key + in_turned, mask=turned_here, other=0.0)
        written = tl.load(written_at + value + in_value, mask=value_here, other=0.0)
        whole = tl.load(whole_at + of_head * d + channel, mask=channel < d, other=0.0)
        tl.store(entering_at + of_head * d * e + in_state, state, mask=state_here)
        new = written - tl.dot(corrected, state, input_precision=PRECISION)
        tl.store(new_at + value + in_value, new, mask=value_here)
        added = tl.dot(kept, new, input_precision=PRECISION)
        state = state * tl.exp(whole)[:, None] + added
    tl.store(last_at + own + in_state, state, mask=state_here)


@triton.jit
def _walk_back(
    entering_pull_at,
    new_pull_at,
    last_pull_at,
    corrected_at,
    kept_at,
    whole_at,
    offsets_at,
    dafter_at,
    dnew_at,
    dbefore_at,
    heads,
    size,
    d,
    e,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(offsets_at + sequence).to(tl.int64)
    count = (tl.load(offsets_at + sequence + 1) - start).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    column = tl.program_id(2) * E + tl.arange(0, E)
    in_state, state_here = _places(channel, column, d, e, e, 1)
    in_value, value_here = _places(token, column, size, e, e, 1)
    in_key, key_here = _places(token, channel, size, d, d, 1)
    in_turned, turned_here = _places(channel, token, d, size, 1, d)
    own = (sequence * heads + head) * d * e
    gradient = tl.load(last_pull_at + own + in_state, mask=state_here, other=0.0)
    for index in range(count):
        of_head = (start + count - 1 - index) * heads + head
        key, value, matrix = of_head * size * d, of_head * size * e, of_head * d * e
        corrected = tl.load(corrected_at + key + in_turned, mask=turned_here, other=0.0)
        kept = tl.load(kept_at + key + in_key, mask=key_here, other=0.0)
        new_pull = tl.load(new_pull_at + value + in_value, mask=value_here, other=0.0)
        pull = tl.load(entering_pull_at + matrix + in_state, mask=state_here, other=0.0)
        whole = tl.load(whole_at + of_head * d + channel, mask=channel < d, other=0.0)
        tl.store(dafter_at + matrix + in_state, gradient, mask=state_here)
        dnew = new_pull + tl.dot(kept, gradient, input_precision=PRECISION)
        tl.store(dnew_at + value + in_value, dnew, mask=value_here)
        read = tl.dot(corrected, dnew, input_precision=PRECISION)
        gradient = gradient * tl.exp(whole)[:, None] + pull - read
    tl.store(dbefore_at + own + in_state, gradient, mask=state_here)


class _Walk(torch.autograd.Function):
    """The state before each chunk, what each chunk writes, and the state after each sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        written: Tensor,
        corrected: Tensor,
        kept: Tensor,
        whole: Tensor,
        before: Tensor,
        counts: Lengths,
        precision: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        written, before = written.contiguous(), before.contiguous()
        corrected, kept, whole = corrected.contiguous(), kept.contiguous(), whole.contiguous()
        entering = before.new_empty(len(written), *before.shape[1:])
        new, last = torch.empty_like(written), torch.empty_like(before)
        given = (written, corrected, kept, whole, before, counts.offsets)
        _launch(_walk, (*given, entering, new, last), corrected, before, precision)
        ctx.save_for_backward(corrected, kept, whole, entering, new)
        ctx.counts, ctx.precision = counts, precision
        return entering, new, last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, entering_pull: Tensor, new_pull: Tensor, last_pull: Tensor
    ) -> tuple[Tensor | None, ...]:
        corrected, kept, whole, entering, new = ctx.saved_tensors
        pulls = [each.contiguous() for each in (entering_pull, new_pull, last_pull)]
        dafter, dnew, dbefore = (torch.empty_like(each) for each in pulls)
        given = (*pulls, corrected, kept, whole, ctx.counts.offsets)
        _launch(_walk_back, (*given, dafter, dnew, dbefore), corrected, dbefore, ctx.precision)
        dcorrected = -dnew @ entering.transpose(2, 3)
        dkept = new @ dafter.transpose(2, 3)
        dwhole = whole.exp() * torch.linalg.vecdot(dafter, entering)
        return dnew, dcorrected, dkept, dwhole, dbefore, None, None


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], corrected: Tensor, states: Tensor, precision: str
) -> None:
    """Run a walk over every sequence, head and block of columns."""
    size, (sequences, heads, d, e) = corrected.shape[2], states.shape
    wide = max(d, size) > 64
    kernel[(sequences, heads, triton.cdiv(e, COLUMNS))](
        *tensors,
        heads,
        size,
        d,
        e,
        SIZE=max(16, triton.next_power_of_2(size)),
        D=max(16, triton.next_power_of_2(d)),
        E=COLUMNS,
        PRECISION=precision,
        num_warps=8 if wide else 4,
        # The next chunk is loaded during the products of this one, where there is room for it.
        num_stages=1 if wide else 2,
    )


def walk_over_chunks(
    written: Tensor,
    corrected: Tensor,
    kept: Tensor,
    whole: Tensor,
    before: Tensor,
    counts: Lengths,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk, what each chunk writes, and the state after each sequence.

    Given are for every chunk and head what its tokens write if the state is zero, how they correct
    that, how they are kept, and the decay of every channel; the states before the sequences; and
    how many chunks each sequence has.
    """
    return _Walk.apply(written, corrected, kept, whole, before, counts, precision)
