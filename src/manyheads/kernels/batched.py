"""The definition in few large products: sequences of similar length, padded into blocks.

It computes what fused kernels do not: gradients of a learned bias or sink, dropout on the CPU,
Shaw's value vectors. It also takes many short sequences of different lengths, for which a fused
kernel needs a call each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts, Values
from manyheads.kernels.fused import result_of
from manyheads.kernels.reference import in_chunks, rows_per_chunk
from manyheads.parts.masks import Causal, Full, Mask
from manyheads.parts.positions.disentangled import DisentangledBias
from manyheads.parts.positions.relative import Bias, BucketBias, ShawBias
from manyheads.ragged import Lengths

# Padding that takes as long as one more block, in multiply-adds of queries with keys. A GPU has
# done much before it has been told of another block, so blocks and chunks are larger there.
PADDING_PER_BLOCK, CUDA_PADDING_PER_BLOCK = 2**23, 2**31
CUDA_CHUNKS_AT_ONCE = 16
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
    layout = _layout(request, q.shape[1], k.shape[1], q.shape[2])
    blocks, queries, keys, bias = layout.blocks, layout.queries, layout.keys, request.bias
    nothing: Sequence[Tensor | None] = [None] * len(blocks)
    by_query, by_key = nothing, nothing
    if isinstance(bias, ShawBias):
        by_query = queries.spread(bias.products)
    elif isinstance(bias, DisentangledBias):
        by_query = nothing if bias.by_query is None else queries.spread(bias.by_query)
        by_key = nothing if bias.by_key is None else keys.spread(bias.by_key)
    # Autocast multiplies in half precision whatever the products are of.
    half = torch.is_autocast_enabled(q.device.type)
    query, key, value = (q, k, v) if half else (q.float(), k.float(), v.float())
    query = query if request.scale == 1 else query * request.scale
    heads = (queries.spread(query), keys.spread(key), keys.spread(value))
    by_block = zip(blocks, layout.key_counts, *heads, by_query, by_key, strict=True)
    pieces = [
        _attend_block(block, _Padded(*tensors), counts, request)
        for block, counts, *tensors in by_block
    ]
    no_output = v.new_zeros(0, q.shape[1], v.shape[2])
    output = queries.collect([output for output, _ in pieces], no_output).to(v.dtype)
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


@dataclass(frozen=True, slots=True, eq=False)
class _BlockLayout:
    """The blocks of a batch, and where queries and keys are in them.

    `key_counts` are the lengths of the keys in a block, None if all fill it.
    """

    blocks: list[_Block]
    queries: "_Slots"
    keys: "_Slots"
    key_counts: list[Int[Tensor, "_ 1 1"] | None]


def _layout(request: Request, heads: int, kv_heads: int, size: int) -> _BlockLayout:
    """Computed once for all layers with the same lengths: writing its tensors waits for a GPU."""
    queries, keys = request.queries, request.keys
    any_shift = request.bias is None and isinstance(request.mask, Full)
    sizes = (any_shift, heads, kv_heads, size)
    if torch.compiler.is_compiling() or request.uniform or not (queries.tight and keys.tight):
        return _make_layout(queries, keys, *sizes)
    return _cached_layout(queries.each, keys.each, queries.offsets.device, *sizes)


@lru_cache(maxsize=16)
def _cached_layout(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    device: torch.device,
    any_shift: bool,
    heads: int,
    kv_heads: int,
    size: int,
) -> _BlockLayout:
    # It is cached for later batches, which may need gradients.
    with torch.inference_mode(False):
        lengths = Lengths.of(queries, device), Lengths.of(keys, device)
        return _make_layout(*lengths, any_shift, heads, kv_heads, size)


def _make_layout(
    queries: Lengths, keys: Lengths, any_shift: bool, heads: int, kv_heads: int, size: int
) -> _BlockLayout:
    device = queries.offsets.device
    per_block = CUDA_PADDING_PER_BLOCK if device.type == "cuda" else PADDING_PER_BLOCK
    most_padding = per_block // (heads * size)
    chunks = _chunks_at_once(device)
    blocks = _blocks(queries.each, keys.each, any_shift, most_padding, heads, chunks)
    key_counts: list[Tensor | None] = []
    for block in blocks:
        counts = [keys.each[sequence] for sequence in block.sequences]
        padded = min(counts) < block.keys
        key_counts.append(torch.tensor(counts, device=device)[:, None, None] if padded else None)
    longest = [block.queries for block in blocks], [block.keys for block in blocks]
    return _BlockLayout(
        blocks=blocks,
        queries=_Slots.of(queries, blocks, longest[0], (heads,)),
        keys=_Slots.of(keys, blocks, longest[1], (heads, kv_heads)),
        key_counts=key_counts,
    )


def _chunks_at_once(device: torch.device) -> int:
    return CUDA_CHUNKS_AT_ONCE if device.type == "cuda" else 1


def _blocks(
    queries: Sequence[int],
    keys: Sequence[int],
    any_shift: bool,
    most_padding: int,
    heads: int,
    chunks: int,
) -> list[_Block]:
    """Sequences by length; a block ends where its padding costs more than a block.

    Several sequences have no more scores than so many chunks.
    """
    shift = [0 if any_shift else s - t for t, s in zip(queries, keys, strict=True)]
    order = _descending(list(zip(shift, keys, queries, strict=True)))
    groups: list[list[int]] = []
    useful = widest = 0
    for index in order:
        pairs, wide = queries[index] * keys[index], max(widest, queries[index])
        if groups and shift[index] == shift[groups[-1][0]]:
            count, deep = len(groups[-1]), keys[groups[-1][0]]
            padding = wide * deep * (count + 1) - useful - pairs
            most = rows_per_chunk(heads * wide, deep, chunks)
            if padding <= most_padding and count < most:
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
    """Where each token is in the blocks, which lie end to end, each as sequences x heads x tokens.

    `tokens` are their rows in the packed tensor, None if they are all rows. `places` are, by the
    number of heads, the rows of each head of each token in the blocks, and the head and token of
    each row there; None if the tokens are one block without padding.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Int[Tensor, " n"] | None
    places: dict[int, tuple[Int[Tensor, " nh"], Int[Tensor, " slots"]]] | None

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        blocks: Sequence[_Block],
        longest: Sequence[int],
        heads: Sequence[int],
    ) -> "_Slots":
        shapes = tuple(
            (len(block.sequences), length) for block, length in zip(blocks, longest, strict=True)
        )
        device, owner = lengths.positions.device, lengths.sequence_of_token
        tokens = None
        if not lengths.tight:
            starts = torch.tensor(lengths.starts, dtype=torch.long, device=device)
            tokens = starts[owner] + lengths.positions
        if lengths.uniform and len(blocks) == 1:
            return cls(shapes, tokens, None)
        starts_in = [[0, 0] for _ in range(len(lengths))]
        ends = (0, *accumulate(count * length for count, length in shapes))
        for block, (_, length), start in zip(blocks, shapes, ends[:-1], strict=True):
            for row, sequence in enumerate(block.sequences):
                starts_in[sequence] = [start + row * length, length]
        # One tensor, since writing it waits for a GPU.
        table = torch.tensor(starts_in, dtype=torch.long, device=device).view(len(starts_in), 2)
        first, length_of = table[owner].unsqueeze(2).unbind(1)
        places = {}
        for count in dict.fromkeys(heads):
            head = torch.arange(count, device=device)
            slots = (first * count + head * length_of + lengths.positions.unsqueeze(1)).flatten()
            total = slots.shape[0]
            # The row behind the last is zero.
            source = torch.full((ends[-1] * count,), total, device=device)
            source = source.index_copy_(0, slots, torch.arange(total, device=device))
            places[count] = slots, source
        return cls(shapes, tokens, places)

    def spread(self, x: Float[Tensor, "n h d"]) -> list[Float[Tensor, "b h t d"]]:
        """The tokens of each block, with zeros as padding."""
        x = x if self.tokens is None else x[self.tokens]
        if self.places is None:
            return [x.unflatten(0, self.shapes[0]).transpose(1, 2)]
        heads, size = x.shape[1:]
        sizes = [count * heads * length for count, length in self.shapes]
        slots, source = self.places[heads]
        # A compiler finds its own way back.
        compiling = torch.compiler.is_compiling()
        placed: Tensor = _spread_rows(x, source) if compiling else _Spread.apply(x, slots, source)  # type: ignore[no-untyped-call]
        # The gradient of a split is a copy.
        pieces = placed.split(sizes) if len(sizes) > 1 else [placed] * len(sizes)
        return [
            piece.view(count, heads, length, size)
            for piece, (count, length) in zip(pieces, self.shapes, strict=True)
        ]

    def collect(self, pieces: list[Tensor], empty: Tensor) -> Float[Tensor, "n h *rest"]:
        """The tokens in their order, without the padding; `empty` if there are none."""
        if self.places is None:
            return pieces[0].transpose(1, 2).flatten(0, 1)
        flat = [piece.flatten(0, 2) for piece in pieces] or [empty.flatten(0, 1)]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        heads = empty.shape[1]
        slots, source = self.places[heads]
        if torch.compiler.is_compiling():
            return _collect_rows(joined, heads, slots)
        return _Collected.apply(joined, heads, slots, source)  # type: ignore[no-untyped-call]


