"""Attention scores of one layer, computed tile by tile: some queries and the keys they can see."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.kernels.contract import Request
from manyheads.lens.results.addresses import attention_at, mixer_at
from manyheads.mixers.head_weights import HeadWeights
from manyheads.models.stack import Stack
from manyheads.parts.masks import Band, Causal, Full, exact_band
from manyheads.parts.positions.relative import Bias
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

# Below every score, and finite: zero times minus infinity is NaN.
HIDDEN_SCORE = -1e30
# Larger edges of tiles are checked anew in each layer.
CACHED_PAIRS = 2**17


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of a sequence and the keys they can see."""

    sequence: int
    rows: range
    keys: range


@dataclass(frozen=True, slots=True, eq=False)
class TiledScores:
    """The queries, keys and request of a kernel call, whose scores are computed tile by tile."""

    query: Float[Tensor, "n h d"]
    key: Float[Tensor, "m g d"]
    request: Request

    @property
    def group_size(self) -> int:
        """The number of query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.key.nbytes

    def query_offset(self, sequence: int) -> int:
        """The key position of the first query; the last query is at the last key."""
        return self.request.keys.each[sequence] - self.request.queries.each[sequence]

    def token_rows(self, sequence: int) -> tuple[int, int, int]:
        """The rows of packed ids that hold the first token of the text, query and key."""
        start = self.request.queries.starts[sequence]
        return start, start, start

    def positions(self, tile: Tile) -> Int[Tensor, " t"]:
        """The key positions of the queries of a tile."""
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=self.query.device)
        return rows + self.query_offset(tile.sequence)

    def tile(self, sequence: int, rows: range) -> Tile:
        """Some rows of queries with the keys that they can reach."""
        reach, count = self.request.mask.reach, self.request.keys.each[sequence]
        first, last = (row + self.query_offset(sequence) for row in (rows.start, rows.stop - 1))
        start = int(max(0, min(first - reach.before, count)))
        stop = int(max(start, min(last + reach.after + 1, count)))
        return Tile(sequence, rows, range(start, stop))

    def keys_of(self, sequence: int) -> Float[Tensor, "g s d"]:
        """The keys of a sequence by head, in float32, laid out for products with queries.

        Channels are outermost in memory: on ARM such a product is up to four times as fast.
        """
        start, count = self.request.keys.starts[sequence], self.request.keys.each[sequence]
        key = rearrange(self.key[start : start + count], "s g d -> g d s")
        return key.float().contiguous().mT

    def scores(
        self, tile: Tile, keys: Float[Tensor, "g s d"], heads: range
    ) -> tuple[Float[Tensor, "h t w"], Float[Tensor, " t"]]:
        """Scores of some key heads, bias included, and how many keys each query sees.

        A key that the mask hides has `HIDDEN_SCORE`.
        """
        first = self.request.queries.starts[tile.sequence]
        query_heads = slice(heads.start * self.group_size, heads.stop * self.group_size)
        query = self.query[first + tile.rows.start : first + tile.rows.stop, query_heads].float()
        query = rearrange(query * self.request.scale, "t (g r) d -> g (r t) d", r=self.group_size)
        visible = keys[heads.start : heads.stop, tile.keys.start : tile.keys.stop]
        product = query @ visible.transpose(1, 2)
        scored = rearrange(product, "g (r t) s -> (g r) t s", r=self.group_size)
        if self.request.softcap is not None:
            scored = self.request.softcap * torch.tanh(scored / self.request.softcap)
        if self.request.bias is not None:
            scored = scored + self._bias(self.request.bias, tile, query_heads)
        return scored, self._hide(scored, tile)

    def _bias(self, bias: Bias, tile: Tile, heads: slice) -> Float[Tensor, "h t w"]:
        device = self.query.device
        row = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None]
        return bias.score(
            torch.arange(heads.start, heads.stop, device=device)[:, None, None],
            row + self.request.queries.starts[tile.sequence],
            row + self.query_offset(tile.sequence),
            torch.arange(tile.keys.start, tile.keys.stop, device=device),
        )

    def _hide(self, scored: Float[Tensor, "h t w"], tile: Tile) -> Float[Tensor, " t"]:
        """Overwrite the scores that the mask hides; of a band only the two edges need checking."""
        inner = self._unmasked(tile)
        count = scored.new_full((scored.shape[1],), float(len(inner)))
        for edge in (range(inner.start), range(inner.stop, len(tile.keys))):
            if len(edge):
                highest, seen = self._edge(tile, edge)
                count += seen
                # On a CPU, filling where a mask is true takes twenty times as long.
                scored[:, :, edge.start : edge.stop].clamp_(max=highest)
        return count

    def _edge(self, tile: Tile, edge: range) -> tuple[Float[Tensor, "t w"], Int[Tensor, " t"]]:
        """The highest score of some keys of a tile, and how many of them each query sees.

        It is infinite where a query sees the key, and `HIDDEN_SCORE` elsewhere.
        """
        band, device = exact_band(self.request.mask), self.query.device
        start = tile.keys.start + edge.start
        if band is not None:
            # Only distances count: layers, and sequences of one length, share the answer.
            ahead = start - tile.rows.start - self.query_offset(tile.sequence)
            small = len(tile.rows) * len(edge) <= CACHED_PAIRS
            highest = _highest_in_band if small else _highest_in_band.__wrapped__
            return highest(band, ahead, len(tile.rows), len(edge), device)
        key = torch.arange(start, start + len(edge), device=device)[None]
        length = torch.full((1, 1), self.request.keys.each[tile.sequence], device=device)
        mask = self.request.mask.of_sequence(tile.sequence)
        allowed = mask.allows(self.positions(tile)[:, None], key, length)
        return _highest_scores(allowed), allowed.sum(-1)

    def _unmasked(self, tile: Tile) -> range:
        """The keys of a tile that are known to be visible to all its queries."""
        band = exact_band(self.request.mask)
        if band is None:
            return range(0)
        shift = self.query_offset(tile.sequence)
        first, last = (row + shift for row in (tile.rows.start, tile.rows.stop - 1))
        start = int(max(tile.keys.start, min(last - band.before, tile.keys.stop)))
        stop = int(max(start, min(first + band.after + 1, tile.keys.stop)))
        return range(start - tile.keys.start, stop - tile.keys.start)


def _highest_scores(allowed: Bool[Tensor, "t w"]) -> Float[Tensor, "t w"]:
    return torch.where(allowed, torch.inf, HIDDEN_SCORE)


@lru_cache(maxsize=64)
def _highest_in_band(
    band: Band, ahead: int, rows: int, keys: int, device: torch.device
) -> tuple[Float[Tensor, "t w"], Int[Tensor, " t"]]:
    """The same in a band, where the first key is `ahead` of the first query."""
    # Watchers with gradients may use it after one without.
    with torch.inference_mode(False):
        query = torch.arange(rows, device=device)[:, None]
        away = torch.arange(ahead, ahead + keys, device=device)[None] - query
        allowed = (away >= -band.before) & (away <= band.after)
        return _highest_scores(allowed), allowed.sum(-1)


@dataclass(frozen=True, slots=True, eq=False)
class TiledPart(TiledScores):
    """Some queries and keys of one text: the positions of the first ones, and the text's row."""

    first_query: int
    first_key: int
    text_row: int

    def query_offset(self, sequence: int) -> int:  # noqa: ARG002, there is one
        return self.first_query - self.first_key

    def token_rows(self, sequence: int) -> tuple[int, int, int]:  # noqa: ARG002
        return self.text_row, self.text_row + self.first_query, self.text_row + self.first_key


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeights(TiledScores):
    """The heads of a mixer, whose weights may be negative: the score of a key is ln |weight|.

    Its softmax is the absolute weight over the sum of those of the row.
    """

    weights: HeadWeights

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    @classmethod
    def of(cls, weights: HeadWeights) -> "TiledWeights":
        lengths = weights.lengths
        mask = Causal() if weights.causal else Full()
        request = Request(queries=lengths, keys=lengths, mask=mask, scale=1.0)
        # Only the numbers of tokens and heads: weights are not products of these.
        nothing = torch.zeros(lengths.total, weights.heads, 0, device=lengths.offsets.device)
        return cls(nothing, nothing, request, weights)

    def scores(
        self,
        tile: Tile,
        keys: Float[Tensor, "g s d"],  # noqa: ARG002
        heads: range,
    ) -> tuple[Float[Tensor, "h t w"], Float[Tensor, " t"]]:
        rows = self.weights.rows(tile.sequence, tile.rows, heads)
        missing = max(0, tile.keys.stop - rows.shape[-1])
        rows = F.pad(rows, (0, missing))[..., tile.keys.start : tile.keys.stop]
        scored = rows.abs().log().clamp(min=HIDDEN_SCORE)
        return scored, self._hide(scored, tile)


