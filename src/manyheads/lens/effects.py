"""The metric of a model without some heads, for many choices of heads at the cost of few."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.lens.given import Given, Targets, read, shares
from manyheads.lens.metrics import Metric, judge, weighed
from manyheads.lens.stand_ins import How, StandIns, stand_ins
from manyheads.lens.trunk import Change, Edits, Part, StackName, Trunk, part_of
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.models.vision import Vision
from manyheads.parts.relaid import relaid
from manyheads.progress import Progress
from manyheads.taps import Head, Site, Sublayer, Tap

__all__ = ["Effects", "Heads", "Measured", "Options", "Study"]

Heads = tuple[Head, ...]
# Which sets were taken away, or none: the metric by text with each of them gone, or as things
# stand; and what the texts weigh.
Measured = tuple[list[int], Float[Tensor, "copies b"], Float[Tensor, " b"]]

# Tokens that run side by side: enough to fill the machine, few enough to stay in its caches.
ROOM_ON_CPU = 1024
ROOM_ON_CUDA = 32_768


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Effects:
    """The metric of each text without each set of heads; NaN where it was not measured."""

    sets: tuple[Heads, ...]
    baseline: Float[Tensor, " b"]
    values: Float[Tensor, "b sets"]
    weights: Float[Tensor, " b"]
    complete: bool

    @property
    def whole(self) -> tuple[float, float]:
        """The metric of the model as it is, over the texts it was measured on, and its error."""
        known = ~self.baseline.isnan()
        mean, error = weighed(self.baseline[known], self.weights[known])
        return float(mean), float(error)

    def of(self, place: int) -> tuple[float, float, float]:
        """The metric without a set, how far it changed, and that change's standard error.

        Texts are compared with themselves, so that the error is that of the change alone.
        """
        known = ~self.values[:, place].isnan()
        if not bool((self.weights[known] > 0).any()):
            return (torch.nan,) * 3
        after, weights = self.values[known, place], self.weights[known]
        change, error = weighed(after - self.baseline[known], weights)
        return float(weighed(after, weights)[0]), float(change), float(error)


class Options(TypedDict, total=False):
    """How heads are taken away and what is measured; `ablate` says what each means."""

    how: How
    metric: Metric
    targets: Targets | None
    stack: StackName | None
    sublayer: Sublayer
    seed: int
    room: int | None
    shown: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Study:
    """Everything that stays the same while heads come and go."""

    part: Part
    given: Given
    metric: Metric
    targets: Targets | None
    instead: StandIns
    room: int
    shown: bool
    sizes: list[int]

    @classmethod
    def of(cls, model: Model, texts: Any, **options: Unpack[Options]) -> "Study":
        part = part_of(model, options.get("stack"), options.get("sublayer", Sublayer.ATTENTION))
        given = read(model, texts)
        room = options.get("room")
        if room is None:
            on_cuda = next(model.parameters()).is_cuda
            room = ROOM_ON_CUDA if on_cuda else ROOM_ON_CPU
        how, seed = options.get("how", "zero"), options.get("seed", 0)
        with resting(model), torch.no_grad():
            instead = stand_ins(part, given, how, seed=seed, room=room)
        return cls(
            part=part,
            given=given,
            metric=options.get("metric", "loss"),
            targets=options.get("targets"),
            instead=instead,
            room=room,
            shown=options.get("shown", True),
            sizes=given.sizes(model),
        )

    def measure(self, sets: Sequence[Heads], fixed: Heads = ()) -> Effects:
        """The metric without each set, all of them beside the heads that are always taken away.

        What was measured before Ctrl-C is kept.
        """
        return self.collect("ablating", sets, lambda texts: self._share(texts, sets, fixed))

    def collect(
        self, label: str, sets: Sequence[Heads], measure: Callable[[range], Iterator[Measured]]
    ) -> Effects:
        """What `measure` tells of one share of the texts after another; Ctrl-C keeps it."""
        texts = len(self.given)
        baseline = torch.full((texts,), torch.nan, dtype=torch.float64)
        weights = torch.zeros(texts, dtype=torch.float64)
        values = torch.full((texts, len(sets)), torch.nan, dtype=torch.float64)
        complete = True
        parts = list(shares(self.sizes, self.room))
        total = len(parts) * max(1, len(sets))
        with (
            Progress(label, total=total, unit="runs", shown=self.shown) as bar,
            resting(self.part.model),
            relaid(self.part.model, sum(self.sizes) * max(1, len(sets)), *self._words()),
            torch.no_grad(),
        ):
            try:
                for chosen in parts:
                    rows = slice(chosen.start, chosen.stop)
                    for places, found, weighing in measure(chosen):
                        weights[rows] = weighing
                        if places:
                            values[rows, places] = found.T
                            bar.advance(len(places))
                        else:
                            baseline[rows] = found[0]
            except KeyboardInterrupt:
                if values.isnan().all():
                    raise
                complete = False
        return Effects(
            sets=tuple(sets), baseline=baseline, values=values, weights=weights, complete=complete
        )

    def _words(self) -> list[Tensor]:
        """The vectors that hidden states are multiplied with, where an embedding owns them."""
        model = self.part.model
        if model.readout is None or isinstance(model, Vision):
            return []
        vectors = model.readout.vectors(model.table)
        return [vectors] if isinstance(vectors, nn.Parameter) else []

    def _share(self, texts: range, sets: Sequence[Heads], fixed: Heads) -> Iterator[Measured]:
        """First what the texts give as things stand, then without one group of sets each."""
        layers = sorted({head.layer for each in (*sets, fixed) for head in each})
        instead = self.instead.of(texts, layers)
        judged = judge(self.part.model, self.given, texts, self.metric, self.targets)
        changes = self._changes([fixed], layers, instead)
        trunk = Trunk(self.part, self.given.select(texts), layers=layers, changes=changes)
        weights = judged.weights.double().cpu()
        yield [], judged(trunk.hidden).double().cpu(), weights
        copies = max(1, self.room // max(1, sum(self.sizes[text] for text in texts)))
        for start, places in _by_first_layer(sets, copies):
            taken = [(*sets[place], *fixed) for place in places]
            above = [layer for layer in layers if layer >= start]
            edits = Edits(self._changes(taken, above, instead))
            hidden = trunk.speak(start, edits, len(places))
            yield places, judged(hidden, len(places)).double().cpu(), weights

    def _changes(
        self, taken: Sequence[Heads], layers: Sequence[int], instead: Mapping[int, Tensor]
    ) -> dict[Site, Change]:
        """At each layer, for every copy of the batch, the heads that are taken away in it."""
        found: dict[Site, Change] = {}
        for layer in layers:
            gone = [[head.head for head in heads if head.layer == layer] for heads in taken]
            if any(gone):
                found[self.part.site(layer, Tap.HEAD_OUTPUT)] = _take_away(gone, instead[layer])
        return found


def _take_away(gone: Sequence[Sequence[int]], instead: Float[Tensor, "_ h d"]) -> Change:
    def change(values: Tensor) -> Tensor:
        copies = values.unflatten(0, (len(gone), -1)).clone()
        for copy, heads in zip(copies, gone, strict=True):
            if heads:
                copy[:, list(heads)] = instead[:, list(heads)].to(copy.dtype)
        return copies.flatten(0, 1)

    return change


def _by_first_layer(sets: Sequence[Heads], copies: int) -> Iterator[tuple[int, list[int]]]:
    """Places of sets that can go on from the same layer, so many together."""

    def first(place: int) -> int:
        return min(head.layer for head in sets[place])

    order = sorted((place for place in range(len(sets)) if sets[place]), key=first)
    for layer, places in groupby(order, key=first):
        group = list(places)
        for start in range(0, len(group), copies):
            yield layer, group[start : start + copies]
