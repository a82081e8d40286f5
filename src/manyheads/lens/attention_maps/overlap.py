"""How similar the attention of two heads is, without storing their patterns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    sums = _OverlapSums.of(scope, measure)

    def visit(inputs: model_interface.ModelInputs, _: list[int]) -> None:
        watcher = _OverlapWatcher(scope, sums.zeros(), partners)
        with torch.inference_mode():
            model.run_hidden(inputs, watcher)
        sums.add(watcher.finish())

    summary = for_each_batch(
        model,
        texts,
        visit,
        label="comparing patterns",
        batch_tokens=batch_tokens,
        progress=progress,
    )
    metadata = summary.metadata | {"measure": measure, "partners": partners}
    return ByPair(kind=KIND, blocks=scope.blocks, values=sums.means(), metadata=metadata)


@dataclass(frozen=True, slots=True, eq=False)
class _OverlapSums:
    """Overlaps summed over queries, and the number of queries of each pair of heads."""

    measure: OverlapMeasure
    slices: dict[int, slice]
    overlap: Float[Tensor, "h h"]
    queries: Float[Tensor, "h h"]

    @classmethod
    def of(cls, scope: HeadScope, measure: OverlapMeasure) -> "_OverlapSums":
        slices, start = {}, 0
        for block in scope.blocks:
            slices[block.layer] = slice(start, start + block.heads)
            start += block.heads
        zeros = torch.zeros(start, start, dtype=torch.float64)
        device = next(scope.model.parameters()).device
        return cls(measure, slices, zeros.to(device), zeros.clone().to(device))

    def zeros(self) -> "_OverlapSums":
        empty = torch.zeros_like(self.overlap), torch.zeros_like(self.queries)
        return _OverlapSums(self.measure, self.slices, *empty)

    def add(self, batch: "_OverlapSums") -> None:
        self.overlap.add_(batch.overlap)
        self.queries.add_(batch.queries)

    def means(self) -> Float[np.ndarray, "h h"]:
        means = (self.overlap / self.queries).cpu().numpy()
        return np.asarray((means + means.T) / 2)


class _OverlapWatcher:
    """A watcher that stores the queries and keys of all layers, or compares within each layer."""

    def __init__(self, scope: HeadScope, sums: _OverlapSums, partners: Partners) -> None:
        self._scope, self._sums, self._partners = scope, sums, partners
        self._reader = ScoreReader({scope.stack_name: scope.stack})
        self._layers: dict[int, TiledScores] = {}

    def wants(self, site: Site) -> bool:
        in_scope = site.stack == self._scope.stack_name and site.sublayer is self._scope.sublayer
        return in_scope and self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        tiled = self._reader.see(site, value)
        if tiled is None:
            return
        if self._partners == "all":
            self._layers[site.layer] = tiled
        else:
            _sum_layers({site.layer: tiled}, self._sums)

    def finish(self) -> _OverlapSums:
        if self._layers:
            with torch.inference_mode():
                _sum_layers(self._layers, self._sums)
        return self._sums


def _sum_layers(tiled_layers: dict[int, TiledScores], sums: _OverlapSums) -> None:
    """Add all layers, which have the same queries and keys but perhaps different masks."""
    first = next(iter(tiled_layers.values()))
    for sequence, length in enumerate(first.request.queries.each):
        if length == 0 or first.request.keys.each[sequence] == 0:
            continue
        keys = {layer: tiled.keys_of(sequence) for layer, tiled in tiled_layers.items()}
        for rows in _row_ranges(tiled_layers, sequence, length):
            tiles = {layer: tiled.tile(sequence, rows) for layer, tiled in tiled_layers.items()}
            _sum_tiles(tiled_layers, tiles, keys, sums)


def _row_ranges(
    tiled_layers: dict[int, TiledScores], sequence: int, length: int
) -> Iterator[range]:
    """Ranges of queries whose weights of all heads fit into memory."""
    queries = [tiled.query for tiled in tiled_layers.values()]
    device = "cpu" if queries[0].device.type == "cpu" else "cuda"
    heads = sum(query.shape[1] for query in queries)
    for first in range(0, length, ROWS[device]):
        rows = range(first, min(first + ROWS[device], length))
        width = len(_union([tiled.tile(sequence, rows) for tiled in tiled_layers.values()]))
        step = max(1, CHUNK_WEIGHTS[device] // max(1, heads * width))
        for start, stop in pairwise((*range(rows.start, rows.stop, step), rows.stop)):
            yield range(start, stop)


def _union(tiles: Sequence[Tile]) -> range:
    keys = [tile.keys for tile in tiles if tile.keys]
    if not keys:
        return range(0)
    return range(min(span.start for span in keys), max(span.stop for span in keys))


def _sum_tiles(
    tiled_layers: dict[int, TiledScores],
    tiles: dict[int, Tile],
    keys: dict[int, Float[Tensor, "g s d"]],
    sums: _OverlapSums,
) -> None:
    """Compare the weights of some queries between all heads of these layers."""
    union = _union(list(tiles.values()))
    if not union:
        return
    layers = list(tiled_layers)
    device = tiled_layers[layers[0]].query.device
    rows = len(tiles[layers[0]].rows)
    counts = [tiled_layers[layer].query.shape[1] for layer in layers]
    # One more column for a learned sink.
    weights = torch.zeros(sum(counts), rows, len(union) + 1, device=device)
    sees_key = torch.zeros(len(layers), rows, dtype=torch.bool, device=device)
    start = 0
    for index, layer in enumerate(layers):
        tile, heads = tiles[layer], slice(start, start + counts[index])
        start += counts[index]
        if not tile.keys:
            continue
        columns = slice(tile.keys.start - union.start, tile.keys.stop - union.start)
        powers, sink, sees_key[index] = _exponentials(tiled_layers[layer], tile, keys[layer])
        weights[heads, :, columns] = powers
        weights[heads, :, -1] = sink
    both = (sees_key.float() @ sees_key.float().T).double()
    owner = torch.repeat_interleave(torch.arange(len(layers)), torch.tensor(counts)).to(device)
    if sums.measure == "cosine":
        overlaps = _cosines(weights[..., :-1])
    else:
        overlaps = _jensen_shannon(weights, sees_key[owner])
    # Layers without a pattern leave gaps between those that have one.
    every_head = torch.arange(len(sums.overlap), device=device)
    indices = torch.cat([every_head[sums.slices[layer]] for layer in layers])
    sums.overlap[indices[:, None], indices] += overlaps
    sums.queries[indices[:, None], indices] += both[owner][:, owner]


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
    entropy = _entropy(weights)
    overlaps = torch.zeros(len(weights), len(weights), dtype=torch.float64, device=weights.device)
    for head in range(len(weights)):
        mixed = _entropy((weights[head] + weights[head:]) / 2)
        divergence = (mixed - (entropy[head] + entropy[head:]) / 2).clamp(min=0)
        similarity = (1 - divergence / np.log(2)) * (sees_key[head] & sees_key[head:])
        overlaps[head, head:] = overlaps[head:, head] = similarity.double().sum(-1)
    return overlaps


def _entropy(weights: Float[Tensor, "*h t w"]) -> Float[Tensor, "*h t"]:
    return -torch.xlogy(weights, weights).sum(-1)
