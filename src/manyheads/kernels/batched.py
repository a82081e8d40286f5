"""The definition in few large products: sequences of similar length, padded into blocks.

It computes what fused kernels do not: gradients of a learned bias or sink, dropout on the CPU,
Shaw's value vectors. It also takes many short sequences of different lengths, for which a fused
kernel needs a call each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts, Values
from manyheads.kernels.fused import result_of
from manyheads.kernels.reference import in_chunks, rows_per_chunk
from manyheads.parts.masks import Full
from manyheads.parts.positions.disentangled import DisentangledBias
from manyheads.parts.positions.relative import Bias, BucketBias, ShawBias
from manyheads.ragged import Lengths

# Padding that takes as long as one more block, in multiply-adds of queries with keys. A GPU has
# done much before it has been told of another block.
PADDING_PER_BLOCK, CUDA_PADDING_PER_BLOCK = 2**23, 2**31
# The pattern of a query with at most so many keys is kept for the backward pass and that of a
# longer one is recomputed, so memory is linear in the tokens.
KEPT_KEYS = 256


def cannot(request: Request, facts: TensorFacts) -> str | None:  # noqa: ARG001, part of the contract
    if request.want.pattern:
        return "a block of padded sequences is not a pattern"
    if request.keys.filled is not None:
        return "the lengths of the keys are not known on the host"
    return None


def attend(q: Queries, k: Keys, v: Values, request: Request) -> AttentionResult:
    blocks = _blocks(request, *q.shape[1:])
    queries = _Slots.of(request.queries, blocks, [block.queries for block in blocks])
    keys = _Slots.of(request.keys, blocks, [block.keys for block in blocks])
    bias = request.bias
    nothing: Sequence[Tensor | None] = [None] * len(blocks)
    by_query, by_key = nothing, nothing
    if isinstance(bias, ShawBias):
        by_query = queries.spread(bias.products)
    elif isinstance(bias, DisentangledBias):
        by_query = nothing if bias.by_query is None else queries.spread(bias.by_query)
        by_key = nothing if bias.by_key is None else keys.spread(bias.by_key)
    heads = (queries.spread(q), keys.spread(k), keys.spread(v))
    by_block = zip(blocks, *heads, by_query, by_key, strict=True)
    pieces = [_attend_block(block, _Padded(*tensors), request) for block, *tensors in by_block]
    no_output = v.new_zeros(0, q.shape[1], v.shape[2])
    output = queries.collect([output for output, _ in pieces], no_output)
    if not request.needs_lse:
        return AttentionResult(output)
    lse = queries.collect([lse for _, lse in pieces], q.new_zeros(0, q.shape[1]).float())
    return result_of(output, lse, request)


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences that are computed together, padded behind to the longest.

    The first query is at position `shift`, since queries are aligned to the end of their keys.
    """

    sequences: tuple[int, ...]
    queries: int
    keys: int
    shift: int


def _blocks(request: Request, heads: int, size: int) -> list[_Block]:
    """Sequences by length; a block ends where its padding costs more than a block."""
    queries, keys = request.queries.each, request.keys.each
    any_shift = request.bias is None and isinstance(request.mask, Full)
    shift = [0 if any_shift else s - t for t, s in zip(queries, keys, strict=True)]
    order = _descending(list(zip(shift, keys, queries, strict=True)))
    per_block = CUDA_PADDING_PER_BLOCK if request.queries.offsets.is_cuda else PADDING_PER_BLOCK
    most_padding = per_block // (heads * size)
    groups: list[list[int]] = []
    useful = widest = 0
    for index in order:
        pairs, wide = queries[index] * keys[index], max(widest, queries[index])
        if groups and shift[index] == shift[groups[-1][0]]:
            count, deep = len(groups[-1]), keys[groups[-1][0]]
            padding = wide * deep * (count + 1) - useful - pairs
            if padding <= most_padding and count < rows_per_chunk(heads * wide, deep):
                groups[-1].append(index)
                useful, widest = useful + pairs, wide
                continue
        groups.append([index])
        useful, widest = pairs, queries[index]
    return [
        _Block(
            sequences=tuple(sorted(group)),
            queries=max([queries[index] for index in group]),
            keys=keys[group[0]],
            shift=shift[group[0]],
        )
        for group in groups
    ]


