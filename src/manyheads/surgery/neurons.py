"""Which neurons of the feed-forwards can go, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.given import Targets
from manyheads.lens.metrics import Metric, Similarity, named
from manyheads.lens.trunk import Change, Edits, StackName
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.surgery.closing import CLOSING, Closing, close_gates
from manyheads.surgery.doubles import alike_neurons
from manyheads.surgery.keeping import Kept, find_stack
from manyheads.surgery.measuring import Exam, Variant
from manyheads.surgery.parts import ChosenParts, Goes, Point, within
from manyheads.surgery.passage import neuron_site
from manyheads.surgery.ranking import Guess, Parts, pick
from manyheads.surgery.wishes import By, What, check_wish
from manyheads.taps import Site

__all__ = ["ChosenNeurons", "choose_neurons"]

# A budget is followed to a part of all neurons as small as one of so many.
CLOSE = 200
# Neurons more alike than this are doubles, as heads are: at a cosine of 0.9 the other one says
# four fifths of what one of them says, by its square.
DOUBLE_ABOVE = 0.9
Neuron = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenNeurons(ChosenParts[Neuron]):
    """Neurons as (layer, neuron), the curve at some shares of them."""

    unit: ClassVar[What] = "neurons"

    @property
    def neurons(self) -> dict[int, list[int]]:
        """Those that may go by layer, as `prune_neurons` takes them."""
        found: dict[int, list[int]] = {}
        for layer, neuron in self.order[: self.count]:
            found.setdefault(layer, []).append(neuron)
        return found

    def name(self, part: Neuron) -> str:
        return f"L{part[0]}N{part[1]}"


def choose_neurons(
    model: Model,
    texts: Any,
    by: By = "gradient",
    *,
    share: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    points: int = 10,
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    closing: Closing = CLOSING,
    seed: int = 0,
    shown: bool = True,
) -> ChosenNeurons:
    """Which neurons to prune, by the measures of heads, with the curve of what it costs.

    `by` is "gradient" (the least |activation . gradient| first), exact "ablation" of each alone,
    "redundancy", "l0" (a gate a neuron, trained to close) or "random". By redundancy those go first
    that never fire, then of each two of a layer whose activations over all tokens have a cosine of
    0.9 or more the less important one, the most alike first: these are not all neurons, so that a
    share may not be reached. Neurons that do harm go first, by ablation and gradient. They are
    many, and chance makes some look harmful: it takes a gain of three standard errors. The cost is
    measured at `points` shares up to `share`, or up to all; `iterative` measures those that are
    left anew after each of these shares. `budget` bounds the cost as in `choose`, and is measured
    more closely where it is crossed. One neuron of a layer always stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> chosen = choose_neurons(model, [[1, 2, 3, 4], [5, 6, 7]], share=0.25, shown=False)
    >>> len(chosen.neurons[0]), len(chosen.curve)
    (32, 10)
    """
    check_wish("neurons", by, share=share, budget=budget, iterative=iterative)
    if points < 1:
        raise InputError(f"points={points} make no curve", "use 1 or more")
    exam = Exam.of(model, texts, metric, targets, shown)
    parts = Neurons(exam=exam, stack=find_stack(model, stack), closing=closing, seed=seed)
    total = len(parts.every)
    if not total:
        raise InputError(
            "no feed-forward has neurons that could go: there is none, or all are mixtures of "
            "experts, in which each expert has its own",
            "take away heads or layers, or choose a model whose feed-forwards are single",
        )
    wanted = parts.most if share is None else min(parts.most, round(share * total))
    going = pick(parts, by, _counts(wanted, points), iterative=iterative)
    order = [each.part for each in going]
    curve, baseline = _measured(parts, order, _counts(min(wanted, len(order)), points))
    if budget is not None:
        curve = _refined(parts, order, curve, budget)
    count, met = within(curve, exam.sign, wanted, share=share, budget=budget)
    return ChosenNeurons(
        by=by,
        metric=named(metric),
        sign=exam.sign,
        going=going,
        curve=curve,
        baseline=baseline,
        total=total,
        count=count,
        share=share,
        budget=budget,
        met=met,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Neurons(Parts[Neuron]):
    """The neurons of a stack's feed-forwards; experts have none that could go."""

    stack: Stack
    what: ClassVar[What] = "neurons"
    # Among a thousand neurons chance alone puts one beyond three errors.
    errors: ClassVar[float] = 3.0

    @property
    def widths(self) -> dict[int, int]:
        """How many each layer has that has any."""
        every = enumerate(self.stack.config.layers)
        found = {layer: len(Kept.all_of(layer, config).neurons) for layer, config in every}
        return {layer: width for layer, width in found.items() if width}

    @property
    def every(self) -> list[Neuron]:
        return [(layer, neuron) for layer, width in self.widths.items() for neuron in range(width)]

    def home(self, part: Neuron) -> int:
        return part[0]

    def without(self, gone: Sequence[Neuron]) -> Variant:
        return Variant(self.exam.model, self._silenced(gone))

    def guess(self, gone: Sequence[Neuron]) -> dict[Neuron, Guess]:
        sites = {layer: neuron_site(self.stack, layer) for layer in self.widths}
        worths = self.exam.worth(list(sites.values()), _by_neuron, changes=self._silenced(gone))
        taken, found = set(gone), {}
        for layer, worth in zip(sites, worths, strict=True):
            numbers = (worth.size.tolist(), worth.predicted.tolist(), worth.error.tolist())
            for neuron, each in enumerate(zip(*numbers, strict=True)):
                if (layer, neuron) not in taken:
                    found[layer, neuron] = Guess(*each)
        return found

    def redundant(self, gone: Sequence[Neuron]) -> list[Goes[Neuron]]:
        worth, taken = self._importance(gone), set(gone)
        silent: list[Goes[Neuron]] = []
        pairs: list[tuple[float, Neuron, Neuron]] = []
        for alike in alike_neurons(self.exam, self.stack, self.widths, self._silenced(gone)):
            layer = alike.layer
            for neuron in alike.silent.nonzero().flatten().tolist():
                if (layer, neuron) not in taken:
                    silent.append(Goes((layer, neuron), "never fires", -1.0))
            pairs += [
                (cosine, (layer, one), (layer, other))
                for cosine, one, other in alike.pairs(DOUBLE_ABOVE)
            ]
        doubles: dict[Neuron, Goes[Neuron]] = {}
        for cosine, one, other in sorted(pairs, reverse=True):
            if one not in doubles and other not in doubles:
                goes, stays = sorted((one, other), key=lambda each: worth[each])
                why = f"double of L{stays[0]}N{stays[1]}, alike by {cosine:.2f}"
                doubles[goes] = Goes(goes, why, -cosine)
        return [*silent, *doubles.values()]

    def openness(self) -> dict[Neuron, float]:
        gates = close_gates(
            self.exam.model,
            self.exam.given,
            self.closing,
            "neurons",
            targets=self.exam.targets,
            stack=self.stack.name,  # type: ignore[arg-type]
            seed=self.seed,
            shown=self.exam.shown,
        )
        return {
            (site.layer, neuron): openness
            for site, gate in gates.items()
            for neuron, openness in enumerate(gate.tolist())
        }

    def _importance(self, gone: Sequence[Neuron]) -> Mapping[Neuron, float]:
        """By gradient; where the metric has none, the later of two is worth less."""
        if isinstance(self.exam.metric, Similarity):
            return {part: -float(place) for place, part in enumerate(self.every)}
        return {part: each.size for part, each in self.guess(gone).items()}

    def _silenced(self, gone: Sequence[Neuron]) -> dict[Site, Change]:
        by_layer: dict[int, list[int]] = {}
        for layer, neuron in gone:
            by_layer.setdefault(layer, []).append(neuron)
        return {neuron_site(self.stack, layer): _silence(each) for layer, each in by_layer.items()}


