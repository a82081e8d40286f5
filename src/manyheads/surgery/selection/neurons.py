"""Selection of feed-forward neurons to remove, and the cost of removing them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.bridge.automatic import native_models_only
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import Evaluation, Variant
from manyheads.lens.inputs.cached_run import ActivationEditor, EditFunction, StackName
from manyheads.lens.inputs.metrics import Metric
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.surgery.addresses import find_stack, neuron_site
from manyheads.surgery.rebuild import LayerPlan
from manyheads.surgery.selection import l0_selection, orders
from manyheads.surgery.selection.results import Candidate, Order, Selection, UnitName
from manyheads.taps import Site

# Neurons with a larger cosine are duplicates, as for heads: at 0.9 one explains 81 % of the other.
DUPLICATE_ABOVE = 0.9
# Products of pairs of neurons held at once, in float32: 256 MB, or one layer.
MAX_PRODUCTS = 2**26
Neuron = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NeuronSelection(Selection[Neuron]):
    """Neurons as (layer, neuron) in the order of their removal."""

    unit: ClassVar[UnitName] = "neurons"

    @property
    def neurons(self) -> dict[int, list[int]]:
        """The selected neurons by layer, as `prune_neurons` takes them."""
        return _by_layer(self.order[: self.count])

    @property
    def removed(self) -> dict[str, list[int]]:
        return {str(layer): sorted(neurons) for layer, neurons in sorted(self.neurons.items())}

    def name(self, unit: Neuron) -> str:
        return f"L{unit[0]}N{unit[1]}"


@native_models_only
def select_neurons(
    model: Model,
    texts: Inputs,
    by: Order = "gradient",
    *,
    fraction: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    points: int = 10,
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    l0: l0_selection.L0Config = l0_selection.DEFAULT_L0,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> NeuronSelection:
    """Select neurons to prune, by the orders of `select_heads`, with the curve of the cost.

    `by` is "gradient" (the least |activation . gradient| first), exact "ablation" of each neuron,
    "redundancy", "l0" (a gate per neuron, trained to close) or "random". By redundancy,
    neurons that never fire go first, then the less important one of each pair of a layer whose
    activations have a cosine of 0.9 or more, the most similar first: these are not all neurons, so
    a fraction may not be reached. Neurons are many, so one is harmful only if the metric improves
    by three standard errors. The cost is measured at `points` counts up to `fraction`, or up to
    all; `iterative` measures those that are left again after each. `budget` is as in
    `select_heads`; the curve is refined where it is crossed. One neuron of a layer always stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> texts = [[1, 2, 3, 4], [5, 6, 7]]
    >>> selection = select_neurons(model, texts, fraction=0.25, progress=False)
    >>> len(selection.neurons[0]), len(selection.curve)
    (32, 10)
    """
    request = orders.SelectionRequest("neurons", by, fraction, budget, iterative)
    if points < 1:
        raise InputError(f"points must be at least 1, got {points}", "use 1 or more")
    evaluation = Evaluation.of(
        model, texts, metric, targets, batch_tokens=batch_tokens, progress=progress
    )
    chosen = find_stack(model, stack)
    unit = NeuronUnit(evaluation=evaluation, stack=chosen, points=points, l0=l0, seed=seed)
    if not unit.units:
        raise InputError(
            "the model has no dense feed-forward, and neurons of experts cannot be removed",
            "prune heads or layers instead",
        )
    return orders.select(unit, NeuronSelection, request)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NeuronUnit(orders.Unit[Neuron]):
    """The neurons of a stack's feed-forwards; those of experts cannot be removed."""

    stack: Stack
    points: int = 10
    name: ClassVar[UnitName] = "neurons"
    # Of a thousand neurons about one is beyond three standard errors by chance.
    errors: ClassVar[float] = 3.0

    @property
    def widths(self) -> dict[int, int]:
        """The number of neurons of each layer that has any."""
        layers = enumerate(self.stack.config.layers)
        widths = {layer: len(LayerPlan.all_of(layer, config).neurons) for layer, config in layers}
        return {layer: width for layer, width in widths.items() if width}

    @property
    def units(self) -> list[Neuron]:
        return [(layer, neuron) for layer, width in self.widths.items() for neuron in range(width)]

    def group(self, unit: Neuron) -> int:
        return unit[0]

    def counts(self, limit: int) -> list[int]:
        """Evenly spaced counts."""
        points = range(1, self.points + 1)
        counts = sorted({max(1, round(limit * place / self.points)) for place in points})
        return [count for count in counts if count <= limit]

    def without(self, removed: Sequence[Neuron]) -> Variant:
        return Variant(self.evaluation.model, self._ablated(removed))

    def gradient_scores(self, removed: Sequence[Neuron]) -> dict[Neuron, orders.GradientScore]:
        sites = [neuron_site(self.stack, layer) for layer in self.widths]
        changes = self._ablated(removed)
        scores = self.evaluation.gradient_scores(sites, _by_neuron, changes=changes)
        by_neuron = orders.scores_by_unit(self.units, scores)
        return {neuron: by_neuron[neuron] for neuron in self.remaining(removed)}

    def redundant(self, removed: Sequence[Neuron]) -> list[Candidate[Neuron]]:
        worth, excluded = self.importance(removed), set(removed)
        silent: list[Candidate[Neuron]] = []
        pairs: list[tuple[float, Neuron, Neuron]] = []
        for similarity in neuron_similarity(
            self.evaluation, self.stack, self.widths, self._ablated(removed)
        ):
            layer = similarity.layer
            for neuron in similarity.silent.nonzero().flatten().tolist():
                if (layer, neuron) not in excluded:
                    silent.append(Candidate((layer, neuron), "never fires", -1.0))
            pairs += [
                (cosine, (layer, first), (layer, second))
                for cosine, first, second in similarity.pairs(DUPLICATE_ABOVE)
            ]
        duplicates: dict[Neuron, Candidate[Neuron]] = {}
        for cosine, first, second in sorted(pairs, reverse=True):
            if first not in duplicates and second not in duplicates:
                goes, stays = sorted((first, second), key=lambda neuron: worth[neuron])
                reason = f"duplicate of L{stays[0]}N{stays[1]}, similarity {cosine:.2f}"
                duplicates[goes] = Candidate(goes, reason, -cosine)
        return [*silent, *duplicates.values()]

    def gate_probability(self) -> dict[Neuron, float]:
        return {
            (site.layer, neuron): probability
            for site, gates in self.train_gates(self.stack.name).items()
            for neuron, probability in enumerate(gates.tolist())
        }

    def _ablated(self, removed: Sequence[Neuron]) -> dict[Site, EditFunction]:
        def zero(neurons: list[int], values: Tensor) -> Tensor:
            values = values.clone()
            values[:, neurons] = 0.0
            return values

        return {
            neuron_site(self.stack, layer): partial(zero, neurons)
            for layer, neurons in _by_layer(removed).items()
        }


