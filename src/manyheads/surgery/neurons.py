"""Which neurons of the feed-forwards can go, and what it costs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.given import Targets
from manyheads.lens.metrics import Metric, named
from manyheads.lens.trunk import Change, StackName
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.surgery.keeping import Kept, find_stack
from manyheads.surgery.measuring import ChosenParts, Exam, Point, Variant, check_wish, within
from manyheads.taps import Site, Sublayer, Tap

__all__ = ["ChosenNeurons", "choose_neurons"]

# A budget is followed to a part of all neurons as small as one of so many.
CLOSE = 200
ByNeuron = Literal["ablation", "gradient", "random"]
Neuron = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenNeurons(ChosenParts[Neuron]):
    """Neurons as (layer, neuron), the curve at some shares of them."""

    unit: ClassVar[str] = "neurons"

    @property
    def neurons(self) -> dict[int, list[int]]:
        """Those that may go by layer, as `prune_neurons` takes them."""
        found: dict[int, list[int]] = {}
        for layer, neuron in self.order[: self.count]:
            found.setdefault(layer, []).append(neuron)
        return found


def choose_neurons(
    model: Model,
    texts: Any,
    by: ByNeuron = "gradient",
    *,
    share: float | None = None,
    budget: float | None = None,
    points: int = 10,
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    seed: int = 0,
    shown: bool = True,
) -> ChosenNeurons:
    """Neurons by gradient importance, by exact ablation of each alone, or by chance.

    The cost is measured at `points` shares up to `share`, or up to all of them; `budget` bounds it
    as in `choose`, and is measured more closely where it is crossed. One neuron of a layer always
    stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> chosen = choose_neurons(model, [[1, 2, 3, 4], [5, 6, 7]], share=0.25, shown=False)
    >>> len(chosen.neurons[0]), len(chosen.curve)
    (32, 10)
    """
    check_wish(by, ("ablation", "gradient", "random"), share)
    exam = Exam.of(model, texts, metric, targets, shown)
    chosen = find_stack(model, stack)
    every = _neurons(chosen)
    if not every:
        raise InputError("no feed-forward has neurons that could go", "choose another model")
    order = _spared(_ordered(exam, chosen, every, by, seed))
    limit = len(order) if share is None else min(len(order), round(share * len(every)))
    counts = sorted({max(1, round(limit * place / points)) for place in range(1, points + 1)})
    counts = [count for count in counts if count <= limit]
    curve, baseline = _measured(exam, chosen, order, counts)
    if budget is not None:
        curve = _refined(exam, chosen, order, curve, budget)
    count, met = within(curve, exam.sign, limit, share=share, budget=budget)
    return ChosenNeurons(
        by=by,
        metric=named(metric),
        order=tuple(order),
        curve=curve,
        baseline=baseline,
        total=len(every),
        count=count,
        met=met,
    )


def _neurons(stack: Stack) -> list[Neuron]:
    return [
        (layer, neuron)
        for layer, config in enumerate(stack.config.layers)
        for neuron in Kept.all_of(layer, config).neurons
    ]


def _site(stack: Stack, layer: int) -> Site:
    return Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack.name)


def _ordered(
    exam: Exam, stack: Stack, every: Sequence[Neuron], by: ByNeuron, seed: int
) -> list[Neuron]:
    if by == "random":
        return random.Random(seed).sample(list(every), len(every))
    if by == "gradient":
        layers = sorted({layer for layer, _ in every})
        found = exam.worth([_site(stack, layer) for layer in layers])
        worth = dict(zip(layers, found, strict=True))
        return sorted(every, key=lambda each: float(worth[each[0]][each[1]]))
    variants = [Variant(exam.model, _without(stack, [each])) for each in every]
    effects = exam.measure(variants, "ablating neurons")
    harm = {each: exam.sign * effects.of(place)[1] for place, each in enumerate(every)}
    return sorted(every, key=lambda each: harm[each])


def _measured(
    exam: Exam, stack: Stack, order: Sequence[Neuron], counts: Sequence[int]
) -> tuple[tuple[Point, ...], float]:
    """The curve where so many are gone, and the metric of the whole model."""
    variants = [Variant(exam.model, _without(stack, order[:count])) for count in counts]
    effects = exam.measure(variants, "cutting neurons")
    curve = tuple(Point(count, *effects.of(place)) for place, count in enumerate(counts))
    return curve, effects.whole[0]


def _refined(
    exam: Exam, stack: Stack, order: Sequence[Neuron], curve: tuple[Point, ...], budget: float
) -> tuple[Point, ...]:
    """The curve with points between the last within the budget and the first beyond it."""
    fits = {0: True} | {point.taken: exam.sign * point.change <= budget for point in curve}
    low = max(count for count, fit in fits.items() if fit)
    high = min((count for count in fits if count > low), default=low)
    while high - low > max(1, len(order) // CLOSE):
        middle = (low + high) // 2
        [point], _ = _measured(exam, stack, order, [middle])
        curve = (*curve, point)
        low, high = (middle, high) if exam.sign * point.change <= budget else (low, middle)
    return tuple(sorted(curve, key=lambda point: point.taken))


def _spared(order: Sequence[Neuron]) -> list[Neuron]:
    """The last neuron of every layer stays."""
    last = {layer: (layer, neuron) for layer, neuron in order}
    return [each for each in order if last[each[0]] != each]


def _without(stack: Stack, neurons: Sequence[Neuron]) -> dict[Site, Change]:
    gone: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        gone.setdefault(layer, []).append(neuron)
    return {_site(stack, layer): _silence(each) for layer, each in gone.items()}


def _silence(neurons: list[int]) -> Change:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[:, neurons] = 0.0
        return values

    return change
