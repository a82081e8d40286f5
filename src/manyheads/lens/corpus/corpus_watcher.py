"""The watcher behind an atlas: distances, tokens and examples of every head, text by text."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.attention_maps.patterns import pattern_rows
from manyheads.lens.corpus.examples import ExampleBook, HeadExample
from manyheads.lens.corpus.token_sums import TokenSums
from manyheads.lens.measure.row_sums import Repeats, RowSums, RowSumSpec, TileWeights, sum_rows
from manyheads.lens.measure.score_tiles import HIDDEN_SCORE, Tile, TiledScores
from manyheads.lens.results.addresses import Block
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer

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
    """Adds one batch to the sums, from the weights that the statistics compute tile by tile."""

    def __init__(self, sums: CorpusSums, ids: dict[str, Ragged], texts: list[int]) -> None:
        self._sums, self._ids, self._texts = sums, ids, texts

    def sum_attention(self, block: Block, tiled: TiledScores, spec: RowSumSpec) -> RowSums:
        """The sums of the statistics; those of the corpus are added on the way."""
        weights = BatchWeights.empty(tiled, same=block.sublayer is Sublayer.ATTENTION)
        sums = sum_rows(tiled, spec, weights)
        self._add(block, tiled, weights)
        return sums

    def _add(self, block: Block, tiled: TiledScores, weights: "BatchWeights") -> None:
        sums, same = self._sums.of(block), block.sublayer is Sublayer.ATTENTION
        request, weights = tiled.request, weights.on_cpu()
        key_ids = self._numbers(block.stack if same else "encoder", request.keys.each)
        query_ids = self._numbers(block.stack, request.queries.each)
        for sequence, text in enumerate(self._texts):
            if not request.queries.each[sequence] or not request.keys.each[sequence]:
                continue
            seen = weights.of_sequence(sequence)
            self._add_tokens(sums, tiled, sequence, seen, key_ids, query_ids)
            if same:
                for part in ("earlier", "later", "squares", "copied"):
                    added = getattr(seen, part).double().numpy()
                    setattr(sums, part, getattr(sums, part) + added)
                sums.counts += request.queries.each[sequence], seen.repeated
            activation, query = (part.numpy() for part in seen.activation())
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
            values = columns[:, 1:].T.double().numpy()
            sums.at.add(key_ids[start + 1 : start + count], values)
        if query_ids is not None:
            start, count = request.queries.starts[sequence], request.queries.each[sequence]
            ones = torch.ones_like(seen.largest[:1])
            values = torch.cat((seen.largest, ones))[:, 1:].T.double().numpy()
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


@dataclass(frozen=True, slots=True, eq=False)
class BatchWeights:
    """One attention on one batch, added up tile by tile.

    `received` and `equal` have one number per key, `largest` one per query, `distances` one for
    each text and distance: how far before the query the key is, from the number of keys down to
    the number of queries after it.
    """

    tiled: TiledScores
    same: bool
    received: Float[Tensor, "h m"]
    equal: Float[Tensor, " m"]
    largest: Float[Tensor, "h n"]
    copied: Float[Tensor, "h b"]
    repeated: list[int]
    distances: list[Float[Tensor, "h distances"]]

    @classmethod
    def empty(cls, tiled: TiledScores, *, same: bool) -> "BatchWeights":
        queries, keys, heads = tiled.request.queries, tiled.request.keys, tiled.query.shape[1]
        zeros = tiled.query.new_zeros(heads, 0, dtype=torch.float32).new_zeros
        spans = zip(queries.each, keys.each, strict=True) if same else ()
        return cls(
            tiled=tiled,
            same=same,
            received=zeros(heads, keys.total),
            equal=zeros(keys.total),
            largest=zeros(heads, queries.total),
            copied=zeros(heads, len(queries.each)),
            repeated=[0] * len(queries.each),
            distances=[zeros(heads, length + count) for length, count in spans],
        )

    def see_tile(
        self, tile: Tile, heads: slice, weights: TileWeights, repeats: Repeats | None
    ) -> None:
        request, sequence = self.tiled.request, tile.sequence
        start, factor = request.keys.starts[sequence] + tile.keys.start, weights.factor
        keys = slice(start, start + len(tile.keys))
        first = request.queries.starts[sequence]
        queries = slice(first + tile.rows.start, first + tile.rows.stop)
        skewed, weight = _skew(weights)
        self.received[heads, keys] += weight.sum(1)
        # Every key but the first of the text.
        others = weights.powers[..., 1 if tile.keys.start == 0 else 0 :]
        if others.shape[-1]:
            self.largest[heads, queries] = others.amax(-1) * factor
        if heads.start == 0:
            visible = weights.scores[0] > HIDDEN_SCORE / 10
            self.equal[keys] += (visible / visible.sum(1, keepdim=True).clamp(min=1)).sum(0)
        if self.same:
            # The nearest column of the skewed weights is the last key of the first row.
            position = tile.rows.start + self.tiled.query_offset(sequence)
            farthest = request.keys.each[sequence] - (position + len(tile.rows) - tile.keys.start)
            columns = slice(farthest, farthest + skewed.shape[-1])
            self.distances[sequence][heads, columns] += skewed.sum(1)
        if repeats is not None:
            rows, copies = repeats
            if heads.start == 0:
                self.repeated[sequence] += len(rows.unique())
            # The token after a copy.
            inside = copies + 1 < len(tile.keys)
            after = weight[:, rows[inside], copies[inside] + 1]
            after = after.masked_fill(after < LEAST_INDUCTION, 0.0)
            self.copied[heads, sequence] += after.sum(1)

    def on_cpu(self) -> "BatchWeights":
        """All of it at once: a device would wait for every text and number."""
        parts = {
            name: getattr(self, name).cpu() for name in ("received", "equal", "largest", "copied")
        }
        lengths = [sums.shape[1] for sums in self.distances]
        distances = torch.cat(self.distances, dim=1).cpu().split(lengths, 1) if lengths else ()
        return replace(self, **parts, distances=list(distances))

    def of_sequence(self, sequence: int) -> "_Seen":
        request = self.tiled.request
        start, count = request.keys.starts[sequence], request.keys.each[sequence]
        first, length = request.queries.starts[sequence], request.queries.each[sequence]
        earlier = self.received.new_zeros(len(self.received), DISTANCE_BINS)
        later, squares = earlier.clone(), earlier[:, 0].double()
        if self.same:
            sums = self.distances[sequence]
            away = count - 1 - torch.arange(sums.shape[1], device=sums.device)
            bins = _distance_bin(away.abs())
            earlier.index_add_(1, bins[away >= 0], sums[:, away >= 0])
            later.index_add_(1, bins[away < 0], sums[:, away < 0])
            squares = sums.double() @ away.double().square()
        return _Seen(
            earlier=earlier,
            later=later,
            squares=squares,
            copied=self.copied[:, sequence],
            repeated=self.repeated[sequence],
            received=self.received[:, start : start + count],
            equal=self.equal[start : start + count],
            largest=self.largest[:, first : first + length],
        )


def _skew(
    weights: TileWeights,
) -> tuple[Float[Tensor, "h t diagonals"], Float[Tensor, "h t w"]]:
    """The weights with each row one place to the left of the row before, and without the shift.

    Both share their memory. A column of the first has the weights of one distance.
    """
    heads, rows, count = weights.powers.shape
    skewed = weights.powers.new_zeros(heads, rows, rows + count - 1)
    width = skewed.shape[-1]
    weight = skewed.as_strided(
        (heads, rows, count), (rows * width, width - 1, 1), storage_offset=rows - 1
    )
    return skewed, torch.mul(weights.powers, weights.factor[..., None], out=weight)


def _distance_bin(distance: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """
    >>> _distance_bin(torch.tensor([0, 1, 2, 3, 4, 7, 8])).tolist()
    [0, 1, 2, 2, 3, 3, 4]
    """
    edges = 2 ** torch.arange(DISTANCE_BINS - 1, device=distance.device)
    return torch.bucketize(distance, edges, right=True)
