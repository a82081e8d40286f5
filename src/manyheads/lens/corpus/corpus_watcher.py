"""The watcher behind an atlas: distances, tokens and examples of every head, text by text."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.attention_maps.patterns import pattern_rows
from manyheads.lens.corpus.examples import ExampleBook, HeadExample
from manyheads.lens.corpus.token_sums import TokenSums
from manyheads.lens.measure.score_tiles import ScoreReader, TiledScores
from manyheads.lens.results.addresses import Block, heads_at
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer

# Weights of one text that are computed at once.
CHUNK_WEIGHTS = 2**22
# Distances 0, 1, 2 to 3, 4 to 7 and so on; the last one is open.
DISTANCE_BINS = 24
# HeadVis leaves out smaller weights when it adds up induction.
LEAST_INDUCTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSettings:
    """How many examples of a head are kept, and how much of each."""

    # The texts where it is sharpest, and those of each tenth of all texts.
    sharpest: int = 10
    per_decile: int = 2
    # The queries of an example, and the keys of each query.
    queries: int = 64
    keys: int = 4
    # Smaller weights are left out.
    least_weight: float = 0.02
    seed: int = 0


@dataclass(slots=True, eq=False)
class HeadSums:
    """What was added up over a corpus for the heads of one attention.

    `earlier` and `later` are the weight at each range of distances. `at` has for each token the
    weight that every head gave to it, then the weight that equal attention would have given, then
    how often it was a key. `of_queries` has for each token the sum of the largest weights of its
    queries, then their number. The first key and the first query of a text do not count in these.
    `squares` is the weight times the square of its distance, `copied` the weight on tokens after
    earlier copies of the query's token; `counts` are all queries, and those with such a copy.
    """

    block: Block
    book: ExampleBook
    earlier: Float[np.ndarray, "h bins"] = field(init=False)
    later: Float[np.ndarray, "h bins"] = field(init=False)
    squares: Float[np.ndarray, " h"] = field(init=False)
    copied: Float[np.ndarray, " h"] = field(init=False)
    counts: Float[np.ndarray, "2"] = field(init=False)
    at: TokenSums = field(init=False)
    of_queries: TokenSums = field(init=False)

    def __post_init__(self) -> None:
        heads = self.block.heads
        self.squares, self.copied, self.counts = np.zeros(heads), np.zeros(heads), np.zeros(2)
        self.earlier = np.zeros((heads, DISTANCE_BINS))
        self.later = np.zeros((heads, DISTANCE_BINS))
        self.at, self.of_queries = TokenSums(heads + 2), TokenSums(heads + 1)


@dataclass(slots=True, eq=False)
class CorpusSums:
    """The sums of every attention of a model."""

    settings: ExampleSettings
    blocks: dict[Block, HeadSums] = field(default_factory=dict)

    def of(self, block: Block) -> HeadSums:
        if block not in self.blocks:
            counts = self.settings
            book = ExampleBook(block.heads, counts.sharpest, counts.per_decile, counts.seed)
            self.blocks[block] = HeadSums(block, book)
        return self.blocks[block]


class CorpusWatcher:
    """Adds one batch to the sums; the weights of at most one text and attention are in memory."""

    def __init__(
        self,
        stacks: dict[str, Stack],
        sums: CorpusSums,
        ids: dict[str, Ragged],
        texts: list[int],
    ) -> None:
        self._stacks, self._sums, self._ids, self._texts = stacks, sums, ids, texts
        self._reader = ScoreReader(stacks)

    def wants(self, site: Site) -> bool:
        return self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        tiled = self._reader.see(site, value)
        if tiled is None:
            return
        heads = heads_at(self._stacks[site.stack], site.layer, site.sublayer).config.heads
        sums = self._sums.of(Block(site.layer, heads, site.stack, site.sublayer))
        same = site.sublayer is Sublayer.ATTENTION
        key_ids = self._numbers(site.stack if same else "encoder", tiled.request.keys.each)
        query_ids = self._numbers(site.stack, tiled.request.queries.each)
        for sequence, text in enumerate(self._texts):
            start, count = tiled.request.keys.starts[sequence], tiled.request.keys.each[sequence]
            ids = None if key_ids is None or not same else key_ids[start : start + count]
            seen = _look(tiled, sequence, ids, same=same)
            if seen is None:
                continue
            self._add_tokens(sums, tiled, sequence, seen, key_ids, query_ids)
            if same:
                for part in ("earlier", "later", "squares", "copied"):
                    added = getattr(seen, part).double().cpu().numpy()
                    setattr(sums, part, getattr(sums, part) + added)
                sums.counts += tiled.request.queries.each[sequence], seen.repeated
            activation, query = (part.cpu().numpy() for part in seen.activation())
            for head in np.flatnonzero(sums.book.choose(text, activation)).tolist():
                example = self._example(
                    tiled, sequence, text, head, int(query[head]), float(activation[head])
                )
                sums.book.keep(head, example)

    def _numbers(self, stack: str, lengths: tuple[int, ...]) -> Int[np.ndarray, " n"] | None:
        """Token ids, unless a wrapped model has other tokens between those that it reads."""
        ids = self._ids.get(stack)
        return None if ids is None or ids.lengths.each != lengths else ids.values.cpu().numpy()

    def _add_tokens(
        self,
        sums: HeadSums,
        tiled: TiledScores,
        sequence: int,
        seen: "_Seen",
        key_ids: Int[np.ndarray, " m"] | None,
        query_ids: Int[np.ndarray, " n"] | None,
    ) -> None:
        request = tiled.request
        if key_ids is not None:
            start, count = request.keys.starts[sequence], request.keys.each[sequence]
            columns = torch.cat(
                (seen.received, seen.equal[None], torch.ones_like(seen.equal)[None])
            )
            # The first key is left out.
            values = columns[:, 1:].T.double().cpu().numpy()
            sums.at.add(key_ids[start + 1 : start + count], values)
        if query_ids is not None:
            start, count = request.queries.starts[sequence], request.queries.each[sequence]
            ones = torch.ones_like(seen.largest[:1])
            values = torch.cat((seen.largest, ones))[:, 1:].T.double().cpu().numpy()
            sums.of_queries.add(query_ids[start + 1 : start + count], values)

    def _example(
        self,
        tiled: TiledScores,
        sequence: int,
        text: int,
        head: int,
        query: int,
        activation: float,
    ) -> HeadExample:
        """The queries around one of them, most of them before it, and the keys of each."""
        settings, length = self._sums.settings, tiled.request.queries.each[sequence]
        stop = min(length, query + 1 + settings.queries // 4)
        start = max(0, stop - settings.queries)
        rows = range(start, min(length, start + settings.queries))
        group, member = divmod(head, tiled.group_size)
        weights, _ = pattern_rows(tiled, sequence, rows, range(group, group + 1))
        top = weights[member].topk(min(settings.keys, weights.shape[-1]), dim=-1)
        values, keys = top.values.cpu().numpy(), top.indices.cpu().numpy()
        heavy: Bool[np.ndarray, "t k"] = values >= settings.least_weight
        return HeadExample(
            text=text,
            query=query,
            activation=activation,
            rows=rows,
            counts=heavy.sum(1),
            keys=keys[heavy],
            weights=values[heavy],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """One attention on one text: by head, the weight at each range of distances, the weight that
    each key received, and the largest weight of each query on any key but the first.

    `equal` is what each key would receive if every query looked at all of its keys alike.
    """

    earlier: Float[Tensor, "h bins"]
    later: Float[Tensor, "h bins"]
    squares: Float[Tensor, " h"]
    copied: Float[Tensor, " h"]
    repeated: int
    received: Float[Tensor, "h s"]
    equal: Float[Tensor, " s"]
    largest: Float[Tensor, "h t"]

    def activation(self) -> tuple[Float[Tensor, " h"], Int[Tensor, " h"]]:
        """The largest weight of all queries but the first, and its query."""
        if self.largest.shape[1] == 1:
            return self.largest.new_zeros(len(self.largest)), torch.zeros_like(
                self.largest[:, 0], dtype=torch.long
            )
        largest, query = self.largest[:, 1:].max(1)
        return largest, query + 1


def _look(
    tiled: TiledScores, sequence: int, ids: Int[np.ndarray, " s"] | None, *, same: bool
) -> _Seen | None:
    """Look at all weights of a text, some queries at a time."""
    length, count = tiled.request.queries.each[sequence], tiled.request.keys.each[sequence]
    if not length or not count:
        return None
    heads, device = tiled.query.shape[1], tiled.query.device
    earlier = torch.zeros(heads, DISTANCE_BINS, device=device)
    later, received = earlier.clone(), torch.zeros(heads, count, device=device)
    equal, largest = torch.zeros(count, device=device), torch.zeros(heads, length, device=device)
    squares, copied, repeated = torch.zeros_like(earlier[:, 0]), torch.zeros_like(earlier[:, 0]), 0
    tokens = None if ids is None else torch.from_numpy(ids).to(device)
    step = max(1, CHUNK_WEIGHTS // (heads * count))
    for start in range(0, length, step):
        rows = range(start, min(length, start + step))
        weights, visible = pattern_rows(tiled, sequence, rows)
        received += weights.sum(1)
        equal += (visible / visible.sum(1, keepdim=True).clamp(min=1)).sum(0)
        if count > 1:
            largest[:, rows.start : rows.stop] = weights[..., 1:].amax(-1)
        if same:
            position = torch.arange(rows.start, rows.stop, device=device)
            position = position + tiled.query_offset(sequence)
            before, after = _by_distance(weights, position)
            earlier += before
            later += after
            away = (position[:, None] - torch.arange(count, device=device)).float()
            squares += weights.flatten(1) @ away.square_().flatten()
        if tokens is not None:
            # The token after a copy is at most the query itself.
            copies = (tokens[rows.start : rows.stop, None] == tokens).tril(rows.start - 1)
            repeated += int(copies.any(1).sum())
            after_copies = weights[..., 1:][:, copies[:, :-1]]
            copied += after_copies.masked_fill(after_copies < LEAST_INDUCTION, 0.0).sum(1)
    return _Seen(earlier, later, squares, copied, repeated, received, equal, largest)


def _by_distance(
    weights: Float[Tensor, "h t s"], position: Int[Tensor, " t"]
) -> tuple[Float[Tensor, "h bins"], Float[Tensor, "h bins"]]:
    """The weight on keys at distances 0, 1, 2 to 3, 4 to 7 ... before the query, and after it.

    It is read from running sums at the edges of these ranges, not from every pair. In float32 they
    are off by about 1e-6.
    """
    count = weights.shape[-1]
    running = torch.cat((torch.zeros_like(weights[..., :1]), weights.cumsum(-1)), dim=-1)
    edges = torch.tensor(
        [0, *(2**power for power in range(DISTANCE_BINS - 1))], device=weights.device
    )
    # The open end: beyond every key.
    far = torch.cat((edges[1:], edges.new_tensor([2**40])))

    def summed(start: Int[Tensor, "t bins"], stop: Int[Tensor, "t bins"]) -> Float[Tensor, "h b"]:
        """The weight on the keys from start to stop, over all queries."""
        low, high = (
            running.gather(-1, edge.clamp(0, count).expand(len(weights), -1, -1))
            for edge in (start, stop)
        )
        return (high - low).sum(1)

    query = position[:, None]
    before = summed(query - far + 1, query - edges + 1)
    after = summed(query + edges, query + far)
    # The query itself is counted once.
    after[:, 0] = 0
    return before, after
