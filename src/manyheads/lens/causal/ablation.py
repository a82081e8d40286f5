"""Ablation: what a model loses without a head, without a set of heads, and head after head."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import AblationOptions, Effects, HeadAblation, is_harmful
from manyheads.lens.causal.replacement import How
from manyheads.lens.inputs.cached_run import Part, StackName, find_heads
from manyheads.lens.inputs.metrics import Metric, better, named
from manyheads.lens.inputs.texts import Targets
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.by_head import ByHead, Tabular, told_change
from manyheads.lens.results.files import Result
from manyheads.models.build import Model
from manyheads.taps import Head, Sublayer

HeadNames = Literal["all"] | Iterable[Head | Address | str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Ablation(ByHead):
    """The metric without each head alone ("metric") and its change ("change"), with errors.

    A head that was not asked for, or not reached before Ctrl-C, has NaN.
    """

    @property
    def baseline(self) -> float:
        """The metric of the whole model."""
        return float(self.facts["baseline"])

    @property
    def complete(self) -> bool:
        """Whether every head was measured on every text."""
        return bool(self.facts["complete"])

    def harmful(self, errors: float = 1.0) -> list[tuple[Address, float]]:
        """Heads without which the model does better by more than so many standard errors."""
        sign = 1.0 if self.facts["better"] == "lower" else -1.0
        column = self["change"]
        found = is_harmful(sign, column.means, column.errors, errors)
        pairs = zip(self.addresses, column.means.tolist(), found, strict=True)
        return sorted(
            ((address, change) for address, change, harms in pairs if harms),
            key=lambda pair: sign * pair[1],
        )


@dataclass(frozen=True, slots=True)
class Without(Result):
    """The metric without a set of heads, how far it changed, and that change's standard error."""

    heads: tuple[Head, ...]
    value: float
    change: float
    error: float
    baseline: float
    complete: bool = True

    def __str__(self) -> str:
        names = ", ".join(map(str, self.heads)) or "nothing"
        changed = told_change(self.change, self.error)
        return f"without {names}: {self.value:.4f}, a change of {changed}"


@dataclass(frozen=True, slots=True)
class Cumulative(Tabular):
    """Heads taken away one after another: each step has all that went before it."""

    steps: tuple[Without, ...]
    baseline: float
    complete: bool = True

    @property
    def order(self) -> tuple[Head, ...]:
        return tuple(step.heads[-1] for step in self.steps)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "taken": place + 1,
                "head": str(step.heads[-1]),
                "value": step.value,
                "change": step.change,
                "change_error": step.error,
            }
            for place, step in enumerate(self.steps)
        ]

    def __str__(self) -> str:
        lines = [f"with all heads: {self.baseline:.4f}"]
        for row in self.rows():
            lines.append(f"  {row['taken']:>4}  {row['head']:<8} {row['value']:.4f}")
        return "\n".join(lines)


def ablate(
    model: Model,
    texts: Any,
    heads: HeadNames = "all",
    replace_with: How = "zero",
    metric: Metric = "loss",
    *,
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    seed: int = 0,
    room: int | None = None,
    shown: bool = True,
) -> Ablation:
    """Every head alone (arXiv 1905.10650): exact, and only the layers from the head's own up run.

    `texts` are strings, token ids or a Ragged; pairs for a `Seq2Seq`, images for a `Vision`.
    `targets` say what is right where the texts do not: for masked words {position: id} a text, for
    classes one a text. `room` is how many tokens run side by side.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = ablate(model, [[1, 2, 3, 4], [5, 6, 7]])
    >>> [str(address) for address in result.addresses], result.complete
    (['L0H0', 'L0H1', 'L1H0', 'L1H1'], True)
    """
    ablation = HeadAblation.of(
        model,
        texts,
        replace_with=replace_with,
        metric=metric,
        targets=targets,
        stack=stack,
        sublayer=sublayer,
        seed=seed,
        room=room,
        shown=shown,
    )
    chosen = find_heads(ablation.part, heads)
    effects = ablation.measure([(head,) for head in chosen])
    return _by_head(ablation.part, chosen, effects, replace_with, metric)


