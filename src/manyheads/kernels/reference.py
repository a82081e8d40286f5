"""The definition of attention in float32, and the kernel that forms the n x n pattern."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts, Values
from manyheads.parts.head_groups import key_head_of_query
from manyheads.parts.masks import visible
from manyheads.parts.positions.relative import ShawBias
from manyheads.taps import Patterns

LARGEST_CHUNK = 2**22

Piece = TypeVar("Piece")
# The scores or the pattern of some queries of one sequence.
Scores = Float[Tensor, "h t s"]


def cannot(request: Request, facts: TensorFacts) -> str | None:  # noqa: ARG001, part of the contract
    """The definition supports everything."""
    return None


def attend(q: Queries, k: Keys, v: Values, request: Request) -> AttentionResult:
    """At once if the pattern is wanted, otherwise in chunks of queries so memory stays linear."""
    no_output, no_lse = q.new_zeros(0, q.shape[1], v.shape[2]), q.new_zeros(0, q.shape[1]).float()
    if request.want.pattern:
        seen, lse = patterns(scores(q, k, request), request), None
        if request.want.lse:
            by_sequence = [_softmax(scored, request)[1].T for scored in scores(q, k, request).each]
            lse = torch.cat([no_lse, *by_sequence])
        # An empty batch has no pattern to take the number of heads from.
        output = mix(seen, v, request).reshape(*q.shape[:2], v.shape[2])
        return AttentionResult(output, lse, seen)
    grad = TensorFacts.of(q, k, v, request).grad
    pieces = [(no_output, no_lse)]
    for sequence, length in enumerate(request.queries.each):
        step = rows_per_chunk(q.shape[1], request.keys.each[sequence])
        chunk = partial(_chunk, q, k, v, request, sequence)
        pieces += in_chunks(chunk, length, step, recompute=grad)
    outputs, lses = zip(*pieces, strict=True)
    return AttentionResult(torch.cat(outputs), torch.cat(lses) if request.want.lse else None)


def in_chunks(
    function: Callable[[slice], Piece], total: int, step: int, *, recompute: bool, rng: bool = True
) -> list[Piece]:
    """The results for `step` of `total` rows at a time.

    With `recompute` the backward pass computes them again, so that no pattern is stored; `rng` says
    whether that takes the same random numbers.
    """
    chunks = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    if not recompute:
        return [function(rows) for rows in chunks]
    return [
        checkpoint(function, rows, use_reentrant=False, preserve_rng_state=rng) for rows in chunks
    ]


def scores(q: Queries, k: Keys, request: Request) -> Patterns:
    """Scaled products and bias, -inf where the mask hides a key, for every sequence."""
    lengths = enumerate(request.queries.each)
    return Patterns(tuple(_scores(q, k, request, i, slice(0, length)) for i, length in lengths))


def patterns(scored: Patterns, request: Request) -> Patterns:
    """Softmax over the keys, and over the sink where there is one."""
    return Patterns(tuple(_softmax(sequence, request)[0] for sequence in scored.each))


def mix(seen: Patterns, v: Values, request: Request) -> Float[Tensor, "n h e"]:
    """The output of each head with these patterns."""
    mixed = [
        _mix(pattern, v, request, sequence, slice(0, pattern.shape[1]))
        for sequence, pattern in enumerate(seen.each)
    ]
    return torch.cat(mixed) if mixed else v.new_zeros(0, 0, v.shape[2])


def attend_without(
    q: Queries,
    k: Keys,
    v: Values,
    request: Request,
    row: tuple[int, int],
    removed: Bool[Tensor, "h s"],
    *,
    renormalize: bool,
) -> Float[Tensor, "h e"]:
    """The output of one query, a (sequence, row) pair, without some of its weights.

    If `renormalize`, the softmax is taken over the other keys; otherwise their weights stay.
    """
    weights = weights_without(q, k, request, row, removed, renormalize=renormalize)
    rows = slice(row[1], row[1] + 1)
    return _mix(weights.unsqueeze(1), v, request, row[0], rows).squeeze(0)


def weights_without(
    q: Queries,
    k: Keys,
    request: Request,
    row: tuple[int, int],
    removed: Bool[Tensor, "h s"],
    *,
    renormalize: bool,
) -> Float[Tensor, "h s"]:
    """The weights of one query that `attend_without` mixes values with."""
    scored = row_scores(q, k, request, row)
    if renormalize:
        scored = scored.masked_fill(removed, -torch.inf)
    pattern = _softmax(scored.unsqueeze(1), request)[0].squeeze(1)
    return pattern.masked_fill(removed, 0.0)


def row_scores(q: Queries, k: Keys, request: Request, row: tuple[int, int]) -> Float[Tensor, "h s"]:
    """The scores of one query, a (sequence, row) pair."""
    return _scores(q, k, request, row[0], slice(row[1], row[1] + 1)).squeeze(1)


def per_query_head(x: Values, heads: int, request: Request) -> Float[Tensor, "m h e"]:
    """Values (or keys) as each of the query heads reads them."""
    shared = _shared(x, request)
    return shared.repeat_interleave(heads // shared.shape[1], dim=1)


def rows_per_chunk(heads: int, keys: int, chunks: int = 1) -> int:
    """How many queries a chunk has, or several chunks at once, so that their scores stay small."""
    return max(1, chunks * LARGEST_CHUNK // max(1, heads * keys))


def _chunk(
    q: Queries, k: Keys, v: Values, request: Request, sequence: int, rows: slice
) -> tuple[Float[Tensor, "t h e"], Float[Tensor, "t h"]]:
    pattern, lse = _softmax(_scores(q, k, request, sequence, rows), request)
    return _mix(pattern, v, request, sequence, rows), lse.T


def _scores(q: Queries, k: Keys, request: Request, sequence: int, rows: slice) -> Scores:
    queries, keys = request.queries.each[sequence], request.keys.each[sequence]
    first, start = request.queries.starts[sequence], request.keys.starts[sequence]
    query = q[first + rows.start : first + rows.stop].float()
    key = _shared(k[start : start + keys], request).float()
    # Query heads that share a key head are adjacent, so the key is not repeated.
    group = q.shape[1] // key.shape[1]
    query = rearrange(query, "t (g r) d -> g (t r) d", r=group)
    product = query @ rearrange(key, "s g d -> g d s")
    scored = rearrange(product, "g (t r) s -> (g r) t s", r=group) * request.scale
    if request.softcap is not None:
        scored = request.softcap * torch.tanh(scored / request.softcap)
    if request.bias is not None:
        scored = scored + _bias(request, sequence, rows, scored)
    mask, seen_by = request.mask.of_sequence(sequence), range(rows.start, rows.stop)
    return scored.masked_fill(~visible(mask, seen_by, queries, keys, q.device), -torch.inf)


def _shared(x: Float[Tensor, "s g d"], request: Request) -> Float[Tensor, "s g_or_h d"]:
    """Key heads that serve different numbers of query heads, repeated for each query head."""
    return x if request.groups is None else x[:, list(key_head_of_query(request.groups))]


def _bias(request: Request, sequence: int, rows: slice, like: Scores) -> Scores:
    assert request.bias is not None
    heads, _, keys = like.shape
    row = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    return request.bias.score(
        torch.arange(heads, device=like.device)[:, None, None],
        row + request.queries.starts[sequence],
        row + (keys - request.queries.each[sequence]),
        torch.arange(keys, device=like.device),
    )


def _softmax(scored: Scores, request: Request) -> tuple[Scores, Float[Tensor, "h t"]]:
    """The pattern and the log-sum-exp; a row without visible keys gives zeros and -inf, not NaN."""
    keys = scored.shape[-1]
    if request.sink is not None:
        sink = request.sink.float()[:, None, None].expand(-1, scored.shape[1], 1)
        scored = torch.cat((scored, sink), dim=-1)
    empty = (scored == -torch.inf).all(-1, keepdim=True)
    safe = scored.masked_fill(empty, 0.0)
    pattern = safe.softmax(-1).masked_fill(empty, 0.0)[..., :keys]
    lse = safe.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return pattern, lse


def _mix(
    pattern: Scores, v: Values, request: Request, sequence: int, rows: slice
) -> Float[Tensor, "t h e"]:
    start = request.keys.starts[sequence]
    value = _shared(v[start : start + request.keys.each[sequence]], request).float()
    dropped = F.dropout(pattern, request.dropout) if request.dropout else pattern
    group = pattern.shape[0] // value.shape[1]
    grouped = rearrange(dropped, "(g r) t s -> g (t r) s", r=group)
    read = grouped @ rearrange(value, "s g e -> g s e")
    mixed = rearrange(read, "g (t r) e -> t (g r) e", r=group)
    if isinstance(request.bias, ShawBias) and request.bias.values is not None:
        mixed = mixed + _by_distance(dropped, request.bias, request, sequence, rows)
    return mixed.to(v.dtype)


def _by_distance(
    pattern: Scores, bias: ShawBias, request: Request, sequence: int, rows: slice
) -> Float[Tensor, "t h e"]:
    """Shaw's value vectors, weighted by the mass that falls on each distance."""
    assert bias.values is not None
    keys, queries = request.keys.each[sequence], request.queries.each[sequence]
    row = torch.arange(rows.start, rows.stop, device=pattern.device)[:, None] + (keys - queries)
    distance = bias.distance(row, torch.arange(keys, device=pattern.device))
    mass = pattern.new_zeros(*pattern.shape[:2], bias.values.shape[0])
    mass = mass.scatter_add(-1, distance.expand_as(pattern), pattern)
    return rearrange(mass @ bias.values.float(), "h t e -> t h e")