def _spread_rows(
    x: Shaped[Tensor, "n h *rest"], source: Int[Tensor, " slots"]
) -> Shaped[Tensor, "slots *rest"]:
    """Heads of tokens as the rows of blocks, with zeros elsewhere."""
    total = x.shape[0] * x.shape[1]
    rows = x.new_empty(total + 1, *x.shape[2:])
    rows[:total].view(x.shape).copy_(x)
    rows[total:].zero_()
    return rows.index_select(0, source)


def _collect_rows(
    rows: Shaped[Tensor, "slots *rest"], heads: int, slots: Int[Tensor, " nh"]
) -> Shaped[Tensor, "n h *rest"]:
    return rows.index_select(0, slots).unflatten(0, (-1, heads))


class _Spread(torch.autograd.Function):
    """Heads of tokens to the rows of blocks.

    Both directions select rows, which costs less than to add or copy to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Shaped[Tensor, "n h *rest"],
        slots: Int[Tensor, " nh"],
        source: Int[Tensor, " slots"],
    ) -> Shaped[Tensor, "slots *rest"]:
        ctx.save_for_backward(slots, source)
        ctx.heads = x.shape[1]
        return _spread_rows(x, source)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Collected.apply(*gradient, ctx.heads, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


class _Collected(torch.autograd.Function):
    """The rows of blocks back to heads of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Shaped[Tensor, "slots *rest"],
        heads: int,
        slots: Int[Tensor, " nh"],
        source: Int[Tensor, " slots"],
    ) -> Shaped[Tensor, "n h *rest"]:
        ctx.save_for_backward(slots, source)
        return _collect_rows(rows, heads, slots)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Spread.apply(*gradient, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]


