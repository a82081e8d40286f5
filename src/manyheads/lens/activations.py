"""What a model has inside for each of some items: head outputs, residuals or patterns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.encoding.batches import fill
from manyheads.lens.given import climb
from manyheads.lens.items import Item, Items
from manyheads.lens.meeting import meet
from manyheads.lens.passing import streaming_batch_tokens
from manyheads.lens.rows import Wanted, sum_rows
from manyheads.lens.trunk import Part
from manyheads.models.resting import resting
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

__all__ = ["OFFSETS", "Features", "Pool", "Source", "gather_features", "residual_sites"]

Source = Literal["heads", "residuals", "patterns"]
Pool = Literal["mean", "first", "last"]
# Of a layer, one row an item; heads stand side by side, each with as many channels.
Features = dict[int, Float[Tensor, "k h d"]]

# What a linear probe sees of a pattern: the weights on keys around the query.
OFFSETS = tuple(range(-8, 9))


@dataclass(frozen=True, slots=True, eq=False)
class _Pooling:
    """From the tokens of a batch to its items."""

    tokens: Int[Tensor, " m"]
    owners: Int[Tensor, " m"]
    counts: Float[Tensor, " k"]

    @classmethod
    def of(
        cls, lengths: Lengths, texts: Sequence[int], items: Sequence[Item], pool: Pool
    ) -> "_Pooling":
        start = dict(zip(texts, lengths.starts, strict=True))
        tokens, owners, counts = [], [], []
        for number, item in enumerate(items):
            every = {"mean": item.places, "first": item.places[:1], "last": item.places[-1:]}
            kept = every[pool]
            tokens += [start[item.text] + place for place in kept]
            owners += [number] * len(kept)
            counts.append(float(len(kept)))
        return cls(torch.tensor(tokens), torch.tensor(owners), torch.tensor(counts))

    def __call__(self, values: Float[Tensor, "n h d"]) -> Float[Tensor, "k h d"]:
        chosen = values[self.tokens.to(values.device)].float().cpu()
        summed = chosen.new_zeros(len(self.counts), *chosen.shape[1:])
        return summed.index_add(0, self.owners, chosen) / self.counts[:, None, None]


class _Keeping:
    """A watcher that keeps the items' share of what it sees, and lets the rest go."""

    def __init__(self, part: Part, source: Source, pool: Callable[[Lengths], _Pooling]) -> None:
        self.found: Features = {}
        self._part, self._source, self._pool = part, source, pool
        self._query: Ragged | None = None
        self._sites = _sites(part, source)

    def wants(self, site: Site) -> bool:
        return site in self._sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        values = value.values
        lengths = value.lengths
        if site.tap is Tap.KEY:
            assert self._query is not None
            values, lengths = self._looks(site, self._query, value), self._query.lengths
        elif values.dim() == 2:
            values = values.unsqueeze(1)
        self.found[self._sites[site]] = self._pool(lengths)(values)

    def _looks(self, site: Site, query: Ragged, key: Ragged) -> Float[Tensor, "n h d"]:
        """Weights around the query and on the first key, and the entropy of each row."""
        nothing = torch.zeros(key.lengths.total, 0, device=key.device)
        wanted = Wanted(offsets=OFFSETS, marks=nothing, ids=None)
        sums = sum_rows(meet(self._part.stack, site, query, key), wanted)
        more = torch.stack((sums.first, sums.entropy), dim=-1)
        return torch.cat((sums.offsets, more), dim=-1)


def gather_features(
    part: Part, items: Items, source: Source, pool: Pool, progress: bool
) -> Features:
    """One row an item in each layer; the embeddings stand at layer -1.

    Memory grows with the items, and not with the square of their texts.
    """
    by_text: dict[int, list[int]] = {}
    for number, item in enumerate(items.each):
        by_text.setdefault(item.text, []).append(number)
    order: list[int] = []
    parts: dict[int, list[Tensor]] = {}
    asked = sorted(by_text)
    sizes = items.given.sizes(part.model)
    with (
        Progress("reading", total=len(asked), unit="texts", shown=progress) as bar,
        resting(part.model),
    ):
        for some in fill([sizes[text] for text in asked], streaming_batch_tokens(part.model)):
            texts = [asked[place] for place in some]
            numbers = [number for text in texts for number in by_text[text]]
            mine = [items.each[number] for number in numbers]

            def pooling(
                lengths: Lengths, texts: list[int] = texts, mine: list[Item] = mine
            ) -> _Pooling:
                return _Pooling.of(lengths, texts, mine, pool)

            keeping = _Keeping(part, source, pooling)
            with torch.inference_mode():
                climb(part.model, items.given.select(texts), keeping)
            for layer, values in keeping.found.items():
                parts.setdefault(layer, []).append(values)
            order += numbers
            bar.advance(len(texts))
    back = torch.tensor(order).argsort()
    return {layer: torch.cat(each)[back] for layer, each in parts.items()}


def residual_sites(part: Part) -> dict[Site, int]:
    """Where the residual stream is seen as it enters the first layer and as it leaves each."""
    found = {Site(-1, Tap.EMBEDDINGS, stack=part.stack_name): -1}
    for index, layer in enumerate(part.stack.config.layers):
        last = Sublayer.FEEDFORWARD
        if layer.feedforward is None:
            last = Sublayer.ATTENTION if layer.cross is None else Sublayer.CROSS
        found[Site(index, Tap.AFTER, last, part.stack_name)] = index
    return found


def _sites(part: Part, source: Source) -> dict[Site, int]:
    if source == "residuals":
        return residual_sites(part)
    taps = (Tap.HEAD_OUTPUT,) if source == "heads" else (Tap.QUERY, Tap.KEY)
    return {part.site(layer, tap): layer for layer in part.layers for tap in taps}
