"""Attention scores of one layer, computed tile by tile: some queries and the keys they can see."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.kernels.contract import Request
from manyheads.lens.results.addresses import attention_at
from manyheads.models.stack import Stack
from manyheads.parts.masks import exact_band
from manyheads.parts.positions.relative import Bias
from manyheads.ragged import Ragged
from manyheads.taps import Site

# Below every score, and finite: zero times minus infinity is NaN.
HIDDEN_SCORE = -1e30


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

    def query_offset(self, sequence: int) -> int:
        """The key position of the first query; the last query is at the last key."""
        return self.request.keys.each[sequence] - self.request.queries.each[sequence]

    def tile(self, sequence: int, rows: range) -> Tile:
        """Some rows of queries with the keys that they can reach."""
        reach, count = self.request.mask.reach, self.request.keys.each[sequence]
        first, last = (row + self.query_offset(sequence) for row in (rows.start, rows.stop - 1))
        start = int(max(0, min(first - reach.before, count)))
        stop = int(max(start, min(last + reach.after + 1, count)))
        return Tile(sequence, rows, range(start, stop))

    def keys_of(self, sequence: int) -> Float[Tensor, "g s d"]:
        """The keys of a sequence by head, in float32."""
        start, count = self.request.keys.starts[sequence], self.request.keys.each[sequence]
        key = rearrange(self.key[start : start + count], "s g d -> g s d")
        return key.float().contiguous()

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
                allowed = self._allowed(tile, edge)
                count += allowed.sum(-1)
                scored[:, :, edge.start : edge.stop].masked_fill_(~allowed, HIDDEN_SCORE)
        return count

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

    def _allowed(self, tile: Tile, edge: range) -> Bool[Tensor, "t edge"]:
        device, count = self.query.device, self.request.keys.each[tile.sequence]
        row = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None]
        key = torch.arange(edge.start, edge.stop, device=device)[None] + tile.keys.start
        length = torch.full((1, 1), count, device=device)
        mask = self.request.mask.of_sequence(tile.sequence)
        return mask.allows(row + self.query_offset(tile.sequence), key, length)


def tiled_scores(stack: Stack, site: Site, query: Ragged, key: Ragged) -> TiledScores:
    """The scores at a site, from its tapped queries and keys."""
    request = stack.request(site.layer, site.sublayer, query, key)
    config = attention_at(stack, site.layer, site.sublayer).config
    shared = key.values if config.groups is None else key.values[:, list(config.owners)]
    return TiledScores(query.values, shared, request)
