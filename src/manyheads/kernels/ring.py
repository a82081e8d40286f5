"""Attention over texts whose tokens are shared by several processes (arXiv 2310.01889).

Queries stay where they are, and keys and values travel. In turn s of W a process receives those of
the process s places before it: not all, only the ones that its queries can see. A kernel computes
each part with its log-sum-exp, by which the parts are merged:

    L = log(exp(L1) + exp(L2)),   o = exp(L1 - L) o1 + exp(L2 - L) o2

In the backward pass keys and values travel once more, and their gradients back to where they are
from. With the log-sum-exp L of the whole row, each part has its exact weights p = exp(s - L):

    dv = p' do,   ds = p (do v' - do . o + dL),   dq = ds k,   dk = ds' q
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.errors import KernelError
from manyheads.kernels import choose, fused
from manyheads.kernels.contract import (
    AttentionResult,
    Keys,
    Queries,
    Request,
    TensorFacts,
    Values,
    Want,
)
from manyheads.kernels.reference import rows_per_chunk
from manyheads.parts.masks import Full, Mask, Shifted, part_of, simple_form
from manyheads.parts.positions.alibi import AlibiBias
from manyheads.ragged import ContextShard, Lengths, Span

# Rows of a part whose scores are formed at once under a window: few, so that they share most keys.
WINDOW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """Queries and keys of a text that meet: their positions, and the first row of each."""

    text: int
    query: range
    key: range
    query_row: int
    key_row: int

    @property
    def queries(self) -> slice:
        return slice(self.query_row, self.query_row + len(self.query))

    @property
    def keys(self) -> slice:
        return slice(self.key_row, self.key_row + len(self.key))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a process does in one turn: whose keys it reads, and to whom it gives its own.

    `sent` are the spans of its own keys that `target` can see, `rows` counts those that `source`
    gives, and `pairs` are what is computed with them.
    """

    source: int
    target: int
    sent: tuple[Span, ...]
    rows: int
    pairs: tuple[Pair, ...]


@lru_cache(maxsize=32)
def turns_of(shard: ContextShard, mask: Mask) -> tuple[Turn, ...]:
    """The turns of this process; in the first one it reads its own keys."""
    turns = []
    for step in range(shard.size):
        source = (shard.rank - step) % shard.size
        target = (shard.rank + step) % shard.size
        received = visible_spans(shard, mask, reader=shard.rank, holder=source)
        sent = visible_spans(shard, mask, reader=target, holder=shard.rank)
        if not step:
            received = sent = shard.own
        pairs = tuple(_pairs(shard, mask, received))
        turns.append(Turn(source, target, sent, sum(map(len, received)), pairs))
    return tuple(turns)


def visible_spans(shard: ContextShard, mask: Mask, *, reader: int, holder: int) -> tuple[Span, ...]:
    """The tokens of one process that any query of another may see."""
    spans: list[Span] = []
    queries: dict[int, list[Span]] = {}
    for span in shard.spans[reader]:
        queries.setdefault(span.text, []).append(span)
    for held in shard.spans[holder]:
        seen = sorted(_seen(mask, span, held) for span in queries.get(held.text, ()))
        first = len(spans)
        for start, stop in seen:
            if start >= stop:
                continue
            if len(spans) > first and start <= spans[-1].stop:
                start, stop = spans[-1].start, max(stop, spans.pop().stop)
            spans.append(Span(held.text, start, stop))
    return tuple(spans)


def _seen(mask: Mask, query: Span, key: Span) -> tuple[int, int]:
    """The first and last position of the keys that the mask may show to some of the queries."""
    band = mask.of_sequence(query.text).reach
    start = max(key.start, query.start - band.before)
    return int(start), int(min(key.stop, query.stop + band.after))


def _pairs(shard: ContextShard, mask: Mask, keys: tuple[Span, ...]) -> Iterator[Pair]:
    first_rows = shard.first_rows(shard.rank)
    by_text: dict[int, list[tuple[int, Span]]] = {}
    for row, span in zip(first_rows, shard.own, strict=False):
        by_text.setdefault(span.text, []).append((row, span))
    key_row = 0
    for key in keys:
        for row, query in by_text.get(key.text, ()):
            start, stop = _seen(mask, query, key)
            # The queries that see some of these keys.
            band = mask.of_sequence(key.text).reach
            first = int(max(query.start, start - band.after))
            last = int(min(query.stop, stop + band.before))
            if start < stop and first < last:
                yield Pair(
                    text=key.text,
                    query=range(first, last),
                    key=range(start, stop),
                    query_row=row + first - query.start,
                    key_row=key_row + start - key.start,
                )
        key_row += len(key)


