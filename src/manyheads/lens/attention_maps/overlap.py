"""How similar the attention of two heads is, without storing their patterns."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, for_each_batch
from manyheads.lens.measure.score_tiles import HIDDEN_SCORE, ScoreReader, Tile, TiledScores
from manyheads.lens.results.tables import ByPair
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer

OverlapMeasure = Literal["cosine", "jensen-shannon"]
Partners = Literal["all", "same layer"]

KIND = "pattern overlap"
# Queries per tile, and weights of all heads in memory at once.
ROWS = {"cpu": 128, "cuda": 1024}
CHUNK_WEIGHTS = {"cpu": 2**23, "cuda": 2**28}


@wrapping_models
def overlap(
    model: build.Model,
    texts: Inputs,
    measure: OverlapMeasure = "cosine",
    *,
    partners: Partners = "all",
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByPair:
    """The overlap of the patterns of each pair of heads: 1 if they are the same, 0 if disjoint.

    - "cosine": sum_j p_j q_j / sqrt(sum p^2 sum q^2), mean over queries
    - "jensen-shannon": 1 - JSD(p, q) / ln 2, mean over queries; a learned sink counts as one more
      key. It costs a logarithm per weight and pair of heads.

    Heads of layers with different masks share only the keys that both see. A query that sees no key
    in one of the layers does not count; a query with a single key, such as the first of a causal
    text, is the same for all heads. Of mixers, the shares of absolute weights are compared. With
    `partners="same layer"` all other pairs are NaN.

    The weights of a few queries are computed for all heads, and one matrix product gives all pairs.
    Memory is linear in the number of tokens.

    >>> from manyheads.models.build import build
    >>> from manyheads.taps import Head
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = overlap(model, [[5, 6, 7, 8]])
    >>> round(result.of(Head(0, 0), Head(0, 0)), 4), result.values.shape
    (1.0, (4, 4))
    """
    if measure not in ("cosine", "jensen-shannon"):
        raise InputError(f"measure={measure!r} is unknown", 'use "cosine" or "jensen-shannon"')
    scope = head_scope(model, stack, sublayer)
    sums = torch.zeros(2, len(scope.heads), len(scope.heads), dtype=torch.float64)
    sums = sums.to(next(model.parameters()).device)

    def visit(inputs: model_interface.ModelInputs, _: list[int]) -> None:
        watcher = _OverlapWatcher(scope, torch.zeros_like(sums), measure, partners)
        with torch.inference_mode():
            model.run_hidden(inputs, watcher)
            watcher.finish()
        sums.add_(watcher.sums)

    summary = for_each_batch(
        model,
        texts,
        visit,
        label="comparing patterns",
        batch_tokens=batch_tokens,
        progress=progress,
    )
    means = (sums[0] / sums[1]).cpu().numpy()
    metadata = summary.metadata | {"measure": measure, "partners": partners}
    return ByPair(kind=KIND, blocks=scope.blocks, values=(means + means.T) / 2, metadata=metadata)


class _OverlapWatcher:
    """A watcher that stores the queries and keys of all layers, or compares within each layer.

    `sums` are the overlaps summed over queries, and the number of queries of each pair of heads.
    """

    def __init__(
        self,
        scope: HeadScope,
        sums: Float[Tensor, "2 h h"],
        measure: OverlapMeasure,
        partners: Partners,
    ) -> None:
        self.sums = sums
        self._scope, self._measure, self._partners = scope, measure, partners
        self._head_layers = torch.tensor([head.layer for head in scope.heads])
        self._reader = ScoreReader({scope.stack_name: scope.stack})
        self._layers: dict[int, TiledScores] = {}

    def wants(self, site: Site) -> bool:
        in_scope = site.stack == self._scope.stack_name and site.sublayer is self._scope.sublayer
        return in_scope and self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        tiled = self._reader.see(site, value)
        if tiled is not None:
            self._layers[site.layer] = tiled
            if self._partners == "same layer":
                self.finish()

    def finish(self) -> None:
        """Add all stored layers, which have the same queries and keys but perhaps other masks."""
        if not self._layers:
            return
        by_layer = list(self._layers.values())
        request = by_layer[0].request
        for sequence, length in enumerate(request.queries.each):
            if length == 0 or request.keys.each[sequence] == 0:
                continue
            keys = [tiled.keys_of(sequence) for tiled in by_layer]
            for rows in _row_ranges(by_layer, sequence, length):
                tiles = [tiled.tile(sequence, rows) for tiled in by_layer]
                self._add_tiles(list(zip(by_layer, tiles, keys, strict=True)))
        self._layers.clear()

    def _add_tiles(self, layers: list[tuple[TiledScores, Tile, Float[Tensor, "g s d"]]]) -> None:
        """Compare the weights of some queries between all heads of these layers."""
        union = _union([tile for _, tile, _ in layers])
        if not union:
            return
        device, rows = self.sums.device, len(layers[0][1].rows)
        counts = [tiled.query.shape[1] for tiled, _, _ in layers]
        # One more column for a learned sink.
        weights = torch.zeros(sum(counts), rows, len(union) + 1, device=device)
        sees_key = torch.zeros(len(layers), rows, dtype=torch.bool, device=device)
        parts = zip(weights.split(counts), sees_key, layers, strict=True)
        for own, sees, (tiled, tile, keys) in parts:
            if tile.keys:
                columns = slice(tile.keys.start - union.start, tile.keys.stop - union.start)
                own[..., columns], own[..., -1], sees[:] = _exponentials(tiled, tile, keys)
        both = (sees_key.float() @ sees_key.float().T).double()
        owner = torch.repeat_interleave(torch.arange(len(layers)), torch.tensor(counts)).to(device)
        if self._measure == "cosine":
            overlaps = _cosines(weights[..., :-1])
        else:
            overlaps = _jensen_shannon(weights, sees_key[owner])
        # Layers without a pattern leave gaps between those that have one.
        stored = torch.isin(self._head_layers, torch.tensor(list(self._layers)))
        indices = stored.nonzero().squeeze(1).to(device)
        self.sums[:, indices[:, None], indices] += torch.stack((overlaps, both[owner][:, owner]))


def _row_ranges(by_layer: list[TiledScores], sequence: int, length: int) -> Iterator[range]:
    """Ranges of queries whose weights of all heads fit into memory."""
    device = "cpu" if by_layer[0].query.device.type == "cpu" else "cuda"
    heads = sum(tiled.query.shape[1] for tiled in by_layer)
    for first in range(0, length, ROWS[device]):
        rows = range(first, min(first + ROWS[device], length))
        width = len(_union([tiled.tile(sequence, rows) for tiled in by_layer]))
        step = max(1, CHUNK_WEIGHTS[device] // max(1, heads * width))
        for start, stop in pairwise((*range(rows.start, rows.stop, step), rows.stop)):
            yield range(start, stop)


def _union(tiles: Sequence[Tile]) -> range:
    keys = [tile.keys for tile in tiles if tile.keys] or [range(0)]
    return range(min(span.start for span in keys), max(span.stop for span in keys))


def _exponentials(
    tiled: TiledScores, tile: Tile, keys: Float[Tensor, "g s d"]
) -> tuple[Float[Tensor, "h t w"], Float[Tensor, "h t"] | float, Bool[Tensor, " t"]]:
    """exp(score - row maximum), the same of the sink, and which queries see a key."""
    scores, visible = tiled.scores(tile, keys, range(keys.shape[0]))
    largest = scores.amax(-1, keepdim=True).clamp_(min=HIDDEN_SCORE / 10)
    powers = scores.sub_(largest).exp_()
    if tiled.request.sink is None:
        return powers, 0.0, visible > 0
    # A sink this far above all keys takes the whole weight in float32.
    above = (tiled.request.sink.float()[:, None] - largest.squeeze(-1)).clamp(max=80.0)
    return powers, above.exp(), visible > 0


def _cosines(powers: Float[Tensor, "h t w"]) -> Float[Tensor, "h h"]:
    """Summed over queries; 0 for a row without keys. A sink does not change cosines."""
    norms = torch.linalg.vector_norm(powers, dim=-1, keepdim=True)
    rows = (powers / norms.clamp(min=torch.finfo(powers.dtype).tiny)).flatten(1)
    return (rows @ rows.T).double()


def _jensen_shannon(
    powers: Float[Tensor, "h t w"], sees_key: Bool[Tensor, "h t"]
) -> Float[Tensor, "h h"]:
    """1 - JSD / ln 2, summed over the queries that see a key in both heads."""
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)
    entropy = torch.special.entr(weights).sum(-1)
    overlaps = torch.zeros(len(weights), len(weights), dtype=torch.float64, device=weights.device)
    for head in range(len(weights)):
        mixed = torch.special.entr((weights[head] + weights[head:]) / 2).sum(-1)
        divergence = (mixed - (entropy[head] + entropy[head:]) / 2).clamp(min=0)
        similarity = (1 - divergence / np.log(2)) * (sees_key[head] & sees_key[head:])
        overlaps[head, head:] = overlaps[head:, head] = similarity.double().sum(-1)
    return overlaps
