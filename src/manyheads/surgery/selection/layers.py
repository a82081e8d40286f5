"""Selection of layers to remove, and the cost of removing them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.bridge.automatic import native_models_only
from manyheads.lens.causal.evaluate import Evaluation, Product, Variant
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.surgery.addresses import find_stack, layer_ends
from manyheads.surgery.pruning import prune_layers
from manyheads.surgery.selection import l0_selection, orders, results
from manyheads.taps import Site

# For a layer without any sublayer.
ZERO = orders.GradientScore(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayerSelection(results.Selection[int]):
    """Layers in the order of their removal."""

    unit: ClassVar[results.UnitName] = "layers"

    @property
    def layers(self) -> tuple[int, ...]:
        """The selected layers, as `prune_layers` takes them."""
        return self.order[: self.count]

    @property
    def removed(self) -> list[int]:
        return sorted(self.layers)

    def name(self, unit: int) -> str:
        return f"layer {unit}"


@native_models_only
def select_layers(
    model: Model,
    texts: Inputs,
    by: results.Order = "ablation",
    *,
    fraction: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    metric: metrics.Metric = "loss",
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    l0: l0_selection.L0Config = l0_selection.DEFAULT_L0,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> LayerSelection:
    """Select layers to prune, by the orders of `select_heads`, with the curve of the cost.

    `by` is exact "ablation" of each layer; "gradient", the least |(output - input) . gradient|
    first; "redundancy", the layers first whose input and output have the largest mean cosine over
    tokens (block influence, arXiv 2403.03853); "l0", a gate per layer, trained to close; or
    "random". Harmful layers go first, by ablation and gradient. `iterative` measures those that are
    left again after each removal. `fraction` and `budget` are as in `select_heads`; one layer
    always stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=3, width=32, heads=4, vocabulary=50, seed=0)
    >>> texts = [[1, 2, 3, 4], [5, 6, 7]]
    >>> selection = select_layers(model, texts, fraction=0.4, progress=False)
    >>> len(selection.layers), selection.met
    (1, True)
    """
    request = orders.SelectionRequest("layers", by, fraction, budget, iterative)
    evaluation = Evaluation.of(
        model, texts, metric, targets, batch_tokens=batch_tokens, progress=progress
    )
    find_stack(model, stack)
    unit = LayerUnit(evaluation=evaluation, stack=stack, l0=l0, seed=seed)
    return orders.select(unit, LayerSelection, request)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerUnit(orders.Unit[int]):
    """The layers of a stack."""

    stack: cached_run.StackName | None
    name: ClassVar[results.UnitName] = "layers"

    @property
    def units(self) -> range:
        return range(len(find_stack(self.evaluation.model, self.stack).config.layers))

    def group(self, unit: int) -> str:
        del unit
        return "stack"

    def without(self, removed: Sequence[int]) -> Variant:
        return Variant(prune_layers(self.evaluation.model, removed, stack=self.stack))

    def gradient_scores(self, removed: Sequence[int]) -> dict[int, orders.GradientScore]:
        evaluation, ends = self._shorter(removed)
        inputs = {after: before for before, after in ends.values()}
        scores = evaluation.gradient_scores(
            list(inputs), _by_layer(inputs), keep=list(inputs.values())
        )
        return dict.fromkeys(self.remaining(removed), ZERO) | orders.scores_by_unit(ends, scores)

    def redundant(self, removed: Sequence[int]) -> list[results.Candidate[int]]:
        evaluation, ends = self._shorter(removed)
        sums, tokens = dict.fromkeys(ends, 0.0), dict.fromkeys(ends, 0)
        sites = [site for both in ends.values() for site in both]
        for activations in evaluation.activations(sites, "comparing layers"):
            for layer, (before, after) in ends.items():
                inputs, outputs = (activations[site].values.double() for site in (before, after))
                sums[layer] += float(torch.cosine_similarity(inputs, outputs, dim=-1).sum())
                tokens[layer] += len(inputs)
        cosines = dict.fromkeys(self.remaining(removed), 1.0)
        cosines |= {layer: sums[layer] / max(1, tokens[layer]) for layer in ends}
        candidates = [
            results.Candidate(layer, f"input and output similarity {cosine:.3f}", -cosine)
            for layer, cosine in cosines.items()
        ]
        return sorted(candidates, key=orders.SORT_KEY)

    def gate_probability(self) -> dict[int, float]:
        # A layer without any sublayer counts as closed.
        closed = dict.fromkeys(self.units, -torch.inf)
        gates = self.train_gates(self.stack)
        return closed | {site.layer: float(gate) for site, gate in gates.items()}

    def _shorter(self, removed: Sequence[int]) -> tuple[Evaluation, dict[int, tuple[Site, Site]]]:
        """The model without some layers, and the sites before and after each of the others."""
        model = self.without(removed).model if removed else self.evaluation.model
        stack: Stack = find_stack(model, self.stack)
        layers = enumerate(self.remaining(removed))
        every = {layer: layer_ends(stack, place) for place, layer in layers}
        ends = {layer: sites for layer, sites in every.items() if sites is not None}
        return replace(self.evaluation, model=model), ends


def _by_layer(inputs: dict[Site, Site]) -> Product:
    def product(activations: cached_run.ActivationEditor, site: Site, gradient: Tensor) -> Tensor:
        written = activations[site].values - activations[inputs[site]].values
        return (written * gradient).sum(-1, keepdim=True)

    return product