def _by_neuron(seen: Edits, site: Site, gradient: Tensor) -> Tensor:
    return seen[site].values * gradient


def _counts(limit: int, points: int) -> list[int]:
    """So many places of the curve, as even as whole numbers are."""
    counts = sorted({max(1, round(limit * place / points)) for place in range(1, points + 1)})
    return [count for count in counts if count <= limit]


def _measured(
    parts: Neurons, order: Sequence[Neuron], counts: Sequence[int]
) -> tuple[tuple[Point, ...], float]:
    """The curve where so many are gone, and the metric of the whole model."""
    variants = [parts.without(order[:count]) for count in counts]
    effects = parts.exam.measure(variants, "cutting neurons")
    curve = tuple(Point(count, *effects.of(place)) for place, count in enumerate(counts))
    return curve, effects.whole[0]


def _refined(
    parts: Neurons, order: Sequence[Neuron], curve: tuple[Point, ...], budget: float
) -> tuple[Point, ...]:
    """The curve with points between the last within the budget and the first beyond it."""
    sign = parts.exam.sign
    fits = {0: True} | {point.taken: sign * point.change <= budget for point in curve}
    low = max(count for count, fit in fits.items() if fit)
    high = min((count for count in fits if count > low), default=low)
    while high - low > max(1, len(order) // CLOSE):
        middle = (low + high) // 2
        [point], _ = _measured(parts, order, [middle])
        curve = (*curve, point)
        low, high = (middle, high) if sign * point.change <= budget else (low, middle)
    return tuple(sorted(curve, key=lambda point: point.taken))


def _silence(neurons: list[int]) -> Change:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[:, neurons] = 0.0
        return values

    return change