class _Padded(NamedTuple):
    """The tensors of a block; for biases, also the scores of queries and keys with distances."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    by_query: Float[Tensor, "b h t distances"] | None
    by_key: Float[Tensor, "b h s distances"] | None


def _attend_block(
    block: _Block,
    tensors: _Padded,
    key_counts: Int[Tensor, "b 1 1"] | None,
    request: Request,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """A block of one long sequence is computed in chunks of queries."""
    q, _, v, _, _ = tensors
    if not block.keys or not block.queries:
        nothing = v.new_zeros(*q.shape[:3], v.shape[3])
        return nothing, torch.full(q.shape[:3], -torch.inf, device=q.device)
    step = rows_per_chunk(q.shape[1] * len(q), block.keys, _chunks_at_once(q.device))
    recompute = torch.is_grad_enabled() and block.keys > KEPT_KEYS
    chunk, rng = partial(_rows, block, tensors, key_counts, request), request.dropout > 0
    pieces = in_chunks(chunk, block.queries, step, recompute=recompute, rng=rng)
    output, lse = (
        parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in zip(*pieces, strict=True)
    )
    return output, lse


def _rows(
    block: _Block,
    tensors: _Padded,
    key_counts: Int[Tensor, "b 1 1"] | None,
    request: Request,
    rows: slice,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    q, k, v, by_query, by_key = tensors
    q = q[:, :, rows]
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    by_head = (q.shape[0], heads, q.shape[2], -1)
    query = rearrange(q, "b (g r) t d -> b g (r t) d", r=shared)
    # Autocast would leave them in half precision.
    scores = (query @ k.mT).float()
    if request.softcap is not None:
        scores = request.softcap * (scores / request.softcap).tanh()
    first = rows.start + block.shift
    position = torch.arange(first, rows.stop + block.shift, device=q.device)[:, None]
    if request.bias is not None:
        by_query = None if by_query is None else by_query[:, :, rows]
        bias = _bias(request.bias, position, block.keys, first, by_query, by_key, heads)
        scores += bias.reshape(-1, *scores.shape[1:])
    seen = _seen(block, position, key_counts, request.mask)
    blind = None
    if seen is not None:
        if not _sees_some(block, request):
            # A row without visible keys is computed as if it saw all, and its output is zero.
            blind = ~seen.any(-1)
            seen = seen | blind.unsqueeze(-1)
        added = torch.where(seen, 0.0, -torch.inf)
        if shared > 1 and added.shape[1] > 1:
            added = added.repeat(1, shared, 1)
        scores += added.unsqueeze(1)
    pattern = scores.softmax(-1)
    dropped = F.dropout(pattern, request.dropout) if request.dropout else pattern
    output = dropped @ v
    if isinstance(request.bias, ShawBias) and request.bias.values is not None:
        output = output + _by_distance(dropped, request.bias, heads, position, first)
    output = output.reshape(by_head)
    if blind is not None:
        output = output.masked_fill(blind[:, None, :, None], 0.0)
    if not request.needs_lse:
        # Nobody reads it.
        return output, output.new_zeros(()).expand(output.shape[:3])
    lse = scores.logsumexp(-1).reshape(by_head[:3])
    if blind is not None:
        lse = lse.masked_fill(blind.unsqueeze(1), -torch.inf)
    return output, lse


def _bias(
    bias: Bias,
    query: Int[Tensor, "t 1"],
    keys: int,
    first: int,
    by_query: Float[Tensor, "b h t distances"] | None,
    by_key: Float[Tensor, "b h s distances"] | None,
    heads: int,
) -> Float[Tensor, "#b h t s"]:
    """Learned biases are selected along one axis: their gradients are sums over runs of it."""
    if isinstance(bias, ShawBias):
        assert by_query is not None
        if by_query.is_cuda and not torch.compiler.is_compiling():
            pairs: Tensor = _Pairs.apply(by_query, keys, first, bias.reach)  # type: ignore[no-untyped-call]
            return pairs
        key = torch.arange(keys, device=query.device)
        return _selected(by_query, bias.distance(query, key))
    # Key position minus query position.
    distance = torch.arange(keys, device=query.device) - query
    if isinstance(bias, DisentangledBias):
        index = bias.column(distance)
        # A key's scores are selected for each of its queries.
        terms = [] if by_query is None else [_selected(by_query, index)]
        terms += [] if by_key is None else [_selected(by_key, index.T).mT]
        return sum(terms[1:], terms[0])
    if isinstance(bias, BucketBias):
        rows, columns = distance.shape
        # A bucket per diagonal, not per pair.
        diagonal = torch.arange(1 - rows, columns, device=distance.device) - first
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
    products: Float[Tensor, "b h t distances"], index: Int[Tensor, "t s"]
) -> Float[Tensor, "b h t s"]:
    return products.gather(-1, index.expand(*products.shape[:2], *index.shape))


def _seen(
    block: _Block,
    query: Int[Tensor, "t 1"],
    key_counts: Int[Tensor, "b 1 1"] | None,
    mask: Mask,
) -> Bool[Tensor, "#b #t s"] | None:
    """Which keys the queries see; None if all of them."""
    padded = key_counts is not None
    if isinstance(mask, Full) and not padded:
        return None
    key = torch.arange(block.keys, device=query.device)
    if key_counts is None:
        # Equal counts are one number, which a recorded CUDA graph can write.
        key_counts = torch.full((1, 1, 1), block.keys, device=query.device)
    if isinstance(mask, Full):
        return key < key_counts
    seen = mask.allows(query, key, key_counts[:1] if mask.independent_of_length else key_counts)
    # Only padding sees the padding behind its sequence if no query looks ahead.
    return seen & (key < key_counts) if padded and mask.reach.after > 0 else seen


def _sees_some(block: _Block, request: Request) -> bool:
    """Whether certainly every query sees a key."""
    if not isinstance(request.mask, Full | Causal) or block.shift < 0:
        return False
    return all(request.keys.each[sequence] > 0 for sequence in block.sequences)


def _by_distance(
    pattern: Float[Tensor, "b g rt s"],
    bias: ShawBias,
    heads: int,
    query: Int[Tensor, "t 1"],
    first: int,
) -> Float[Tensor, "b g rt e"]:
    """Shaw's value vectors, weighted by the mass that falls on each distance."""
    assert bias.values is not None
    by_head = pattern.reshape(len(pattern), heads, -1, pattern.shape[-1])
    if pattern.is_cuda and not torch.compiler.is_compiling():
        mass: Tensor = _Mass.apply(by_head, first, bias.reach)  # type: ignore[no-untyped-call]
    else:
        key = torch.arange(by_head.shape[-1], device=query.device)
        index = bias.distance(query, key).expand_as(by_head)
        mass = by_head.new_zeros(*by_head.shape[:3], len(bias.values)).scatter_add(
            -1, index, by_head
        )
    return (mass @ bias.values.float()).reshape(*pattern.shape[:3], -1)


