"""Selection of heads, neurons or layers: the order of their removal, and how many can go."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, get_args

from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.causal import evaluate
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.results.tables import format_change
from manyheads.surgery.selection.l0_selection import L0Config, train_l0_gates
from manyheads.surgery.selection.results import (
    Candidate,
    CurvePoint,
    Order,
    Selection,
    UnitName,
    count_within,
)
from manyheads.taps import Site

Each = TypeVar("Each", bound=Hashable)
AnySelection = TypeVar("AnySelection", bound=Selection[Any])

# Where a budget is crossed, the count is searched to a precision of 1 / REFINEMENT.
REFINEMENT = 200


@dataclass(frozen=True, slots=True)
class GradientScore:
    """A unit's importance by gradient, and the predicted change of the metric without it."""

    importance: float
    predicted: float
    error: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unit(ABC, Generic[Each]):
    """All units of one kind in a model, and the measurements that the orders need.

    `removed` units are already removed from the model that is measured.
    """

    evaluation: evaluate.Evaluation
    l0: L0Config
    seed: int
    name: ClassVar[UnitName]
    # A unit is harmful if the metric improves without it by this many standard errors.
    errors: ClassVar[float] = 1.0
    # At most this many units that gradients call harmful are ablated to confirm it.
    max_suspects: ClassVar[int] = 64

    @property
    @abstractmethod
    def units(self) -> Sequence[Each]: ...

    @abstractmethod
    def group(self, unit: Each) -> Hashable:
        """The group of a unit, of which one unit must stay; None if all may go."""

    @abstractmethod
    def without(self, removed: Sequence[Each]) -> evaluate.Variant:
        """The model without some units."""

    @abstractmethod
    def gradient_scores(self, removed: Sequence[Each]) -> Mapping[Each, GradientScore]:
        """The gradient scores of all units that are left."""

    @abstractmethod
    def redundant(self, removed: Sequence[Each]) -> list[Candidate[Each]]:
        """The units that duplicate others that are left, most redundant first."""

    @abstractmethod
    def gate_probability(self) -> Mapping[Each, float]:
        """How open each unit's trained L0 gate is."""

    def counts(self, limit: int) -> Sequence[int]:
        """The points of the curve up to `limit` units."""
        return range(1, limit + 1)

    def measure(
        self, sets: Sequence[Sequence[Each]], fixed: Sequence[Each] = ()
    ) -> evaluate.Effects:
        """The metric without each set, from a model that lacks the `fixed` units already."""
        variants = [partial(self.without, [*fixed, *units]) for units in sets]
        label = f"ablating {self.name}"
        if not fixed:
            return self.evaluation.measure(variants, label)
        return self.evaluation.measure(
            [partial(self.without, fixed), *variants], label
        ).from_first()

    def measure_in_order(self, order: Sequence[Each], counts: Sequence[int]) -> evaluate.Effects:
        """The metric without the first `counts` units of an order."""
        return self.measure([order[:count] for count in counts])

    @property
    def max_removable(self) -> int:
        """How many units can be removed at all."""
        groups = {self.group(unit) for unit in self.units} - {None}
        return len(self.units) - len(groups)

    def remaining(self, removed: Sequence[Each]) -> list[Each]:
        excluded = set(removed)
        return [unit for unit in self.units if unit not in excluded]

    def importance(self, removed: Sequence[Each]) -> Mapping[Each, float]:
        """By gradient; if the metric has none, later units count as less important."""
        evaluation = self.evaluation
        if evaluation.model.readout is None or isinstance(evaluation.metric, metrics.Similarity):
            return {unit: -float(place) for place, unit in enumerate(self.units)}
        scores = self.gradient_scores(removed)
        return {unit: score.importance for unit, score in scores.items()}

    def train_gates(self, stack: cached_run.StackName | None = None) -> Mapping[Site, Tensor]:
        """The trained L0 gate of every unit, by site."""
        return train_l0_gates(
            self.evaluation.model,
            self.evaluation.inputs,
            self.l0,
            self.name,
            targets=self.evaluation.targets,
            stack=stack,
            seed=self.seed,
            progress=self.evaluation.progress,
        )


