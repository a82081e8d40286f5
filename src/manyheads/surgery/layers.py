"""Which whole layers can go, and what it costs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from manyheads.errors import InputError
from manyheads.lens.given import Targets
from manyheads.lens.metrics import Metric, named
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.surgery.keeping import find_stack
from manyheads.surgery.measuring import ChosenParts, Exam, Point, Variant, check_wish, within
from manyheads.surgery.prune import prune_layers

__all__ = ["ChosenLayers", "choose_layers"]

ByLayer = Literal["ablation", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLayers(ChosenParts[int]):
    """Whole layers in the order in which they go."""

    unit: ClassVar[str] = "layers"

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that may go, as `prune_layers` takes them."""
        return self.order[: self.count]

    def told(self, start: int, stop: int) -> str:
        return ", ".join(f"layer {layer}" for layer in self.order[start:stop])


def choose_layers(
    model: Model,
    texts: Any,
    by: ByLayer = "ablation",
    *,
    share: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    seed: int = 0,
    shown: bool = True,
) -> ChosenLayers:
    """Layers by what the model loses when each alone is left out, or by chance.

    `iterative` measures those that are left anew after each. A layer that goes changes too much for
    a gradient to foresee, so there is no such order. `share` and `budget` are as in `choose`; one
    layer always stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=3, width=32, heads=4, vocabulary=50, seed=0)
    >>> chosen = choose_layers(model, [[1, 2, 3, 4], [5, 6, 7]], share=0.4, shown=False)
    >>> len(chosen.layers), chosen.met
    (1, True)
    """
    check_wish(by, ("ablation", "random"), share)
    if iterative and by == "random":
        raise InputError("chance does not change with each layer", "leave iterative out")
    exam = Exam.of(model, texts, metric, targets, shown)
    name, total = stack, len(find_stack(model, stack).config.layers)
    limit = total - 1 if share is None else min(total - 1, round(share * total))
    order: list[int] = []
    if by == "random":
        order = random.Random(seed).sample(range(total), total)[:limit]
    while len(order) < limit:
        left = [layer for layer in range(total) if layer not in order]
        sets = [[*order, layer] for layer in left]
        effects = _measured(exam, sets, name)
        harms = [exam.sign * effects.of(place)[1] for place in range(len(left))]
        ranked = sorted(range(len(left)), key=lambda place: harms[place])
        taken = 1 if iterative else limit
        order += [left[place] for place in ranked[:taken]]
    effects = _measured(exam, [order[: count + 1] for count in range(len(order))], name)
    curve = tuple(Point(place + 1, *effects.of(place)) for place in range(len(order)))
    count, met = within(curve, exam.sign, limit, share=share, budget=budget)
    return ChosenLayers(
        by=by,
        metric=named(metric),
        order=tuple(order),
        curve=curve,
        baseline=effects.whole[0],
        total=total,
        count=count,
        met=met,
    )


def _measured(exam: Exam, sets: Sequence[Sequence[int]], stack: StackName | None) -> Any:
    variants = [partial(_left_out, exam.model, each, stack) for each in sets]
    return exam.measure(variants, "leaving layers out")


def _left_out(model: Model, layers: Sequence[int], stack: StackName | None) -> Variant:
    return Variant(prune_layers(model, layers, stack=stack))
