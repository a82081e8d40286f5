"""Patterns on request: of some heads, texts and queries, whole or only each query's largest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.attention_maps.typology import Appearance, typology
from manyheads.lens.inputs.texts import climb, read
from manyheads.lens.measure.score_tiles import FAR, Meeting, meet
from manyheads.lens.results.addresses import Address, Block, attention_at, blocks_of, stacks_of
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.files import Result
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Site, Sublayer, Tap
from manyheads.taps import Patterns as Tapped

# An attention, the number of a text in the batch, rows of queries, their weights "h t s" and what
# each may see.
Take = Callable[[Block, int, range, Tensor, Tensor], None]


class Forming:
    """A watcher that forms what every self-attention does with every text of a batch.

    The model runs on its fast kernels. Of all patterns only one text's of one attention is alive,
    and of that no more than `weights_at_once`, or one row, where they are given.
    """

    def __init__(
        self, stacks: dict[str, Stack], take: Take, weights_at_once: int | None = None
    ) -> None:
        self._stacks, self._take = stacks, take
        self._room = weights_at_once
        self._query: Ragged | None = None

    def wants(self, site: Site) -> bool:
        return site.tap in (Tap.QUERY, Tap.KEY) and site.sublayer is Sublayer.ATTENTION

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        assert self._query is not None
        stack = self._stacks[site.stack]
        meeting = meet(stack, site, self._query, value)
        heads = attention_at(stack, site.layer, site.sublayer).config.heads
        block = Block(site.layer, heads, site.stack, site.sublayer)
        for text, length in enumerate(meeting.request.queries.each):
            keys = meeting.request.keys.each[text]
            step = length if self._room is None else max(1, self._room // max(1, heads * keys))
            for start in range(0, length, max(1, step)):
                rows = range(start, min(start + step, length))
                self._take(block, text, rows, *form(meeting, text, rows))
        self._query = None


def form(
    meeting: Meeting, text: int, rows: range
) -> tuple[Float[Tensor, "h t s"], Bool[Tensor, "t s"]]:
    """The weights of all heads on some rows of a text, and which keys each query may see."""
    strip = meeting.strip(text, rows)
    keys = meeting.keys_of(text)
    scored, _ = meeting.scores(strip, keys, range(len(keys)))
    sink = meeting.request.sink
    some, hidden = softmax(scored, None if sink is None else sink.float()[:, None, None])
    count = meeting.request.keys.each[text]
    weights = some.new_zeros(len(some), len(rows), count)
    weights[..., strip.keys.start : strip.keys.stop] = some
    visible = torch.zeros_like(weights[0], dtype=torch.bool)
    visible[:, strip.keys.start : strip.keys.stop] = ~hidden[0]
    return weights, visible


def softmax(
    scored: Float[Tensor, "*h t s"], sink: Tensor | None
) -> tuple[Float[Tensor, "*h t s"], Bool[Tensor, "*h t s"]]:
    """The weights of scored keys beside a learned sink, and which of the keys the mask hides.

    A query that sees no key gets zeros.
    """
    hidden = scored <= FAR / 10
    scored = scored.masked_fill(hidden, -torch.inf)
    total = scored.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink)
    return torch.where(total > -torch.inf, (scored - total).exp(), 0.0), hidden


KIND = "patterns"
# Weights that are formed at once while only the largest of them are kept.
WEIGHTS_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class Pattern(Result):
    """One head on one text: the weights of the queries `rows`, and which keys they may see."""

    address: Address
    text: int
    rows: range
    weights: Float[Tensor, "t s"]
    visible: Bool[Tensor, "t s"]

    def appearance(self, segments: Sequence[int] | None = None) -> Appearance:
        """What it looks like, with the score that decided it."""
        return typology(self.weights, self.visible, segments=segments)


@dataclass(frozen=True, slots=True, eq=False)
class Largest(Result):
    """One head on one text: the `k` keys that each query looks at most, largest first.

    Where a query sees fewer keys, the rest have weight 0.
    """

    address: Address
    text: int
    rows: range
    keys: Int[Tensor, "t k"]
    weights: Float[Tensor, "t k"]

    @property
    def missing(self) -> Float[Tensor, " t"]:
        """The weight on all other keys."""
        return (1 - self.weights.sum(-1)).clamp(min=0)


@dataclass(frozen=True, slots=True, eq=False)
class PatternSet(Tabular):
    """Patterns by head and text."""

    each: tuple[Pattern, ...]

    def of(self, head: Head | Address, text: int = 0) -> Pattern:
        found = _found(self.each, head, text)
        assert isinstance(found, Pattern)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One record per pattern: where it is and what it looks like."""
        return [
            each.address.record() | {"text": each.text} | _looked(each.appearance())
            for each in self.each
        ]

    def table(self) -> Any:
        """A rich table of what each pattern looks like."""
        from rich.table import Table

        table = Table("head", "text", "looks", "score", box=None, pad_edge=False)
        for each in self.each:
            found = each.appearance()
            detail = "" if found.detail is None else f" {found.detail}"
            name = f"{found.name}{detail}"
            table.add_row(str(each.address), str(each.text), name, f"{found.score:.2f}")
        return table

    def __str__(self) -> str:
        told = (f"{each.address} on text {each.text}: {each.appearance()}" for each in self.each)
        return "\n".join(told)

    __repr__ = __str__