def _by_layer(neurons: Sequence[Neuron]) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        result.setdefault(layer, []).append(neuron)
    return result


def _by_neuron(activations: ActivationEditor, site: Site, gradient: Tensor) -> Tensor:
    return activations[site].values * gradient


@dataclass(frozen=True, slots=True, eq=False)
class NeuronSimilarity:
    """The cosines of the neurons of one layer over all tokens, and which neurons never fire.

    Cosines of a neuron that never fires are 0.
    """

    layer: int
    cosines: Float[Tensor, "f f"]
    silent: Bool[Tensor, " f"]

    def pairs(self, above: float) -> list[tuple[float, int, int]]:
        """The cosine and the neurons of each pair with at least this cosine."""
        indices = (self.cosines.triu(1) >= above).nonzero()
        cosines = self.cosines[indices[:, 0], indices[:, 1]]
        return list(zip(cosines.tolist(), *indices.T.tolist(), strict=True))


def neuron_similarity(
    evaluation: Evaluation,
    stack: Stack,
    widths: Mapping[int, int],
    changes: Mapping[Site, EditFunction],
) -> Iterator[NeuronSimilarity]:
    """The similarities of each layer that has neurons.

    Products of all pairs are summed batch by batch, so memory does not grow with the texts. If the
    products of all layers do not fit together, the texts are read several times.
    """
    for layers in _fitting(widths):
        sites = {layer: neuron_site(stack, layer) for layer in layers}
        device = next(stack.parameters()).device
        sums = {layer: torch.zeros(widths[layer], widths[layer], device=device) for layer in layers}
        for activations in evaluation.activations(
            list(sites.values()), "comparing neurons", changes
        ):
            for layer, site in sites.items():
                fired = activations[site].values.float()
                sums[layer].addmm_(fired.T, fired)
        for layer in layers:
            products = sums.pop(layer).cpu()
            norms = products.diagonal().clamp(min=0).sqrt()
            silent = norms == 0
            inverse = torch.where(silent, 0.0, 1 / norms)
            yield NeuronSimilarity(layer, products * inverse[:, None] * inverse, silent)


def _fitting(widths: Mapping[int, int]) -> Iterator[Sequence[int]]:
    """Groups of layers whose products fit into memory together."""
    together: list[int] = []
    for layer, width in widths.items():
        if together and sum(widths[member] ** 2 for member in together) + width**2 > MAX_PRODUCTS:
            yield together
            together = []
        together.append(layer)
    if together:
        yield together
