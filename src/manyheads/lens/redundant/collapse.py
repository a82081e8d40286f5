"""Collapsed layers: heads that all do the same, or tokens that all have the same direction."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.inputs.cached_run import StackName, head_scope, layer_output_site
from manyheads.lens.inputs.texts import Inputs, for_each_batch, read_inputs
from manyheads.lens.measure.measures import SequenceGroups, sum_by_sequence
from manyheads.lens.results.tables import ByPair, Tabular, titled_table
from manyheads.models import build, model_interface
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site

KIND = "collapse"


@dataclass(frozen=True, slots=True)
class LayerState:
    """The mean similarity of a layer's heads, and of the tokens after it; None if undefined.

    `heads` is the mean overlap of the patterns of each two heads, `tokens` the mean cosine of the
    residual streams of each two tokens of a text.
    """

    layer: int
    heads: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Collapse(Tabular):
    """The state of every layer, and which layers exceed the two thresholds."""

    layers: tuple[LayerState, ...]
    heads_above: float
    tokens_above: float
    texts: int
    tokens: int
    complete: bool = True

    @property
    def head_collapse(self) -> tuple[int, ...]:
        """Layers whose heads all attend alike."""
        return self._above("heads", self.heads_above)

    @property
    def token_collapse(self) -> tuple[int, ...]:
        """Layers after which all tokens of a text have similar directions."""
        return self._above("tokens", self.tokens_above)

    def _above(self, side: str, limit: float) -> tuple[int, ...]:
        pairs = [(layer.layer, getattr(layer, side)) for layer in self.layers]
        return tuple(layer for layer, value in pairs if value is not None and value > limit)

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer."""
        return [
            asdict(layer)
            | {
                "head_collapse": layer.layer in self.head_collapse,
                "token_collapse": layer.layer in self.token_collapse,
            }
            for layer in self.layers
        ]

    def table(self) -> Any:
        """A rich table, one row per layer."""
        names = ("heads' overlap", "tokens' cosine", "collapsed")
        table = titled_table(KIND, ["layer"], names)
        for layer in self.layers:
            numbers = ["-" if x is None else f"{x:.3f}" for x in (layer.heads, layer.tokens)]
            table.add_row(str(layer.layer), *numbers, self._reasons(layer.layer) or "-")
        return table

    def _lines(self) -> Iterator[str]:
        collapsed = sorted({*self.head_collapse, *self.token_collapse})
        yield f"{len(collapsed)} of {len(self.layers)} layers have collapsed"
        for layer in collapsed:
            yield f"  layer {layer}: {self._reasons(layer)}"

    def _reasons(self, layer: int) -> str:
        heads = ["its heads attend alike"] if layer in self.head_collapse else []
        tokens = ["its tokens are alike"] if layer in self.token_collapse else []
        return ", ".join(heads + tokens)


@wrapping_models
def collapse(
    model: build.Model,
    texts: Inputs,
    *,
    heads_above: float = 0.9,
    tokens_above: float = 0.9,
    stack: StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Collapse:
    """Which layers have collapsed, in their heads or in their tokens.

    - heads: the mean pattern overlap of the layer's heads (see `overlap`) is above `heads_above`
    - tokens: the mean cosine of the residual streams of each two tokens of a text after the layer
      is above `tokens_above` (rank collapse: Dong et al., arXiv 2103.03404; the mean cosine is
      Ethayarajh's anisotropy, arXiv 1909.00512). Texts are weighted by their number of pairs.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> [state.layer for state in collapse(model, [[1, 2, 3, 4], [5, 6, 7]]).layers]
    [0, 1]
    """
    for name, value in (("heads_above", heads_above), ("tokens_above", tokens_above)):
        if not -1 <= value <= 1:
            raise InputError(f"{name} must be in [-1, 1], got {value}", "use -1 to 1")
    scope = head_scope(model, stack)
    inputs = read_inputs(model, texts)
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    pairs = overlap(model, inputs, partners="same layer", stack=stack, **shared)
    directions = _Directions(model.stacks()[scope.stack_name])

    def visit(batch: model_interface.ModelInputs, _: list[int]) -> None:
        watcher = _Directions(directions.stack)
        with torch.inference_mode():
            model.run_hidden(batch, watcher)
        directions.merge(watcher)

    passed = for_each_batch(model, inputs, visit, label="reading tokens", **shared)
    heads, tokens = _by_layer(pairs), directions.means()
    return Collapse(
        layers=tuple(
            LayerState(layer, heads.get(layer), tokens.get(layer))
            for layer in range(len(directions.stack.layers))
        ),
        heads_above=heads_above,
        tokens_above=tokens_above,
        texts=passed.texts,
        tokens=passed.tokens,
        complete=passed.complete and pairs.metadata["complete"],
    )


def _by_layer(pairs: ByPair) -> dict[int, float]:
    """The mean over pairs of different heads of each layer with two or more heads."""
    by_layer, start = {}, 0
    for block in pairs.blocks:
        mine = pairs.values[start : start + block.heads, start : start + block.heads]
        start += block.heads
        if block.heads > 1:
            by_layer[block.layer] = float(mine[~np.eye(block.heads, dtype=bool)].mean())
    return by_layer


class _Directions:
    """A watcher that sums the cosines of each two tokens, at the cost of one pass over the tokens.

    |sum of unit vectors|^2 is the sum over all pairs.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.cosines: dict[int, float] = {}
        self.pairs: dict[int, float] = {}

    def wants(self, site: Site) -> bool:
        inside = site.stack == self.stack.name and site.layer >= 0
        return inside and site == layer_output_site(self.stack, site.layer)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is requested"
        vectors = value.values.float()
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        unit = vectors / norms.clamp(min=torch.finfo(torch.float32).tiny)
        groups = SequenceGroups(value.lengths.sequence_of_token, len(value))
        summed = sum_by_sequence(unit.double(), groups)
        # A zero vector has no direction and forms no pair.
        count = sum_by_sequence((norms > 0).double(), groups).squeeze(-1)
        cosines = summed.square().sum(-1) - count
        self.cosines[site.layer] = float(cosines[count > 1].sum())
        self.pairs[site.layer] = float((count * (count - 1)).sum())

    def merge(self, other: "_Directions") -> None:
        for mine, added in ((self.cosines, other.cosines), (self.pairs, other.pairs)):
            for layer, value in added.items():
                mine[layer] = mine.get(layer, 0.0) + value

    def means(self) -> dict[int, float]:
        return {layer: self.cosines[layer] / pairs for layer, pairs in self.pairs.items() if pairs}
