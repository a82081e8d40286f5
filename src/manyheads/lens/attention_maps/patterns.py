"""Patterns of some heads, texts and queries, in full or only the largest weights of each query."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import plain_table
from manyheads.lens.attention_maps.typology import PatternType, typology
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.measure.score_tiles import HIDDEN_SCORE, ScoreReader, TiledScores
from manyheads.lens.results import addresses, files, html_tables, tables
from manyheads.models.build import Model, eval_mode
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer

# Receives an attention, the number of a text in the batch, rows of queries, their weights "h t s"
# and the keys that each may see.
OnPattern = Callable[[addresses.Block, int, range, Tensor, Tensor], None]


class PatternWatcher:
    """A watcher that calls `on_pattern` with the patterns of every self-attention and text.

    With `sublayer` it is cross-attention. Those of mixers are shares of absolute weights.

    The model runs on its fast kernels. Only the pattern of one text in one attention is in memory,
    or at most `chunk_weights` of it (but at least one row), and only the rows that `rows_of` names
    for the number of a text.
    """

    def __init__(
        self,
        stacks: dict[str, Stack],
        on_pattern: OnPattern,
        chunk_weights: int | None = None,
        sublayer: Sublayer = Sublayer.ATTENTION,
        rows_of: Callable[[int], range] | None = None,
    ) -> None:
        self._stacks, self._on_pattern = stacks, on_pattern
        self._chunk, self._sublayer, self._rows_of = chunk_weights, sublayer, rows_of
        self._reader = ScoreReader(stacks)

    def wants(self, site: Site) -> bool:
        return site.sublayer is self._sublayer and self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        tiled = self._reader.see(site, value)
        if tiled is None:
            return
        heads = addresses.heads_at(self._stacks[site.stack], site.layer, site.sublayer).config.heads
        block = addresses.Block(site.layer, heads, site.stack, site.sublayer)
        for text, length in enumerate(tiled.request.queries.each):
            keys = tiled.request.keys.each[text]
            all_rows = range(length) if self._rows_of is None else self._rows_of(text)
            step = length if self._chunk is None else max(1, self._chunk // max(1, heads * keys))
            for start in range(all_rows.start, all_rows.stop, max(1, step)):
                rows = range(start, min(start + step, all_rows.stop))
                self._on_pattern(block, text, rows, *pattern_rows(tiled, text, rows))


def pattern_rows(
    tiled: TiledScores, text: int, rows: range, groups: range | None = None
) -> tuple[Float[Tensor, "h t s"], Bool[Tensor, "t s"]]:
    """The weights of some rows of a text, and which keys each query may see.

    `groups` selects key heads, and with them the query heads that share them (None: all).
    """
    count = tiled.request.keys.each[text]
    tile, keys = tiled.tile(text, rows), tiled.keys_of(text)
    groups = range(len(keys)) if groups is None else groups
    heads = slice(groups.start * tiled.group_size, groups.stop * tiled.group_size)
    weights = keys.new_zeros(heads.stop - heads.start, len(rows), count)
    visible = torch.zeros_like(weights[0], dtype=torch.bool)
    if tile.keys and rows:
        scored, _ = tiled.scores(tile, keys, groups)
        sink = tiled.request.sink
        visible[:, tile.keys.start : tile.keys.stop] = scored[0] > HIDDEN_SCORE / 10
        within = softmax(scored, None if sink is None else sink[heads].float()[:, None, None])
        if len(tile.keys) == count:
            return within, visible
        weights[..., tile.keys.start : tile.keys.stop] = within
    return weights, visible


def softmax(scored: Float[Tensor, "*h t s"], sink: Tensor | None) -> Float[Tensor, "*h t s"]:
    """The softmax of scores with a learned sink; a query without visible keys gets zeros."""
    if sink is None:
        # Beside any other score, that of a hidden key has no weight.
        sees_key = scored.amax(-1, keepdim=True) > HIDDEN_SCORE / 10
        return scored.softmax(-1).mul_(sees_key)
    scored = scored.masked_fill(scored <= HIDDEN_SCORE / 10, -torch.inf)
    total = torch.logaddexp(scored.logsumexp(-1, keepdim=True), sink)
    return torch.where(total > -torch.inf, (scored - total).exp(), 0.0)


KIND = "patterns"
# Weights computed at once when only the largest are stored.
CHUNK_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class Pattern(files.Result):
    """One head on one text: the weights of the queries `rows`, and which keys they may see."""

    address: addresses.Address
    text: int
    rows: range
    weights: Float[Tensor, "t s"]
    visible: Bool[Tensor, "t s"]

    def typology(self, segments: Sequence[int] | None = None) -> PatternType:
        """Its type, with the score behind it."""
        return typology(self.weights, self.visible, segments=segments)

    def _repr_html_(self) -> str:
        return html_tables.html_pattern(self.weights.float().cpu().numpy(), repr(self))

    def __repr__(self) -> str:
        queries, keys = self.weights.shape
        return f"pattern of {self.address} on text {self.text}: {queries} queries x {keys} keys"


@dataclass(frozen=True, slots=True, eq=False)
class TopKeys(files.Result):
    """One head on one text: the `k` keys with the largest weights of each query, largest first.

    If a query sees fewer keys, the rest have weight 0.
    """

    address: addresses.Address
    text: int
    rows: range
    keys: Int[Tensor, "t k"]
    weights: Float[Tensor, "t k"]

    @property
    def missing(self) -> Float[Tensor, " t"]:
        """The weight on all other keys."""
        return (1 - self.weights.sum(-1)).clamp(min=0)

    def __repr__(self) -> str:
        queries, keys = self.weights.shape
        return f"top keys of {self.address} on text {self.text}: {queries} queries x {keys} keys"


@dataclass(frozen=True, slots=True, eq=False)
class PatternSet(tables.Tabular):
    """Patterns by head and text."""

    each: tuple[Pattern, ...]

    def of(self, head: addresses.HeadName, text: int = 0) -> Pattern:
        address = addresses.pick_head([pattern.address for pattern in self.each], head)
        for pattern in self.each:
            if pattern.address == address and pattern.text == text:
                return pattern
        raise InputError(
            f"there is no pattern of {address} on text {text}", "request it in patterns(...)"
        )

    def rows(self) -> list[dict[str, Any]]:
        """One record per pattern: its head, text and type."""
        records = []
        for pattern in self.each:
            kind = pattern.typology()
            record = {"type": kind.name, "score": kind.score, "detail": kind.detail}
            records.append(pattern.address.record() | {"text": pattern.text} | record)
        return records

    def table(self) -> Any:
        """A rich table with the type of each pattern."""
        rows = []
        for pattern in self.each:
            kind = pattern.typology()
            cells = pattern.address, pattern.text, kind.full_name, f"{kind.score:.2f}"
            rows.append([*map(str, cells)])
        return plain_table(["head", "text", "type", "score"], [], rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{pattern.address} on text {pattern.text}: {pattern.typology()}"
            for pattern in self.each
        )

    __repr__ = __str__


@wrapping_models
def patterns(
    model: Model, texts: Inputs, heads: addresses.Heads | None = None, *, rows: range | None = None
) -> PatternSet:
    """The patterns of some heads (None: all) on each text, for all queries or only for `rows`.

    The model runs on its fast kernels, and only the requested heads and rows are computed: a few
    queries of a long text need little memory.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, seed=0)
    >>> patterns(model, [[5, 6, 7]], "L1H0").of("L1H0").weights.shape
    torch.Size([3, 3])
    """
    results = _RequestWatcher(model, heads, rows, top_k=None).run(model, texts)
    return PatternSet(tuple(pattern for pattern in results if isinstance(pattern, Pattern)))


@wrapping_models
def top_keys(
    model: Model,
    texts: Inputs,
    heads: addresses.Heads | None = None,
    *,
    top_k: int = 8,
    rows: range | None = None,
) -> tuple[TopKeys, ...]:
    """The keys with the largest weights: `top_k` per query instead of n."""
    if top_k < 1:
        raise InputError(f"top_k must be at least 1, got {top_k}", "use 1 or more")
    results = _RequestWatcher(model, heads, rows, top_k=top_k).run(model, texts)
    return tuple(keys for keys in results if isinstance(keys, TopKeys))


class _RequestWatcher:
    """A watcher that computes the requested patterns."""

    def __init__(
        self, model: Model, heads: addresses.Heads | None, rows: range | None, top_k: int | None
    ) -> None:
        self.results: list[Pattern | TopKeys] = []
        names = ("all",) if heads is None else addresses.head_names(heads)
        if not names:
            raise InputError("the list of heads is empty", "name some, or pass None for all")
        self._heads: dict[tuple[str, Sublayer, int], list[addresses.Address]] = {}
        for address in addresses.find_heads(model, names):
            block = (address.stack, address.sublayer, address.head.layer)
            self._heads.setdefault(block, []).append(address)
        if rows is not None and (rows.step != 1 or rows.start < 0 or not rows):
            raise InputError(
                f"rows={rows} must be a non-empty range with step 1", "use range(start, stop)"
            )
        self._rows, self._top_k = rows, top_k
        self._reader = ScoreReader(model.stacks())

    def run(self, model: Model, texts: Inputs) -> "list[Pattern | TopKeys]":
        inputs = read_inputs(model, texts)
        with eval_mode(model), torch.inference_mode():
            model.run_hidden(inputs, self)
        return self.results

    def wants(self, site: Site) -> bool:
        return bool(self._requested(site)) and self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        tiled = self._reader.see(site, value)
        if tiled is None:
            return
        for text, length in enumerate(tiled.request.queries.each):
            rows = range(length) if self._rows is None else self._rows
            if rows.stop > length:
                raise InputError(
                    f"rows={rows} go beyond the {length} tokens of text {text}",
                    f"use rows within range({length})",
                )
            for address in self._requested(site):
                self.results.append(self._compute(tiled, address, text, rows))

    def _requested(self, site: Site) -> list[addresses.Address]:
        return self._heads.get((site.stack, site.sublayer, site.layer), [])

    def _compute(
        self, tiled: TiledScores, address: addresses.Address, text: int, rows: range
    ) -> Pattern | TopKeys:
        group, member = divmod(address.head.head, tiled.group_size)
        groups = range(group, group + 1)
        if self._top_k is None:
            weights, visible = pattern_rows(tiled, text, rows, groups)
            return Pattern(address, text, rows, weights[member], visible)
        count = tiled.request.keys.each[text]
        step = max(1, CHUNK_WEIGHTS // max(1, count * tiled.group_size))
        chunks = []
        for start in range(rows.start, rows.stop, step):
            chunk = range(start, min(start + step, rows.stop))
            weights, _ = pattern_rows(tiled, text, chunk, groups)
            chunks.append(weights[member].topk(min(self._top_k, count), dim=-1))
        keys = torch.cat([largest.indices for largest in chunks])
        return TopKeys(address, text, rows, keys, torch.cat([largest.values for largest in chunks]))