def scores_by_unit(
    units: Iterable[Each], scores: Iterable[evaluate.GradientScores]
) -> dict[Each, GradientScore]:
    """The score of each unit, from those of all units of each site."""
    numbers = (
        GradientScore(*values)
        for score in scores
        for values in zip(
            score.importance.tolist(), score.predicted.tolist(), score.error.tolist(), strict=True
        )
    )
    return dict(zip(units, numbers, strict=True))


SORT_KEY = attrgetter("sort_key")
# Candidates best first, and whether all of them were measured.
Ranking = tuple[list[Candidate[Each]], bool]


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """Which units to select; checked before anything is measured."""

    unit: UnitName
    by: Order
    fraction: float | None
    budget: float | None
    iterative: bool

    def __post_init__(self) -> None:
        if self.by not in get_args(Order):
            raise InputError(
                f"by must be an order of {self.unit}, got {self.by!r}",
                f"use {', '.join(get_args(Order))}",
            )
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise InputError(f"fraction must be in [0, 1], got {self.fraction:g}", "use 0 to 1")
        if self.budget is not None and self.budget != self.budget:
            raise InputError(f"budget must be a number, got {self.budget}", "use 0 or more")
        if self.iterative and self.by in ("l0", "random"):
            raise InputError(f"iterative has no effect with by={self.by!r}", "leave iterative out")


def select(unit: Unit[Each], kind: type[AnySelection], request: SelectionRequest) -> AnySelection:
    """Order the units, measure the curve of their removal, and count how many can go."""
    by, fraction, budget = request.by, request.fraction, request.budget
    total = len(unit.units)
    limit = total if fraction is None else round(fraction * total)
    reachable = min(limit, unit.max_removable)
    if request.iterative:
        candidates, complete = _greedy(unit, by, unit.counts(reachable), budget)
    else:
        ranked, complete = ORDERS[by](unit, ())
        candidates = _keep_last_of_group(unit, ranked, ())
    order = [candidate.unit for candidate in candidates]
    counts = unit.counts(min(reachable, len(order)))
    effects = unit.measure_in_order(order[: max(counts, default=0)], counts)
    curve = _points(effects, counts)
    if budget is not None:
        curve = _refine(unit, order, curve, budget)
    sign = unit.evaluation.sign
    count, met = count_within(curve, sign, limit, fraction=fraction, budget=budget)
    return kind(
        by=by,
        metric=metrics.metric_name(unit.evaluation.metric),
        sign=sign,
        candidates=tuple(candidates),
        curve=tuple(curve),
        baseline=effects.baseline_mean[0],
        total=total,
        count=count,
        fraction=fraction,
        budget=budget,
        met=met,
        complete=complete and effects.complete,
    )


def _greedy(
    unit: Unit[Each], by: Order, counts: Sequence[int], budget: float | None
) -> Ranking[Each]:
    """The best candidates up to each count; those that are left are measured again after each.

    It ends where the budget is exceeded.
    """
    candidates: list[Candidate[Each]] = []
    for count in counts:
        removed = [candidate.unit for candidate in candidates]
        ranked, complete = ORDERS[by](unit, removed)
        if not complete:
            # Interrupted: a choice among only some of the units would be wrong.
            return candidates, False
        better = _keep_last_of_group(unit, ranked, removed)[: count - len(removed)]
        if not better:
            break
        candidates += better
        if budget is not None:
            order = [candidate.unit for candidate in candidates]
            change = unit.measure_in_order(order, [len(order)]).of(0)[1]
            if unit.evaluation.sign * change > budget:
                break
    return candidates, True


def _keep_last_of_group(
    unit: Unit[Each], order: Sequence[Candidate[Each]], removed: Sequence[Each]
) -> list[Candidate[Each]]:
    """The candidates without the last one of each group."""
    sizes = Counter(unit.group(member) for member in unit.remaining(removed))
    candidates = []
    for candidate in order:
        group = unit.group(candidate.unit)
        if group is None or sizes[group] > 1:
            sizes[group] -= 1
            candidates.append(candidate)
    return candidates


def _points(effects: evaluate.Effects, counts: Sequence[int]) -> list[CurvePoint]:
    return [CurvePoint(count, *effects.of(place)) for place, count in enumerate(counts)]