def patterns(
    model: Model,
    texts: Any,
    heads: Sequence[Head | Address] | None = None,
    *,
    rows: range | None = None,
) -> PatternSet:
    """The patterns of some heads, or all, on each text; of all its queries, or only of `rows`.

    The model runs on its fast kernels. Only the heads and rows asked for are formed, so that a few
    queries of a long text take little room.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, seed=0)
    >>> patterns(model, [[5, 6, 7]], [Head(1, 0)]).of(Head(1, 0)).weights.shape
    torch.Size([3, 3])
    """
    watcher = _Forming(model, heads, rows, top_k=None)
    _pass(model, texts, watcher)
    return PatternSet(tuple(each for each in watcher.found if isinstance(each, Pattern)))


def top_keys(
    model: Model,
    texts: Any,
    heads: Sequence[Head | Address] | None = None,
    *,
    top_k: int = 8,
    rows: range | None = None,
) -> tuple[Largest, ...]:
    """For each query the keys it looks at most: `top_k` weights per query instead of n."""
    if top_k < 1:
        raise InputError(f"top_k must be at least 1, got {top_k}", "use 1 or more")
    watcher = _Forming(model, heads, rows, top_k=top_k)
    _pass(model, texts, watcher)
    return tuple(each for each in watcher.found if isinstance(each, Largest))


def _pass(model: Model, texts: Any, watcher: "_Forming") -> None:
    given = read(model, [texts] if isinstance(texts, str) else texts)
    with resting(model), torch.inference_mode():
        climb(model, given, watcher)


class _Forming:
    """A watcher that forms what is asked for at the layers that have it."""

    def __init__(
        self,
        model: Model,
        heads: Sequence[Head | Address] | None,
        rows: range | None,
        top_k: int | None,
    ) -> None:
        self.found: list[Pattern | Largest] = []
        self._stacks: Mapping[str, Stack] = stacks_of(model)
        self._heads = _wanted(blocks_of(model), heads)
        if rows is not None and (rows.step != 1 or rows.start < 0 or not rows):
            raise InputError(f"rows={rows} names no run of queries", "use range(start, stop)")
        self._rows, self._top_k = rows, top_k
        self._query: Ragged | None = None

    def wants(self, site: Site) -> bool:
        return site.tap in (Tap.QUERY, Tap.KEY) and bool(self._here(site))

    def see(self, site: Site, value: Ragged | Tapped) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        assert self._query is not None
        meeting = meet(self._stacks[site.stack], site, self._query, value)
        for text, length in enumerate(meeting.request.queries.each):
            rows = range(length) if self._rows is None else self._rows
            if rows.stop > length:
                raise InputError(
                    f"rows={rows} go beyond text {text}, which has {length} tokens",
                    f"use rows within range({length})",
                )
            for address in self._here(site):
                self.found.append(self._form(meeting, address, text, rows))

    def _here(self, site: Site) -> list[Address]:
        return self._heads.get((site.stack, site.sublayer, site.layer), [])

    def _form(
        self, meeting: Meeting, address: Address, text: int, rows: range
    ) -> Pattern | Largest:
        if self._top_k is None:
            weights, visible = _weights(meeting, text, rows, address.head.head)
            return Pattern(address, text, rows, weights, visible)
        count = meeting.request.keys.each[text]
        step = max(1, WEIGHTS_AT_ONCE // max(1, count * meeting.share))
        kept = []
        for start in range(rows.start, rows.stop, step):
            some = range(start, min(start + step, rows.stop))
            weights, _ = _weights(meeting, text, some, address.head.head)
            kept.append(weights.topk(min(self._top_k, count), dim=-1))
        keys = torch.cat([each.indices for each in kept])
        return Largest(address, text, rows, keys, torch.cat([each.values for each in kept]))


def _weights(
    meeting: Meeting, text: int, rows: range, head: int
) -> tuple[Float[Tensor, "t s"], Bool[Tensor, "t s"]]:
    """The weights of one head's rows over all keys, and which of them the mask shows."""
    count = meeting.request.keys.each[text]
    weights = torch.zeros(len(rows), count, device=meeting.query.device)
    strip = meeting.strip(text, rows)
    if not strip.keys or not rows:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    group = head // meeting.share
    keys = meeting.keys_of(text)
    scored = meeting.scores(strip, keys, range(group, group + 1))[0][head % meeting.share]
    sink = meeting.request.sink
    some, hidden = softmax(scored, None if sink is None else sink[head].float())
    weights[:, strip.keys.start : strip.keys.stop] = some
    visible = torch.zeros_like(weights, dtype=torch.bool)
    visible[:, strip.keys.start : strip.keys.stop] = ~hidden
    return weights, visible


def _wanted(
    blocks: tuple[Block, ...], heads: Sequence[Head | Address] | None
) -> dict[tuple[str, Sublayer, int], list[Address]]:
    known = [address for block in blocks for address in block.addresses]
    asked = known if heads is None else [_as_address(head) for head in heads]
    found: dict[tuple[str, Sublayer, int], list[Address]] = {}
    for address in asked:
        if address not in known:
            raise InputError(f"there is no head {address}", f"use one of {known[0]} to {known[-1]}")
        found.setdefault((address.stack, address.sublayer, address.head.layer), []).append(address)
    return found


def _as_address(head: Head | Address) -> Address:
    return Address(head) if isinstance(head, Head) else head


def _found(each: Sequence[Pattern | Largest], head: Head | Address, text: int) -> Any:
    address = _as_address(head)
    for one in each:
        if one.address == address and one.text == text:
            return one
    raise InputError(f"{address} on text {text} was not asked for", "name it in patterns(...)")


def _looked(found: Appearance) -> dict[str, Any]:
    return {"looks": found.name, "score": found.score, "detail": found.detail}