class _Pairs(torch.autograd.Function):
    """From the score of each query with each distance to that with each key.

    Beyond `reach` all distances are one; the first query is at position `first`. The gradient is a
    sum over diagonals, so that no thread of a GPU waits for another; a CPU looks up faster.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Float[Tensor, "b h t distances"], keys: int, first: int, reach: int
    ) -> Float[Tensor, "b h t s"]:
        ctx.place = first, reach
        low, near, far, width = _diagonals(scores.shape[2], keys, first, reach)
        wide = scores.new_empty(*scores.shape[:3], width)
        wide[..., :near] = scores[..., :1]
        wide[..., near:far] = scores[..., low + near : low + far]
        wide[..., far:] = scores[..., -1:]
        return _skewed(wide, keys)

    @staticmethod
    def backward(ctx: Any, *gradient: Float[Tensor, "b h t s"]) -> tuple[Tensor | None, ...]:
        return _Mass.apply(*gradient, *ctx.place), None, None, None  # type: ignore[no-untyped-call]


class _Mass(torch.autograd.Function):
    """From the weight of each query on each key to that on each distance."""

    @staticmethod
    def forward(
        ctx: Any, weights: Float[Tensor, "b h t s"], first: int, reach: int
    ) -> Float[Tensor, "b h t distances"]:
        queries, keys = weights.shape[2:]
        ctx.place = keys, first, reach
        low, near, far, width = _diagonals(queries, keys, first, reach)
        wide = weights.new_zeros(*weights.shape[:3], width)
        _skewed(wide, keys).copy_(weights)
        mass = weights.new_zeros(*weights.shape[:3], 2 * reach + 1)
        mass[..., low + near : low + far] = wide[..., near:far]
        mass[..., 0] += wide[..., :near].sum(-1)
        mass[..., -1] += wide[..., far:].sum(-1)
        return mass

    @staticmethod
    def backward(
        ctx: Any, *gradient: Float[Tensor, "b h t distances"]
    ) -> tuple[Tensor | None, ...]:
        return _Pairs.apply(*gradient, *ctx.place), None, None  # type: ignore[no-untyped-call]


def _diagonals(queries: int, keys: int, first: int, reach: int) -> tuple[int, int, int, int]:
    """The diagonals of queries x keys: the column of the lowest, and which are within reach."""
    low, width = 1 - queries - first + reach, queries + keys - 1
    near = min(max(-low, 0), width)
    return low, near, max(near, min(2 * reach + 1 - low, width)), width


def _skewed(wide: Float[Tensor, "b h t diagonals"], keys: int) -> Float[Tensor, "b h t s"]:
    """Diagonals as rows of pairs: each row starts one column before the row above it."""
    batch, heads, queries, width = wide.shape
    strides = (heads * queries * width, queries * width, width - 1, 1)
    return wide.as_strided((batch, heads, queries, keys), strides, queries - 1)