def _refine(
    unit: Unit[Each], order: Sequence[Each], curve: Sequence[CurvePoint], budget: float
) -> list[CurvePoint]:
    """The curve with more points where it crosses the budget."""
    sign, points = unit.evaluation.sign, list(curve)
    fits = {0: True} | {point.removed: sign * point.change <= budget for point in points}
    low = max(count for count, fit in fits.items() if fit)
    high = min((count for count in fits if count > low), default=low)
    while high - low > max(1, len(order) // REFINEMENT):
        middle = (low + high) // 2
        [point] = _points(unit.measure_in_order(order, [middle]), [middle])
        points.append(point)
        low, high = (middle, high) if sign * point.change <= budget else (low, middle)
    return sorted(points, key=lambda point: point.removed)


def by_ablation(unit: Unit[Each], removed: Sequence[Each]) -> Ranking[Each]:
    """The least harm first, measured by ablating each unit alone."""
    candidates, complete = _ablate(unit, unit.remaining(removed), removed)
    return sorted(candidates, key=SORT_KEY), complete


def _ablate(unit: Unit[Each], suspects: Sequence[Each], removed: Sequence[Each]) -> Ranking[Each]:
    if not suspects:
        return [], True
    effects = unit.measure([[suspect] for suspect in suspects], removed)
    sign, word = unit.evaluation.sign, "then" if removed else "alone"
    candidates = []
    for place, suspect in enumerate(suspects):
        _, change, error = effects.of(place)
        if change == change:
            reason = f"{word} {format_change(change, error)}"
            harmful = bool(evaluate.is_harmful(sign, change, error, unit.errors))
            candidates.append(Candidate(suspect, reason, sign * change, harmful))
    return candidates, effects.complete


def by_gradient(unit: Unit[Each], removed: Sequence[Each]) -> Ranking[Each]:
    """The least |value . gradient| first (arXiv 1905.10650), after units that are harmful.

    A gradient predicts the effect of a small change, and removing a unit is a large one, so units
    that gradients call harmful are ablated to confirm it.
    """
    if isinstance(unit.evaluation.metric, metrics.Similarity):
        raise InputError(
            "the gradient of the similarity is zero, since the model is compared with itself",
            'use by="ablation" or by="redundancy"',
        )
    sign, scores = unit.evaluation.sign, unit.gradient_scores(removed)
    suspects = [
        member
        for member, score in scores.items()
        if evaluate.is_harmful(sign, score.predicted, score.error, unit.errors)
    ]
    suspects.sort(key=lambda suspect: sign * scores[suspect].predicted)
    ablated, complete = _ablate(unit, suspects[: unit.max_suspects], removed)
    harms = {candidate.unit: candidate for candidate in ablated if candidate.harmful}
    candidates = []
    for member, score in scores.items():
        reason = f"importance {score.importance:.3g}, predicted {score.predicted:+.3g}"
        value = harms[member].score if member in harms else score.importance
        candidates.append(Candidate(member, reason, value, member in harms))
    return sorted(candidates, key=SORT_KEY), complete


def by_redundancy(unit: Unit[Each], removed: Sequence[Each]) -> Ranking[Each]:
    """Duplicate units, most redundant first."""
    return unit.redundant(removed), True


def by_l0(unit: Unit[Each], removed: Sequence[Each]) -> Ranking[Each]:
    """The most closed gates first, trained on the texts with all weights frozen."""
    gates = unit.gate_probability()
    result = [
        Candidate(member, f"gate at {gates[member]:+.2f}", gates[member])
        for member in unit.remaining(removed)
    ]
    return sorted(result, key=SORT_KEY), True


def by_random(unit: Unit[Each], removed: Sequence[Each]) -> Ranking[Each]:
    """A random order: the control."""
    remaining = unit.remaining(removed)
    order = random.Random(unit.seed).sample(remaining, len(remaining))
    return [Candidate(member, "random", float(place)) for place, member in enumerate(order)], True


ORDERS: Mapping[Order, Callable[[Unit[Any], Sequence[Any]], Ranking[Any]]] = {
    "ablation": by_ablation,
    "gradient": by_gradient,
    "redundancy": by_redundancy,
    "l0": by_l0,
    "random": by_random,
}
