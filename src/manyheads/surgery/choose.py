"""Choose: which heads of a model can go, in which order, and what each further one costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from manyheads.lens.ablation import Cumulative, Without
from manyheads.lens.addresses import Address, attention_at, stacks_of
from manyheads.lens.effects import Effects, Study
from manyheads.lens.given import Targets, read
from manyheads.lens.metrics import Metric, named
from manyheads.lens.results import frame_of, told_change
from manyheads.lens.trunk import Part, StackName
from manyheads.lens.walking import measure_in_order
from manyheads.models.build import Model
from manyheads.surgery.closing import CLOSING, Closing
from manyheads.surgery.ordering import ORDERS, HeadGoes, Question
from manyheads.surgery.prune import Keep, prune
from manyheads.surgery.wishes import By, What, check_wish, shortfall
from manyheads.taps import Sublayer

__all__ = ["Chosen", "choose"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Chosen:
    """Heads in the order in which they go, what the model is without the first, the first two, ...

    `heads` are those that may go by what was asked; where it could not be met they are the most
    that come close.
    """

    by: By
    metric: str
    sign: float
    order: tuple[HeadGoes, ...]
    curve: Cumulative
    total: int
    count: int
    share: float | None
    budget: float | None
    met: bool
    unit: ClassVar[What] = "heads"

    @property
    def heads(self) -> tuple[Address, ...]:
        return tuple(each.head for each in self.order[: self.count])

    @property
    def baseline(self) -> float:
        """The metric of the whole model."""
        return self.curve.baseline

    @property
    def harmful(self) -> tuple[Address, ...]:
        """Heads without which the model does better, by more than a standard error."""
        return tuple(each.head for each in self.order if each.harmful)

    @property
    def harmful_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.harmful))

    @property
    def changes(self) -> list[tuple[int, float]]:
        """Of the metric, when so many are gone."""
        return [(place + 1, step.change) for place, step in enumerate(self.curve.steps)]

    @property
    def change(self) -> float:
        """Of the metric without the chosen heads."""
        return self.curve.steps[self.count - 1].change if self.count else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """One record a step of the curve."""
        return [
            {
                "taken": place + 1,
                "share": (place + 1) / self.total,
                "head": str(goes.head),
                "why": goes.why,
                "harmful": goes.harmful,
                "value": step.value,
                "change": step.change,
                "change_error": step.error,
                "goes": place < self.count,
            }
            for place, (goes, step) in enumerate(zip(self.order, self.curve.steps, strict=False))
        ]

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return frame_of(self.rows())

    def __str__(self) -> str:
        told = [
            f"by {self.by}: {self.count} of {self.total} heads may go, {self.metric} "
            f"{self.curve.baseline:.4f} {self.change:+.4f}"
        ]
        if not self.met:
            told.append(f"not as asked: {self.shortfall}")
        if self.harmful:
            told.append(f"better without: {', '.join(map(str, self.harmful))}")
        return "\n".join(told)

    __repr__ = __str__

    @property
    def shortfall(self) -> str:
        """What was asked and could not be had, and the best that was reached."""
        return shortfall(self)


def choose(
    model: Model,
    texts: Any,
    by: By = "ablation",
    *,
    share: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    keep: Keep = "zero",
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    closing: Closing = CLOSING,
    seed: int = 0,
    room: int | None = None,
    shown: bool = True,
) -> Chosen:
    """Which heads of one attention to prune, with the curve of what it costs, and its errors.

    `share` of the heads go, or as many as cost no more than `budget` of the metric (nats a token of
    the loss); with both, that share has to fit that budget, and with none those go that cost
    nothing. `by` is exact ablation head by head, gradient importance (arXiv 1905.10650),
    "redundancy" (one of each two that do the same), "l0" (gates trained to close, arXiv
    1905.09418), or "random", the control. `iterative` measures all that are left anew after each
    head, by ablation or gradient. The curve is always measured exactly. Heads that do harm go
    first. `keep` is what stands in for a head, as in `prune`; other options as in `lens.ablate`.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> chosen = choose(model, [[1, 2, 3, 4], [5, 6, 7]], share=0.5)
    >>> len(chosen.heads), len(chosen.curve.steps), chosen.met
    (2, 2, True)
    """
    check_wish("heads", by, share=share, budget=budget, iterative=iterative)
    given = read(model, texts)
    asked = Question(
        model=model,
        given=given,
        metric=metric,
        targets=targets,
        keep=keep,
        stack=stack,
        sublayer=sublayer,
        seed=seed,
        room=room,
        shown=shown,
        closing=closing,
    )
    study = Study.of(model, given, how=keep, seed=seed, **asked.options)
    heads = [address for block in study.part.blocks for address in block.addresses]
    limit = len(heads) if share is None else round(share * len(heads))
    if iterative:
        found, curve = _one_by_one(asked, study, heads, limit, by, budget)
    else:
        found = _without_last(ORDERS[by](asked, heads), heads, _bound(asked, heads))
        curve = _in_order(study, [each.head for each in found[:limit]])
    bound = budget if budget is not None or share is not None else 0.0
    count = _within(curve.steps, asked.sign, bound)
    enough = limit if share is not None else min(1, len(heads)) if budget is not None else 0
    return Chosen(
        by=by,
        metric=named(metric),
        sign=asked.sign,
        order=tuple(found),
        curve=curve,
        total=len(heads),
        count=count,
        share=share,
        budget=budget,
        met=count >= enough,
    )


def _within(steps: Sequence[Without], sign: float, budget: float | None) -> int:
    """The most heads whose cost stays within the budget."""
    if budget is None:
        return len(steps)
    fitting = [place + 1 for place, step in enumerate(steps) if sign * step.change <= budget]
    return max(fitting, default=0)


def _in_order(study: Study, order: Sequence[Address]) -> Cumulative:
    heads = tuple(address.head for address in order)
    effects = measure_in_order(study, heads)
    steps = tuple(_without(effects, place) for place in range(len(heads)))
    return Cumulative(steps, effects.whole[0], effects.complete)


def _without(effects: Effects, place: int) -> Without:
    value, change, error = effects.of(place)
    return Without(effects.sets[place], value, change, error, effects.whole[0], effects.complete)


def _one_by_one(
    asked: Question,
    study: Study,
    heads: list[Address],
    limit: int,
    by: By,
    budget: float | None,
) -> tuple[list[HeadGoes], Cumulative]:
    """At each step the head that is worth least, given those already gone.

    It ends where the budget is spent: what is left costs more at every step.
    """
    gone: list[HeadGoes] = []
    steps: list[Without] = []
    first: Effects | None = None
    left, complete, bound = list(heads), True, _bound(asked, heads)
    while (may := _may_go(left, bound)) and len(gone) < limit and complete:
        if by == "ablation":
            chosen, effects = _least_harm(asked, study, may, gone, first)
        else:
            chosen = _least_important(asked, left, gone, may)
            effects = study.measure([tuple(each.head.head for each in (*gone, chosen))])
            chosen = replace(chosen, harmful=_helped(asked, steps, effects))
        first, complete = first or effects, effects.complete
        if not complete:
            # A step that compared only some heads would choose among those alone.
            break
        gone.append(chosen)
        left.remove(chosen.head)
        steps.append(replace(_without(effects, 0), baseline=first.whole[0]))
        if budget is not None and asked.sign * steps[-1].change > budget:
            break
    if first is None:
        first = study.measure([])
    return gone, Cumulative(tuple(steps), first.whole[0], complete)


def _helped(asked: Question, steps: Sequence[Without], effects: Effects) -> bool:
    """Whether the model got better by more than an error when the last head went."""
    before = steps[-1].change if steps else 0.0
    _, change, error = effects.of(0)
    return asked.sign * (change - before) < -error


def _least_harm(
    asked: Question,
    study: Study,
    left: Sequence[Address],
    gone: Sequence[HeadGoes],
    first: Effects | None,
) -> tuple[HeadGoes, Effects]:
    fixed = tuple(each.head.head for each in gone)
    effects = study.measure([(head.head,) for head in left], fixed=fixed)
    harms = [asked.sign * effects.of(place)[0] for place in range(len(left))]
    best = int(np.argmin(np.nan_to_num(harms, nan=np.inf)))
    _, change, error = effects.of(best)
    harmful = bool(asked.sign * change < -error)
    goes = HeadGoes(left[best], f"then {told_change(change, error)}", harms[best], harmful)
    # The change is from the whole model, not from the step before.
    whole = replace(
        effects,
        sets=((*fixed, left[best].head),),
        baseline=(first or effects).baseline,
        values=effects.values[:, best : best + 1],
    )
    return goes, whole


def _least_important(
    asked: Question, left: list[Address], gone: Sequence[HeadGoes], may: Sequence[Address]
) -> HeadGoes:
    """By the gradient of the model from which the others are gone already."""
    if len(left) == 1:
        return HeadGoes(left[0], "the last", 0.0)
    pruned = prune(asked.model, [each.head for each in gone], asked.keep, asked.given)
    counted = Part(pruned, *_place(left[0])).blocks
    now = [address for block in counted for address in block.addresses]
    ranked = ORDERS["gradient"](replace(asked, model=pruned), now)
    # Heads keep their order, so that the first that is left is the first here.
    before = dict(zip(now, left, strict=True))
    best = next(each for each in ranked if before[each.head] in may)
    return replace(best, part=before[best.head])


def _bound(asked: Question, heads: Sequence[Address]) -> set[int]:
    """Layers that cannot be without a head: a gate after the projection needs one to gate.

    Without heads it would gate what is always written, a bias or what heads say on average, and
    what comes of that is no bias.
    """
    found = set()
    for address in heads:
        layer = address.head.layer
        stack = stacks_of(asked.model)[address.stack]
        config = attention_at(stack, layer, address.sublayer).config
        writes = asked.keep == "mean" or config.bias in ("output", "all")
        if any(each.at == "final" and (writes or each.how == "plus") for each in config.gates):
            found.add(layer)
    return found


def _may_go(left: Sequence[Address], bound: set[int]) -> list[Address]:
    """All but the last heads of layers that cannot be without one."""
    counts = Counter(each.head.layer for each in left)
    return [each for each in left if each.head.layer not in bound or counts[each.head.layer] > 1]


def _without_last(
    order: Sequence[HeadGoes], heads: Sequence[Address], bound: set[int]
) -> list[HeadGoes]:
    left, found = list(heads), []
    for each in order:
        if each.head in _may_go(left, bound):
            left.remove(each.head)
            found.append(each)
    return found


def _place(address: Address) -> tuple[StackName, Sublayer]:
    return address.stack, address.sublayer  # type: ignore[return-value]
