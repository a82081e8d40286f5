"""Which whole layers can go, and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.lens.given import Targets
from manyheads.lens.metrics import Metric, named
from manyheads.lens.trunk import Edits, StackName
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.surgery.closing import CLOSING, Closing, close_gates
from manyheads.surgery.keeping import find_stack
from manyheads.surgery.measuring import Exam, Variant
from manyheads.surgery.parts import ChosenParts, Goes, Point, within
from manyheads.surgery.passage import passage
from manyheads.surgery.prune import prune_layers
from manyheads.surgery.ranking import Guess, Parts, pick
from manyheads.surgery.wishes import By, What, check_wish
from manyheads.taps import Site

__all__ = ["ChosenLayers", "choose_layers"]

# A layer without any sublayer: nothing changes when it goes.
NOTHING = Guess(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLayers(ChosenParts[int]):
    """Whole layers in the order in which they go."""

    unit: ClassVar[What] = "layers"

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that may go, as `prune_layers` takes them."""
        return self.order[: self.count]

    def name(self, part: int) -> str:
        return f"layer {part}"


def choose_layers(
    model: Model,
    texts: Any,
    by: By = "ablation",
    *,
    share: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    metric: Metric = "loss",
    targets: Targets | None = None,
    stack: StackName | None = None,
    closing: Closing = CLOSING,
    seed: int = 0,
    shown: bool = True,
) -> ChosenLayers:
    """Which whole layers to prune, by the measures of heads, with the curve of what it costs.

    `by` is what the model loses when each alone is left out, "ablation"; "gradient", the least
    |(what leaves - what enters) . gradient| first, which is how the metric changes where a layer
    does a little less; "redundancy", where the mean cosine over tokens of what enters a layer and
    what leaves it is nearest to 1 (block influence, arXiv 2403.03853); "l0", a gate a layer,
    trained to close; or "random". Layers that do harm go first, by ablation and gradient.
    `iterative` measures those that are left anew after each. `share` and `budget` are as in
    `choose`; one layer always stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=3, width=32, heads=4, vocabulary=50, seed=0)
    >>> chosen = choose_layers(model, [[1, 2, 3, 4], [5, 6, 7]], share=0.4, shown=False)
    >>> len(chosen.layers), chosen.met
    (1, True)
    """
    check_wish("layers", by, share=share, budget=budget, iterative=iterative)
    exam = Exam.of(model, texts, metric, targets, shown)
    find_stack(model, stack)
    parts = Layers(exam=exam, stack=stack, closing=closing, seed=seed)
    total = len(parts.every)
    wanted = parts.most if share is None else min(parts.most, round(share * total))
    going = pick(parts, by, range(1, wanted + 1), iterative=iterative)
    order = [each.part for each in going[:wanted]]
    sets = [order[: count + 1] for count in range(len(order))]
    effects = exam.measure([partial(parts.without, each) for each in sets], "leaving layers out")
    curve = tuple(Point(place + 1, *effects.of(place)) for place in range(len(order)))
    count, met = within(curve, exam.sign, wanted, share=share, budget=budget)
    return ChosenLayers(
        by=by,
        metric=named(metric),
        sign=exam.sign,
        going=going,
        curve=curve,
        baseline=effects.whole[0],
        total=total,
        count=count,
        share=share,
        budget=budget,
        met=met,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layers(Parts[int]):
    """The layers of a stack."""

    stack: StackName | None
    what: ClassVar[What] = "layers"

    @property
    def every(self) -> range:
        return range(len(find_stack(self.exam.model, self.stack).config.layers))

    def home(self, part: int) -> None:
        del part

    def without(self, gone: Sequence[int]) -> Variant:
        return Variant(prune_layers(self.exam.model, gone, stack=self.stack))

    def guess(self, gone: Sequence[int]) -> dict[int, Guess]:
        exam, passages = self._shorter(gone)
        ends = {left: entered for entered, left in passages.values()}
        worths = exam.worth(list(ends), _by_layer(ends), keep=list(ends.values()))
        found = dict.fromkeys(self._left(gone), NOTHING)
        for layer, worth in zip(passages, worths, strict=True):
            found[layer] = Guess(float(worth.size), float(worth.predicted), float(worth.error))
        return found

    def redundant(self, gone: Sequence[int]) -> list[Goes[int]]:
        exam, passages = self._shorter(gone)
        sums, tokens = dict.fromkeys(passages, 0.0), dict.fromkeys(passages, 0)
        sites = [site for both in passages.values() for site in both]
        for seen in exam.look(sites, "comparing layers"):
            for layer, (entered, left) in passages.items():
                one, other = (seen[site].values.double() for site in (entered, left))
                sums[layer] += float(torch.cosine_similarity(one, other, dim=-1).sum())
                tokens[layer] += len(one)
        alike = dict.fromkeys(self._left(gone), 1.0)
        alike |= {layer: sums[layer] / max(1, tokens[layer]) for layer in passages}
        listed = [
            Goes(layer, f"in and out alike by {cosine:.3f}", -cosine)
            for layer, cosine in alike.items()
        ]
        return sorted(listed, key=lambda each: each.place)

    def openness(self) -> dict[int, float]:
        gates = close_gates(
            self.exam.model,
            self.exam.given,
            self.closing,
            "layers",
            targets=self.exam.targets,
            stack=self.stack,
            seed=self.seed,
            shown=self.exam.shown,
        )
        # A layer without any sublayer is closed as it is.
        found = dict.fromkeys(self.every, -torch.inf)
        return found | {site.layer: float(gate) for site, gate in gates.items()}

    def _left(self, gone: Sequence[int]) -> list[int]:
        return [layer for layer in self.every if layer not in gone]

    def _shorter(self, gone: Sequence[int]) -> tuple[Exam, dict[int, tuple[Site, Site]]]:
        """The model without some layers, and where each of the others is entered and left in it."""
        model = self.without(gone).model if gone else self.exam.model
        stack: Stack = find_stack(model, self.stack)
        passages = {}
        for place, layer in enumerate(self._left(gone)):
            ends = passage(stack, place)
            if ends is not None:
                passages[layer] = ends
        return replace(self.exam, model=model), passages


def _by_layer(ends: dict[Site, Site]) -> Any:
    def said(seen: Edits, site: Site, gradient: Tensor) -> Tensor:
        written = seen[site].values - seen[ends[site]].values
        return (written * gradient).sum(-1, keepdim=True)

    return said