def ablate_together(
    model: Model,
    texts: Any,
    heads: HeadNames,
    **options: Unpack[AblationOptions],
) -> Without:
    """A set of heads at once."""
    ablation = HeadAblation.of(model, texts, **options)
    chosen = find_heads(ablation.part, heads)
    return _without(ablation.measure([chosen]), 0)


def ablate_in_order(
    model: Model,
    texts: Any,
    order: Sequence[Head | Address | str],
    **options: Unpack[AblationOptions],
) -> Cumulative:
    """The first head, the first two, and so on: the pruning curve of arXiv 1905.10650."""
    ablation = HeadAblation.of(model, texts, **options)
    chosen = find_heads(ablation.part, order)
    effects = ablation.measure_in_order(chosen)
    steps = tuple(_without(effects, place) for place in range(len(chosen)))
    return Cumulative(steps, effects.whole[0], effects.complete)


def ablate_greedily(
    model: Model,
    texts: Any,
    steps: int,
    heads: HeadNames = "all",
    **options: Unpack[AblationOptions],
) -> Cumulative:
    """At each step the head whose loss hurts least, given those already taken away.

    Each step measures every head that is left, so `steps` of all heads cost as many `ablate`s.
    """
    ablation = HeadAblation.of(model, texts, **options)
    left = list(find_heads(ablation.part, heads))
    if not 1 <= steps <= len(left):
        raise InputError(f"steps={steps} of {len(left)} heads", f"use 1 to {len(left)}")
    return _greedy(ablation, left, steps, better(ablation.evaluation.metric) == "lower")


def _greedy(ablation: HeadAblation, left: list[Head], steps: int, lower: bool) -> Cumulative:
    taken: tuple[Head, ...] = ()
    found: list[Without] = []
    first: Effects | None = None
    for _ in range(steps):
        try:
            effects = ablation.measure([(head,) for head in left], fixed=taken)
        except KeyboardInterrupt:
            if first is None:
                raise
            return Cumulative(tuple(found), first.whole[0], complete=False)
        first = first or effects
        values = [effects.of(place)[0] for place in range(len(left))]
        if not effects.complete:
            # A step that compared only some heads would choose among those alone.
            return Cumulative(tuple(found), first.whole[0], complete=False)
        best = int(np.argmin(values) if lower else np.argmax(values))
        taken = (*taken, left.pop(best))
        # The change is from the whole model, not from the step before.
        whole = Effects(
            sets=(taken,),
            baseline=first.baseline,
            values=effects.values[:, best : best + 1],
            weights=effects.weights,
            complete=True,
        )
        found.append(_without(whole, 0))
    assert first is not None
    return Cumulative(tuple(found), first.whole[0])


def _without(effects: Effects, place: int) -> Without:
    value, change, error = effects.of(place)
    baseline = effects.whole[0]
    if not effects.sets[place]:
        value, change, error = baseline, 0.0, 0.0
    return Without(effects.sets[place], value, change, error, baseline, effects.complete)


def _by_head(
    part: Part, heads: Sequence[Head], effects: Effects, replace_with: How, metric: Metric
) -> Ablation:
    places = {head: place for place, head in enumerate(part.heads)}
    columns = np.full((3, len(places)), np.nan)
    for place, head in enumerate(heads):
        columns[:, places[head]] = effects.of(place)
    baseline, error = effects.whole
    return Ablation(
        kind="ablation",
        blocks=part.blocks,
        means={"metric": columns[0], "change": columns[1]},
        errors={"change": columns[2]},
        facts={
            "replace_with": replace_with,
            "metric": named(metric),
            "better": better(metric),
            "baseline": baseline,
            "baseline_error": None if np.isnan(error) else error,
            "texts": int((~effects.baseline.isnan()).sum()),
            "complete": effects.complete,
        },
    )
