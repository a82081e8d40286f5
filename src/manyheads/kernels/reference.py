"""The definition of attention in float32, and the kernel that forms the n x n pattern."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.kernels.contract import AttentionResult, Request, TensorFacts
from manyheads.parts.head_groups import key_head_of_query
from manyheads.parts.masks import visible
from manyheads.parts.positions.relative import ShawBias
from manyheads.taps import Patterns

LARGEST_CHUNK = 2**22


def cannot(request: Request, facts: TensorFacts) -> str | None:  # noqa: ARG001, part of the contract
    """The definition supports everything."""
    return None


def attend(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m g d"],
    v: Float[Tensor, "m g e"],
    request: Request,
) -> AttentionResult:
    """At once if the pattern is wanted, otherwise in chunks of queries so memory stays linear."""
    if request.want.pattern:
        seen = patterns(scores(q, k, request), request)
        lse = _full_lse(q, k, request) if request.want.lse else None
        # An empty batch has no pattern to take the number of heads from.
        output = mix(seen, v, request).reshape(*q.shape[:2], v.shape[2])
        return AttentionResult(output, lse, seen)
    grad = TensorFacts.of(q, k, v, request).grad
    outputs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(0, q.shape[1]).float()]
    for sequence, length in enumerate(request.queries.each):
        step = rows_per_chunk(q.shape[1], request.keys.each[sequence])
        for start, stop in pairwise((*range(0, length, step), length)):
            arguments = (q, k, v, request, sequence, range(start, stop))
            # Recomputing a chunk in the backward pass keeps its pattern from being stored.
            output, lse = (
                checkpoint(_chunk, *arguments, use_reentrant=False) if grad else _chunk(*arguments)
            )
            outputs.append(output)
            lses.append(lse)
    return AttentionResult(torch.cat(outputs), torch.cat(lses) if request.want.lse else None)


def scores(q: Float[Tensor, "n h d"], k: Float[Tensor, "m g d"], request: Request) -> Patterns:
    """Scaled products and bias, -inf where the mask hides a key, for every sequence."""
    return Patterns(
        tuple(
            _scores(q, k, request, sequence, range(length))
            for sequence, length in enumerate(request.queries.each)
        )
    )


def patterns(scored: Patterns, request: Request) -> Patterns:
    """Softmax over the keys, and over the sink where there is one."""
    return Patterns(tuple(_softmax(sequence, request)[0] for sequence in scored.each))


def mix(seen: Patterns, v: Float[Tensor, "m g e"], request: Request) -> Float[Tensor, "n h e"]:
    """The output of each head with these patterns."""
    mixed = [v.new_zeros(0, seen.each[0].shape[0] if seen.each else 0, v.shape[2])]
    for sequence, pattern in enumerate(seen.each):
        mixed.append(_mix(pattern, v, request, sequence, range(pattern.shape[1])))
    return torch.cat(mixed) if len(mixed) == 1 else torch.cat(mixed[1:])


def rows_per_chunk(heads: int, keys: int) -> int:
    """How many queries a chunk has, so that its scores stay small."""
    return max(1, LARGEST_CHUNK // max(1, heads * keys))


def _chunk(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m g d"],
    v: Float[Tensor, "m g e"],
    request: Request,
    sequence: int,
    rows: range,
) -> tuple[Float[Tensor, "t h e"], Float[Tensor, "t h"]]:
    pattern, lse = _softmax(_scores(q, k, request, sequence, rows), request)
    return _mix(pattern, v, request, sequence, rows), lse.T


def _scores(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m g d"],
    request: Request,
    sequence: int,
    rows: range,
) -> Float[Tensor, "h t s"]:
    queries, keys = request.queries.each[sequence], request.keys.each[sequence]
    first = request.queries.starts[sequence]
    start = request.keys.starts[sequence]
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
    hidden = ~visible(request.mask.of_sequence(sequence), rows, queries, keys, q.device)
    return scored.masked_fill(hidden, -torch.inf)


def _shared(x: Float[Tensor, "s g d"], request: Request) -> Float[Tensor, "s g_or_h d"]:
    """Key heads that serve different numbers of query heads, repeated for each query head."""
    return x if request.groups is None else x[:, list(key_head_of_query(request.groups))]


def _bias(
    request: Request, sequence: int, rows: range, like: Float[Tensor, "h t s"]
) -> Float[Tensor, "h t s"]:
    assert request.bias is not None
    heads, _, keys = like.shape
    row = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    return request.bias.score(
        torch.arange(heads, device=like.device)[:, None, None],
        row + request.queries.starts[sequence],
        row + (keys - request.queries.each[sequence]),
        torch.arange(keys, device=like.device),
    )


def _softmax(
    scored: Float[Tensor, "h t s"], request: Request
) -> tuple[Float[Tensor, "h t s"], Float[Tensor, "h t"]]:
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
    pattern: Float[Tensor, "h t s"],
    v: Float[Tensor, "m g e"],
    request: Request,
    sequence: int,
    rows: range,
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
    pattern: Float[Tensor, "h t s"], bias: ShawBias, request: Request, sequence: int, rows: range
) -> Float[Tensor, "t h e"]:
    """Shaw's value vectors, weighted by the mass that falls on each distance."""
    assert bias.values is not None
    keys, queries = request.keys.each[sequence], request.queries.each[sequence]
    row = torch.arange(rows.start, rows.stop, device=pattern.device)[:, None] + (keys - queries)
    distance = bias.distance(row, torch.arange(keys, device=pattern.device))
    mass = pattern.new_zeros(*pattern.shape[:2], bias.values.shape[0])
    mass = mass.scatter_add(-1, distance.expand_as(pattern), pattern)
    return rearrange(mass @ bias.values.float(), "h t e -> t h e")


def _full_lse(
    q: Float[Tensor, "n h d"], k: Float[Tensor, "m g d"], request: Request
) -> Float[Tensor, "n h"]:
    by_sequence = [_softmax(scored, request)[1].T for scored in scores(q, k, request).each]
    return torch.cat(by_sequence) if by_sequence else q.new_zeros(0, q.shape[1]).float()