@dataclass(frozen=True, slots=True, eq=False)
class PassedRows:
    """Rows on their way; what is sent stays in memory until it has left."""

    incoming: Tensor
    outgoing: Tensor
    works: Sequence[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.incoming


def pass_on(
    shard: ContextShard, outgoing: Tensor, target: int, source: int, rows: int
) -> PassedRows:
    """Start sending rows to one process while so many come from another."""
    incoming = outgoing.new_empty(rows, *outgoing.shape[1:])
    operations = []
    if len(outgoing):
        operations.append(dist.P2POp(dist.isend, outgoing, shard.global_rank(target), shard.group))
    if rows:
        operations.append(dist.P2POp(dist.irecv, incoming, shard.global_rank(source), shard.group))
    works = dist.batch_isend_irecv(operations) if operations else []
    return PassedRows(incoming, outgoing, works)


class Travel:
    """Keys, and what belongs to them, on their way round the processes.

    The rows of the next turn travel while those of the present one are used.
    """

    def __init__(self, shard: ContextShard, turns: tuple[Turn, ...], own: Float[Tensor, "n c"]):
        self._shard, self._turns, self._own = shard, turns, own
        self._first_row = dict(zip(shard.own, shard.first_rows(shard.rank), strict=False))

    def __iter__(self) -> Iterator[tuple[Turn, Float[Tensor, "m c"]]]:
        passed: PassedRows | None = None
        for number, turn in enumerate(self._turns):
            rows = self._own if passed is None else passed.wait()
            if number + 1 < len(self._turns):
                passed = self._send(self._turns[number + 1])
            yield turn, rows

    def _send(self, turn: Turn) -> PassedRows:
        outgoing = torch.cat([self._own[:0], *(self._own[rows] for rows in self._rows(turn))])
        return pass_on(self._shard, outgoing, turn.target, turn.source, turn.rows)

    def _rows(self, turn: Turn) -> list[slice]:
        """The own rows that are sent in a turn."""
        slices = []
        for span in turn.sent:
            held, row = next(
                (held, row)
                for held, row in self._first_row.items()
                if held.text == span.text and held.start <= span.start and span.stop <= held.stop
            )
            start = row + span.start - held.start
            slices.append(slice(start, start + len(span)))
        return slices

    def give_back(self, turn: Turn, gradient: Float[Tensor, "m c"], onto: Tensor) -> None:
        """Send the gradient of received rows to their process, and add that of the own rows."""
        if turn.source == self._shard.rank:
            onto += gradient
            return
        count = sum(map(len, turn.sent))
        passed = pass_on(self._shard, gradient, turn.source, turn.target, count).wait()
        row = 0
        for rows in self._rows(turn):
            length = rows.stop - rows.start
            onto[rows] += passed[row : row + length]
            row += length


def cannot(request: Request) -> str | None:
    """Why processes cannot share the texts of this request; None if they can."""
    if request.want.pattern:
        return "no process has the whole pattern"
    if request.dropout:
        return "the kernels give no log-sum-exp with dropout of attention weights"
    if request.bias is not None and not isinstance(request.bias, AlibiBias):
        return f"{type(request.bias).__name__} reads whole texts"
    return None


def attend(
    q: Queries, k: Keys, v: Values, request: Request, kernel: str = "auto"
) -> AttentionResult:
    """Attention of the own queries to the keys of all processes; its log-sum-exp has gradients."""
    reason, shard = cannot(request), request.queries.shard
    assert shard is not None, "the caller has checked that texts are shared"
    if reason is not None:
        raise KernelError(f"processes cannot share a text here: {reason}", "use one process")
    if request.groups is not None:
        owners = [key for key, count in enumerate(request.groups) for _ in range(count)]
        k, v, request = k[:, owners], v[:, owners], replace(request, groups=None)
    call = RingCall(shard, request, kernel, turns_of(shard, request.mask))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output, lse = _RingAttention.apply(call, q, k, v)  # type: ignore[no-untyped-call]
    else:
        output, lse = call.forward(q, k, v)
    return fused.result_of(output, lse, request)


@dataclass(frozen=True, slots=True, eq=False)
class RingCall:
    """One attention over shared texts."""

    shard: ContextShard
    request: Request
    kernel: str
    turns: tuple[Turn, ...]

    def forward(
        self, q: Queries, k: Keys, v: Values
    ) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "n h"]]:
        """The output without a sink, and the log-sum-exp."""
        wide = torch.promote_types(q.dtype, torch.float32)
        output = q.new_zeros(*q.shape[:2], v.shape[2], dtype=wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for turn, rows in Travel(self.shard, self.turns, _joined(k, v)):
            keys, values = _parted(rows, k, v)
            for pair in turn.pairs:
                part = self._attend_part(q[pair.queries], keys[pair.keys], values[pair.keys], pair)
                merge(output[pair.queries], lse[pair.queries], part)
        return output.to(v.dtype), lse

    def _attend_part(self, q: Queries, k: Keys, v: Values, pair: Pair) -> AttentionResult:
        request = self._request(pair, q.device)
        facts = TensorFacts.of(q, k, v, request)
        return choose.attend(q, k, v, request, _kernel_for(self.kernel, request, facts))

    def _request(self, pair: Pair, device: torch.device) -> Request:
        request, length = self.request, self.shard.lengths[pair.text]
        bias = request.bias
        if bias is not None:
            assert isinstance(bias, AlibiBias), "checked by `cannot`"
            first = pair.query.start - (len(pair.key) - len(pair.query))
            bias = AlibiBias(bias.slopes, first - pair.key.start)
        return Request(
            queries=one_text(len(pair.query), device),
            keys=one_text(len(pair.key), device),
            mask=part_of(request.mask.of_sequence(pair.text), pair.query, pair.key, length),
            scale=request.scale,
            bias=bias,
            softcap=request.softcap,
            want=Want(lse=True),
        )

    def backward(
        self,
        tensors: tuple[Tensor, ...],
        grad: Float[Tensor, "n h e"],
        grad_lse: Float[Tensor, "n h"],
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n g d"], Float[Tensor, "n g e"]]:
        q, k, v, output, lse = tensors
        wide = lse.dtype
        # Of the softmax: the mean of the gradients of a row's weights.
        mean = (grad.to(wide) * output.to(wide)).sum(-1) - grad_lse
        # A query that sees no key has no weights, and exp(-inf - 0) is zero too.
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        rows = QueryRows(q, output, grad.to(q.dtype), lse, mean)
        # Flash attention takes no gradient of the log-sum-exp.
        flash = self.request.sink is None and not self.request.want.lse
        grad_q = torch.zeros_like(q, dtype=wide)
        grad_own = torch.zeros_like(_joined(k, v), dtype=wide)
        travel = Travel(self.shard, self.turns, _joined(k, v))
        for turn, received in travel:
            keys, values = _parted(received, k, v)
            grad_rows = torch.zeros_like(received, dtype=wide)
            grad_keys, grad_values = _parted(grad_rows, k, v)
            for pair in turn.pairs:
                request = self._request(pair, q.device)
                part = rows.part(pair.queries), keys[pair.keys], values[pair.keys]
                differentiate = _flash_part if flash and _has_flash(request, q, v) else _part
                dq, dk, dv = differentiate(*part, request)
                grad_q[pair.queries] += dq
                grad_keys[pair.keys] += dk
                grad_values[pair.keys] += dv
            travel.give_back(turn, grad_rows, grad_own)
        grad_k, grad_v = _parted(grad_own, k, v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.call.backward(ctx.saved_tensors, grad, grad_lse))


def merge(output: Float[Tensor, "n h e"], lse: Float[Tensor, "n h"], part: AttentionResult) -> None:
    """Add the attention to other keys to output and log-sum-exp, in place."""
    assert part.lse is not None, "it was wanted"
    joined = torch.logaddexp(lse, part.lse.to(lse.dtype))
    # A row that sees no key so far has no level to compare with.
    level = joined.masked_fill(joined == -torch.inf, 0.0)
    old, new = (lse - level).exp(), (part.lse - level).exp()
    output.mul_(old.unsqueeze(-1)).addcmul_(part.output.to(output.dtype), new.unsqueeze(-1))
    lse.copy_(joined)


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Queries with what their gradient needs: output, its gradient, log-sum-exp, row means."""

    q: Float[Tensor, "n h d"]
    output: Float[Tensor, "n h e"]
    grad: Float[Tensor, "n h e"]
    lse: Float[Tensor, "n h"]
    mean: Float[Tensor, "n h"]

    def part(self, rows: slice) -> "QueryRows":
        return QueryRows(*(x[rows] for x in (self.q, self.output, self.grad, self.lse, self.mean)))


def _part(rows: QueryRows, k: Keys, v: Values, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a part by their definition, a few rows and the keys they see at a time."""
    count, heads, _ = rows.q.shape
    wide, shift = rows.lse.dtype, len(k) - count
    reach = request.mask.reach
    step = rows_per_chunk(heads, len(k))
    if reach.before + reach.after < len(k):
        step = min(step, WINDOW_ROWS)
    grad_q = torch.zeros_like(rows.q, dtype=wide)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for start in range(0, count, step):
        stop = min(start + step, count)
        low = int(max(0, min(len(k), start + shift - reach.before)))
        high = int(max(low, min(len(k), stop + shift + reach.after)))
        if low == high:
            continue
        few, keys = rows.part(slice(start, stop)), slice(low, high)
        at = torch.arange(start, stop, device=k.device)[:, None] + shift
        key = torch.arange(low, high, device=k.device)
        dq, dk, dv = _few_rows(few, k[keys], v[keys], request, at, key, len(k))
        grad_q[start:stop] = dq
        grad_k[keys] += dk
        grad_v[keys] += dv
    return grad_q, grad_k, grad_v


def _few_rows(
    rows: QueryRows, k: Keys, v: Values, request: Request, at: Tensor, key: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide, shared = rows.lse.dtype, rows.q.shape[1] // k.shape[1]
    q, grad = (
        rearrange(x.to(wide), "t (g r) d -> g (r t) d", r=shared) for x in (rows.q, rows.grad)
    )
    lse, mean = (rearrange(x, "t (g r) -> g (r t) 1", r=shared) for x in (rows.lse, rows.mean))
    keys, values = (rearrange(x.to(wide), "s g d -> g s d") for x in (k, v))
    scores = (q @ keys.mT) * request.scale
    slope = None
    if request.softcap is not None:
        bent = (scores / request.softcap).tanh()
        scores, slope = request.softcap * bent, 1 - bent.square()
    by_head = rearrange(scores, "g (r t) s -> (g r) t s", r=shared)
    if request.bias is not None:
        head = torch.arange(rows.q.shape[1], device=k.device)[:, None, None]
        by_head = by_head + request.bias.score(head, at, at, key)
    if not isinstance(request.mask, Full):
        seen = request.mask.allows(at, key, torch.full_like(at[:1], length))
        by_head = by_head.masked_fill(~seen, -torch.inf)
    pattern = (rearrange(by_head, "(g r) t s -> g (r t) s", r=shared) - lse).exp_()
    grad_v = pattern.mT @ grad
    grad_scores = (grad @ values.mT).sub_(mean).mul_(pattern)
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_scores = grad_scores * request.scale
    grad_q = rearrange(grad_scores @ keys, "g (r t) d -> t (g r) d", r=shared)
    grad_k = rearrange(grad_scores.mT @ q, "g s d -> s g d")
    return grad_q, grad_k, rearrange(grad_v, "g s d -> s g d")


def _has_flash(request: Request, q: Queries, v: Values) -> bool:
    """Whether the fused backward pass can be used: it takes the log-sum-exp that it is given."""
    form = simple_form(request.mask, request.queries.longest, request.keys.longest)
    plain = request.bias is None and request.softcap is None and form != "other"
    plain = plain and q.shape[2] == v.shape[2]
    if q.device.type == "cpu":
        return plain
    few = q.shape[2] <= fused.LARGEST_HEAD and q.shape[2] % 8 == 0
    return plain and q.is_cuda and q.dtype in fused.HALF and few


def _flash_part(
    rows: QueryRows, k: Keys, v: Values, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a part by the backward pass of PyTorch's flash attention.

    It computes the weights from the log-sum-exp that it is given, here that of the whole rows.
    """
    ops = torch.ops.aten
    causal = simple_form(request.mask, len(rows.q), len(k)) == "causal"
    q, output, grad = (rearrange(x, "t h d -> 1 h t d") for x in (rows.q, rows.output, rows.grad))
    key, value = (rearrange(x, "s g d -> 1 g s d") for x in (k, v))
    lse = rearrange(rows.lse, "t h -> 1 h t").contiguous()
    if q.is_cuda:
        none = torch.zeros((), dtype=torch.long, device=q.device)
        gradients = ops._scaled_dot_product_flash_attention_backward(
            grad, q, key, value, output, lse, None, None, len(rows.q), len(k), 0.0, causal,
            none, none, scale=request.scale,
        )  # fmt: skip
    else:
        gradients = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, key, value, output, lse, 0.0, causal, attn_mask=None, scale=request.scale
        )
    dq, dk, dv = (rearrange(x, "1 h t d -> t h d") for x in gradients)
    return dq, dk, dv


def _kernel_for(kernel: str, request: Request, facts: TensorFacts) -> str:
    """The kernel of a part; flex would be compiled for each part."""
    if kernel != "auto":
        return kernel
    if facts.device == "cpu" and not isinstance(request.mask, Shifted):
        return "auto"
    if request.softcap is None:
        for name in ("varlen", "fused"):
            if choose.KERNELS[name].cannot(request, facts) is None:
                return name
    return "batched"


def _joined(k: Keys, v: Values) -> Float[Tensor, "m c"]:
    """Keys and values as one tensor, which travels in one message."""
    return torch.cat((k.flatten(1), v.flatten(1)), dim=1)


def _parted(rows: Float[Tensor, "rows c"], k: Keys, v: Values) -> tuple[Tensor, Tensor]:
    """Keys and values as heads, views of the rows."""
    keys, values = rows.split((k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]), dim=1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


@lru_cache(maxsize=32)
def one_text(length: int, device: torch.device) -> Lengths:
    """The lengths of a single text."""
    with torch.inference_mode(False):
        return Lengths.of([length], device)