def _descending(sizes: Sequence[tuple[int, int, int]]) -> Sequence[int]:
    """Places in the order of their sizes, the largest first and equal ones as they come."""
    if not torch.compiler.is_compiling():
        return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    # The compiler compares sizes that it leaves open, and ends its graph where they are sorted.
    order: list[int] = []
    for place, size in enumerate(sizes):
        larger = 0
        while larger < len(order) and not size > sizes[order[larger]]:
            larger += 1
        order.insert(larger, place)
    return order


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Where each token is in the blocks, which lie end to end.

    `tokens` are their rows in the packed tensor and `slots` those in the blocks, None if equal.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Int[Tensor, " n"] | None
    slots: Int[Tensor, " n"] | None

    @classmethod
    def of(cls, lengths: Lengths, blocks: Sequence[_Block], longest: Sequence[int]) -> "_Slots":
        shapes = tuple(
            (len(block.sequences), length) for block, length in zip(blocks, longest, strict=True)
        )
        device = lengths.positions.device
        tokens = None
        if not lengths.tight:
            starts = torch.tensor(lengths.starts, dtype=torch.long, device=device)
            tokens = starts[lengths.sequence_of_token] + lengths.positions
        if lengths.uniform and len(blocks) == 1:
            return cls(shapes, tokens, None)
        first = [0] * len(lengths)
        ends = (0, *accumulate(count * length for count, length in shapes))
        for block, (_, length), start in zip(blocks, shapes, ends[:-1], strict=True):
            for row, sequence in enumerate(block.sequences):
                first[sequence] = start + row * length
        starts = torch.tensor(first, dtype=torch.long, device=device)
        return cls(shapes, tokens, starts[lengths.sequence_of_token] + lengths.positions)

    def spread(self, x: Float[Tensor, "n h d"]) -> list[Float[Tensor, "b t h d"]]:
        """The tokens of each block, with zeros as padding."""
        sizes = [count * length for count, length in self.shapes]
        x = x if self.tokens is None else x[self.tokens]
        if self.slots is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, self.slots, x)
        pieces = x.split(sizes) if len(sizes) > 1 else [x] * len(sizes)
        return [piece.unflatten(0, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def collect(self, pieces: list[Tensor], empty: Tensor) -> Float[Tensor, "n *rest"]:
        """The tokens in their order, without the padding; `empty` if there are none."""
        joined = torch.cat(pieces or [empty]) if len(pieces) != 1 else pieces[0]
        return joined if self.slots is None else joined.index_select(0, self.slots)


class _Padded(NamedTuple):
    """The tensors of a block; for biases, also the scores of queries and keys with distances."""

    q: Float[Tensor, "b t h d"]
    k: Float[Tensor, "b s g d"]
    v: Float[Tensor, "b s g e"]
    by_query: Float[Tensor, "b t h distances"] | None
    by_key: Float[Tensor, "b s h distances"] | None


def _attend_block(
    block: _Block, tensors: _Padded, request: Request
) -> tuple[Float[Tensor, "bt h e"], Float[Tensor, "bt h"]]:
    """A block of one long sequence is computed in chunks of queries."""
    q, _, v, _, _ = tensors
    if not block.keys or not block.queries:
        nothing = v.new_zeros(len(q) * block.queries, q.shape[2], v.shape[3])
        return nothing, torch.full(nothing.shape[:2], -torch.inf, device=q.device)
    step = rows_per_chunk(q.shape[2] * len(q), block.keys)
    recompute = torch.is_grad_enabled() and block.keys > KEPT_KEYS
    chunk, rng = partial(_rows, block, tensors, request), request.dropout > 0
    pieces = in_chunks(chunk, block.queries, step, recompute=recompute, rng=rng)
    output, lse = (
        parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*pieces, strict=True)
    )
    return output.flatten(0, 1), lse.flatten(0, 1)


def _rows(
    block: _Block, tensors: _Padded, request: Request, rows: slice
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h"]]:
    q, k, v, by_query, by_key = tensors
    shared = q.shape[2] // k.shape[2]
    query = rearrange(q[:, rows].float() * request.scale, "b t (g r) d -> b g (r t) d", r=shared)
    key, value = (rearrange(x.float(), "b s g d -> b g s d") for x in (k, v))
    # Autocast would leave them in half precision.
    scores = (query @ key.transpose(2, 3)).float()
    if request.softcap is not None:
        scores = request.softcap * (scores / request.softcap).tanh()
    position = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + block.shift
    # Key position minus query position.
    distance = torch.arange(block.keys, device=q.device) - position
    if request.bias is not None:
        by_query = None if by_query is None else by_query[:, rows]
        bias = _bias(request.bias, distance, by_query, by_key, q.shape[2])
        scores += rearrange(bias, "b (g r) t s -> b g (r t) s", r=shared)
    seen = _seen(block, position, request)
    blind = None
    if seen is not None:
        blind = ~seen.any(-1)
        # A row without visible keys is computed as if it saw all, and its output is zero.
        hidden = ~seen & ~blind.unsqueeze(-1)
        added = scores.new_zeros(seen.shape).masked_fill_(hidden, -torch.inf)
        scores += added.repeat(1, shared, 1).unsqueeze(1)
    pattern = scores.softmax(-1)
    dropped = F.dropout(pattern, request.dropout) if request.dropout else pattern
    mixed = dropped @ value
    if isinstance(request.bias, ShawBias) and request.bias.values is not None:
        mixed = mixed + _by_distance(dropped, request.bias, distance, shared)
    output = rearrange(mixed, "b g (r t) e -> b t (g r) e", r=shared)
    if blind is not None:
        output = output.masked_fill(blind[:, :, None, None], 0.0)
    if not request.needs_lse:
        # Nobody reads it.
        return output.to(v.dtype), output.new_zeros(()).expand(output.shape[:3])
    lse = rearrange(scores.logsumexp(-1), "b g (r t) -> b t (g r)", r=shared)
    if blind is not None:
        lse = lse.masked_fill(blind.unsqueeze(-1), -torch.inf)
    return output.to(v.dtype), lse


def _bias(
    bias: Bias,
    distance: Int[Tensor, "t s"],
    by_query: Tensor | None,
    by_key: Tensor | None,
    heads: int,
) -> Float[Tensor, "#b h t s"]:
    """Learned biases are selected along one axis: their gradients are sums over runs of it."""
    if isinstance(bias, ShawBias):
        assert by_query is not None
        index = bias.distance(torch.zeros_like(distance), distance)
        return _selected(by_query, index)
    if isinstance(bias, DisentangledBias):
        index = bias.column(distance)
        # A key's scores are selected for each of its queries.
        terms = [] if by_query is None else [_selected(by_query, index)]
        terms += [] if by_key is None else [_selected(by_key, index.T).mT]
        return sum(terms[1:], terms[0])
    if isinstance(bias, BucketBias):
        rows, columns = distance.shape
        # A bucket per diagonal, not per pair.
        diagonal = torch.arange(1 - rows, columns, device=distance.device) + distance[0, 0]
        bucket = bias.config.bucket(diagonal)
        if distance.is_cuda:
            # Threads would wait for each other where they all add gradients to the same few
            # cells of the table: each of these sums a diagonal.
            return bias.table.T.index_select(1, bucket).unfold(1, columns, 1).flip(1)[None]
        bucket = bucket[distance - diagonal[0]]
        return bias.table.T.index_select(1, bucket.flatten()).unflatten(1, distance.shape)[None]
    head = torch.arange(heads, device=distance.device)[:, None, None]
    zero = torch.zeros_like(distance)
    return bias.score(head, zero, zero, distance)[None]


def _selected(
    products: Float[Tensor, "b t h distances"], index: Int[Tensor, "t s"]
) -> Float[Tensor, "b h t s"]:
    table = rearrange(products, "b t h distances -> b h t distances")
    return table.gather(-1, index.expand(*table.shape[:2], *index.shape))


def _seen(
    block: _Block, query: Int[Tensor, "t 1"], request: Request
) -> Bool[Tensor, "#b t s"] | None:
    """Which keys the queries see; None if all of them."""
    lengths = [request.keys.each[sequence] for sequence in block.sequences]
    padded = min(lengths) < block.keys
    mask = request.mask
    if isinstance(mask, Full) and not padded:
        return None
    # Equal counts are one number, which a recorded CUDA graph can write.
    key_counts = (
        torch.tensor(lengths, device=query.device)[:, None, None]
        if padded
        else torch.full((1, 1, 1), block.keys, device=query.device)
    )
    key = torch.arange(block.keys, device=query.device)
    seen = mask.allows(query, key, key_counts[:1] if mask.independent_of_length else key_counts)
    # Only padding sees the padding behind its sequence if no query looks ahead.
    return seen & (key < key_counts) if padded and mask.reach.after > 0 else seen


def _by_distance(
    pattern: Float[Tensor, "b g rt s"], bias: ShawBias, distance: Int[Tensor, "t s"], shared: int
) -> Float[Tensor, "b g rt e"]:
    """Shaw's value vectors, weighted by the mass that falls on each distance."""
    assert bias.values is not None
    index = bias.distance(torch.zeros_like(distance), distance).repeat(shared, 1)
    mass = pattern.new_zeros(*pattern.shape[:3], bias.values.shape[0])
    mass = mass.scatter_add(-1, index.expand_as(pattern), pattern)
    return mass @ bias.values.float()