class ScoreReader:
    """Takes what a watcher sees and gives the scores of each attention and mixer.

    Attention shows its queries, then its keys. A mixer shows its weights; one without a pattern
    shows nothing.
    """

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        self._stacks = stacks
        self._query: Ragged | None = None

    def wants(self, site: Site) -> bool:
        if site.sublayer not in (Sublayer.ATTENTION, Sublayer.CROSS) or site.layer < 0:
            return False
        mixes = site.sublayer is Sublayer.ATTENTION and mixer_at(
            self._stacks[site.stack], site.layer
        )
        return site.tap is Tap.PATTERN if mixes else site.tap in (Tap.QUERY, Tap.KEY)

    def see(self, site: Site, value: Ragged | Patterns) -> TiledScores | None:
        """The scores, once all that they need has been seen."""
        if isinstance(value, Patterns):
            assert isinstance(value, HeadWeights), "only the patterns of mixers are watched"
            return TiledWeights.of(value)
        if site.tap is Tap.QUERY:
            self._query = value
            return None
        assert self._query is not None, "queries come before keys"
        query, self._query = self._query, None
        return tiled_scores(self._stacks[site.stack], site, query, value)


def tiled_scores(stack: Stack, site: Site, query: Ragged, key: Ragged) -> TiledScores:
    """The scores at a site, from its tapped queries and keys."""
    request = stack.request(site.layer, site.sublayer, query, key)
    config = attention_at(stack, site.layer, site.sublayer).config
    shared = key.values if config.groups is None else key.values[:, list(config.owners)]
    return TiledScores(query.values, shared, request)
