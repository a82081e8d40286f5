"""Evaluation: the metric of a model beside that of changed versions of it, text by text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.lens.causal.replacement import How, StandIns, stand_ins
from manyheads.lens.inputs.cached_run import Change, Edits, Part, StackName, Trunk, entry, part_of
from manyheads.lens.inputs.metrics import Judge, Metric, better, judge, weighed
from manyheads.lens.inputs.texts import Given, Targets, climb, read, shares
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.weight_layout import relaid
from manyheads.progress import Progress
from manyheads.taps import Head, Site, Sublayer, Tap

Heads = tuple[Head, ...]
# For every token and unit at a site, value . gradient.
Product = Callable[[Edits, Site, Tensor], Float[Tensor, "n k"]]

# Tokens that run side by side: enough to fill the machine, few enough to stay in its caches.
ROOM_ON_CPU = 1024
ROOM_ON_CUDA = 32_768


def default_batch_tokens(model: Model) -> int:
    """How many tokens run side by side on the model's device."""
    return ROOM_ON_CUDA if next(model.parameters()).is_cuda else ROOM_ON_CPU


def is_harmful(sign: float, change: Any, error: Any, errors: float = 1.0) -> Any:
    """Whether removal improves the metric by more than `errors` standard errors.

    `sign` is 1 where a lower metric is better, else -1. A single text has no standard error (NaN),
    and then nothing counts as harmful. Floats and arrays both work.

    >>> is_harmful(1.0, -0.3, 0.1), is_harmful(-1.0, -0.3, 0.1), is_harmful(1.0, -0.3, float("nan"))
    (True, False, False)
    """
    return -sign * change > errors * error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Effects:
    """The metric of each text under each version of a model; NaN where it was not measured.

    `sets` are the heads that each version lacks, where versions differ by heads.
    """

    baseline: Float[Tensor, " b"]
    values: Float[Tensor, "b versions"]
    weights: Float[Tensor, " b"]
    complete: bool
    sets: tuple[Heads, ...] = ()

    @property
    def whole(self) -> tuple[float, float]:
        """The metric of the model as it is, over the texts it was measured on, and its error."""
        known = ~self.baseline.isnan()
        mean, error = weighed(self.baseline[known], self.weights[known])
        return float(mean), float(error)

    def of(self, place: int) -> tuple[float, float, float]:
        """The metric of one version, its change, and the standard error of that change.

        Texts are compared with themselves, so that the error is that of the change alone.
        """
        known = ~self.values[:, place].isnan()
        if not bool((self.weights[known] > 0).any()):
            return (torch.nan,) * 3
        after, weights = self.values[known, place], self.weights[known]
        change, error = weighed(after - self.baseline[known], weights)
        return float(weighed(after, weights)[0]), float(change), float(error)

    def from_first(self) -> "Effects":
        """The same with the first version as the baseline of the others."""
        return replace(
            self, sets=self.sets[1:], baseline=self.values[:, 0], values=self.values[:, 1:]
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchValues:
    """The metric of a batch of texts under some versions; without places it is the baseline."""

    texts: range
    places: Sequence[int]
    values: Float[Tensor, "copies b"]
    weights: Float[Tensor, " b"]


@dataclass(frozen=True, slots=True, eq=False)
class GradientScores:
    """What gradients estimate for all units at a site.

    `importance` is the mean of |value . gradient|, summed over the tokens of a text; `predicted`
    keeps the sign: the change of the metric without the unit, were the model linear. `error` and
    `importance_error` are standard errors over texts.
    """

    importance: Float[Tensor, " k"]
    predicted: Float[Tensor, " k"]
    error: Float[Tensor, " k"]
    importance_error: Float[Tensor, " k"]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A version of a model: another model, or the same one with other values at some sites."""

    model: Model
    changes: dict[Site, Change] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluation:
    """A model, the texts and the metric by which versions of it are compared."""

    model: Model
    given: Given
    metric: Metric
    targets: Targets | None
    batch_tokens: int
    progress: bool
    sizes: list[int]

    @classmethod
    def of(
        cls,
        model: Model,
        texts: Any,
        metric: Metric = "loss",
        targets: Targets | None = None,
        *,
        batch_tokens: int | None = None,
        progress: bool = True,
    ) -> "Evaluation":
        given = read(model, texts)
        return cls(
            model=model,
            given=given,
            metric=metric,
            targets=targets,
            batch_tokens=default_batch_tokens(model) if batch_tokens is None else batch_tokens,
            progress=progress,
            sizes=given.sizes(model),
        )

    @property
    def sign(self) -> float:
        """1 where a higher metric is worse, else -1."""
        return 1.0 if better(self.metric) == "lower" else -1.0

    @property
    def batches(self) -> list[range]:
        """Texts that run together."""
        return list(shares(self.sizes, self.batch_tokens))

    def judge(self, texts: range) -> Judge:
        """The metric of these texts, read off the model's last hidden states."""
        return judge(self.model, self.given, texts, self.metric, self.targets)

    def measure(
        self, variants: Sequence[Variant | Callable[[], Variant]], label: str = "measuring"
    ) -> Effects:
        """The metric of every text under each variant, each with its own readout.

        A variant given as a function is built when its turn comes and freed after it, so that no
        two are in memory at once. Ctrl-C keeps what was measured.
        """
        return self.collect(label, len(variants), self._run_variants(variants))

    def collect(self, label: str, count: int, runs: Iterable[BatchValues]) -> Effects:
        """All values of `count` versions, batch after batch; Ctrl-C keeps what was measured."""
        texts = len(self.given)
        baseline = torch.full((texts,), torch.nan, dtype=torch.float64)
        weights = torch.zeros(texts, dtype=torch.float64)
        values = torch.full((texts, count), torch.nan, dtype=torch.float64)
        complete = True
        total = len(self.batches) * (count + 1)
        with (
            Progress(label, total=total, unit="runs", enabled=self.progress) as bar,
            torch.no_grad(),
        ):
            try:
                for each in runs:
                    rows = slice(each.texts.start, each.texts.stop)
                    weights[rows] = each.weights
                    if each.places:
                        values[rows, list(each.places)] = each.values.T
                    else:
                        baseline[rows] = each.values[0]
                    bar.advance(max(1, len(each.places)))
            except KeyboardInterrupt:
                if values.isnan().all():
                    raise
                complete = False
        return Effects(baseline=baseline, values=values, weights=weights, complete=complete)

    def _run_variants(
        self, variants: Sequence[Variant | Callable[[], Variant]]
    ) -> Iterator[BatchValues]:
        judges = {texts: self.judge(texts) for texts in self.batches}
        for place, each in enumerate((Variant(self.model), *variants), start=-1):
            variant = each if isinstance(each, Variant) else each()
            for texts, judged in judges.items():
                hidden = _last_hidden(variant, self.given.select(texts))
                # Not bound to a name: the model must be freed after its turn.
                values = replace(judged, model=variant.model)(hidden).double().cpu()
                places = [place] if place >= 0 else []
                yield BatchValues(texts, places, values, judged.weights.double().cpu())
            del variant

    def gradient_scores(
        self,
        sites: Sequence[Site],
        product: Product,
        *,
        keep: Sequence[Site] = (),
        changes: Mapping[Site, Change] | None = None,
    ) -> list[GradientScores]:
        """Estimates for all units at each site, from one forward and one backward per batch.

        `product` multiplies value and gradient of each unit at a site; it can read the sites in
        `keep` as well. `changes` are applied first.
        """
        sums: list[list[Tensor]] = [[] for _ in sites]
        weights, batches = [], self.batches
        tracked = {site: _tracked_after((changes or {}).get(site)) for site in sites}
        with Progress(
            "differentiating", total=len(batches), unit="runs", enabled=self.progress
        ) as bar:
            for texts in batches:
                seen = Edits({**(changes or {}), **tracked}, [*sites, *keep, _last(self.model)])
                weights.append(self._add_gradients(texts, sites, product, seen, sums))
                bar.advance()
        weight = torch.cat(weights)
        return [_gradient_scores(torch.cat(each), weight) for each in sums]

    def _add_gradients(
        self,
        texts: range,
        sites: Sequence[Site],
        product: Product,
        seen: Edits,
        sums: Sequence[list[Tensor]],
    ) -> Float[Tensor, " b"]:
        """Append what some texts add at each site, and return the weights of the texts."""
        judged = self.judge(texts)
        with resting(self.model), torch.enable_grad():
            climb(self.model, self.given.select(texts), seen)
            total = judged(seen[_last(self.model)]).sum()
            gradients = torch.autograd.grad(total, [seen[site].values for site in sites])
        for found, site, gradient in zip(sums, sites, gradients, strict=True):
            along = product(seen, site, gradient).detach().double()
            both = torch.stack((along.abs(), -along), dim=-1)
            owner = seen[site].lengths.sequence_of_token
            summed = both.new_zeros(len(texts), *both.shape[1:]).index_add(0, owner, both)
            found.append(summed.cpu())
        return judged.weights.double().cpu()

    def activations(
        self, sites: Sequence[Site], label: str, changes: Mapping[Site, Change] | None = None
    ) -> Iterator[Edits]:
        """The values at the sites, one batch of texts after another."""
        batches = self.batches
        with Progress(label, total=len(batches), unit="runs", enabled=self.progress) as bar:
            for texts in batches:
                seen = Edits(changes or {}, sites)
                with resting(self.model), torch.no_grad():
                    climb(self.model, self.given.select(texts), seen)
                yield seen
                bar.advance()


def _last(model: Model) -> Site:
    return Site(-1, Tap.FINAL, stack="decoder" if isinstance(model, Seq2Seq) else "main")


def _last_hidden(variant: Variant, given: Given) -> Any:
    last = _last(variant.model)
    seen = Edits(variant.changes, [last])
    with resting(variant.model):
        climb(variant.model, given, seen)
    return seen[last]


def _tracked_after(change: Change | None) -> Change:
    def track(values: Tensor) -> Tensor:
        values = values if change is None else change(values)
        return values if values.requires_grad else values.detach().requires_grad_()

    return track


def _gradient_scores(
    summed: Float[Tensor, "b k 2"], weights: Float[Tensor, " b"]
) -> GradientScores:
    means, errors = weighed(summed, weights)
    return GradientScores(means[:, 0], means[:, 1], errors[:, 1], errors[:, 0])


class AblationOptions(TypedDict, total=False):
    """How heads are ablated and what is measured; `ablate` says what each means."""

    replace_with: How
    metric: Metric
    targets: Targets | None
    stack: StackName | None
    sublayer: Sublayer
    seed: int
    room: int | None
    shown: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadAblation:
    """The versions of a model without some of its heads, which share the layers below these."""

    evaluation: Evaluation
    part: Part
    replacement: StandIns

    @classmethod
    def of(cls, model: Model, texts: Any, **options: Unpack[AblationOptions]) -> "HeadAblation":
        part = part_of(model, options.get("stack"), options.get("sublayer", Sublayer.ATTENTION))
        evaluation = Evaluation.of(
            model,
            texts,
            options.get("metric", "loss"),
            options.get("targets"),
            batch_tokens=options.get("room"),
            progress=options.get("shown", True),
        )
        with resting(model), torch.no_grad():
            replacement = stand_ins(
                part,
                evaluation.given,
                options.get("replace_with", "zero"),
                seed=options.get("seed", 0),
                room=evaluation.batch_tokens,
            )
        return cls(evaluation=evaluation, part=part, replacement=replacement)

    def measure(self, sets: Sequence[Heads], fixed: Heads = ()) -> Effects:
        """The metric without each set of heads, from a model that lacks the `fixed` ones already.

        What was measured before Ctrl-C is kept.
        """
        runs = (
            each for texts in self.evaluation.batches for each in self._run_sets(texts, sets, fixed)
        )
        return self._collect("ablating", sets, runs)

    def measure_in_order(self, order: Sequence[Head]) -> Effects:
        """The metric without the first head, the first two, and so on.

        The same as `measure` of those sets, but each step resumes at the layer of the head that it
        removes: below, everything is as a step before. What was measured before Ctrl-C is kept.
        """
        sets = tuple(tuple(order[: count + 1]) for count in range(len(order)))
        runs = (each for texts in self.evaluation.batches for each in self._run_order(texts, order))
        return self._collect("ablating in order", sets, runs)

    def changes(self, heads: Heads) -> dict[Site, Change]:
        """What ablates these heads in any batch; not for "resample", where batches differ."""
        assert not self.replacement.donors, "resampled values are of one batch"
        layers = sorted({head.layer for head in heads})
        return self._changes([heads], layers, self.replacement.of(range(0), layers))

    def _collect(self, label: str, sets: Sequence[Heads], runs: Iterable[BatchValues]) -> Effects:
        evaluation = self.evaluation
        tokens = sum(evaluation.sizes) * max(1, len(sets))
        with resting(self.part.model), relaid(self.part.model, tokens, *self._vocabulary()):
            return replace(evaluation.collect(label, len(sets), runs), sets=tuple(sets))

    def _vocabulary(self) -> list[Tensor]:
        """The vectors that hidden states are multiplied with, where an embedding owns them."""
        model = self.part.model
        if model.readout is None or isinstance(model, Vision):
            return []
        vectors = model.readout.vectors(model.table)
        return [vectors] if isinstance(vectors, nn.Parameter) else []

    def _run_sets(self, texts: range, sets: Sequence[Heads], fixed: Heads) -> Iterator[BatchValues]:
        """First the texts without the fixed heads, then without one group of sets each."""
        evaluation = self.evaluation
        layers = sorted({head.layer for each in (*sets, fixed) for head in each})
        instead = self.replacement.of(texts, layers)
        judged = evaluation.judge(texts)
        changes = self._changes([fixed], layers, instead)
        trunk = Trunk(self.part, evaluation.given.select(texts), layers=layers, changes=changes)
        weights = judged.weights.double().cpu()
        yield BatchValues(texts, [], judged(trunk.hidden).double().cpu(), weights)
        tokens = sum(evaluation.sizes[text] for text in texts)
        copies = max(1, evaluation.batch_tokens // max(1, tokens))
        for start, places in _by_first_layer(sets, copies):
            removed = [(*sets[place], *fixed) for place in places]
            above = [layer for layer in layers if layer >= start]
            edits = Edits(self._changes(removed, above, instead))
            hidden = trunk.speak(start, edits, len(places))
            values = judged(hidden, len(places)).double().cpu()
            yield BatchValues(texts, places, values, weights)

    def _run_order(self, texts: range, order: Sequence[Head]) -> Iterator[BatchValues]:
        """First the texts with all heads, then with one fewer and one fewer."""
        part, layers = self.part, sorted({head.layer for head in order})
        instead = self.replacement.of(texts, layers)
        judged = self.evaluation.judge(texts)
        weights = judged.weights.double().cpu()
        trunk = Trunk(part, self.evaluation.given.select(texts), layers=layers)
        entries = {layer: trunk[entry(part.stack, layer)] for layer in layers}
        yield BatchValues(texts, [], judged(trunk.hidden).double().cpu(), weights)
        for place, head in enumerate(order):
            removed = tuple(order[: place + 1])
            here = [layer for layer in layers if layer >= head.layer]
            above = {layer: entry(part.stack, layer) for layer in here if layer > head.layer}
            edits = Edits(self._changes([removed], here, instead), above.values())
            hidden = trunk.go_on(entries[head.layer], head.layer, edits)
            entries |= {layer: edits[site] for layer, site in above.items()}
            yield BatchValues(texts, [place], judged(hidden).double().cpu(), weights)

    def _changes(
        self, removed: Sequence[Heads], layers: Sequence[int], instead: Mapping[int, Tensor]
    ) -> dict[Site, Change]:
        """At each layer, for every copy of the batch, the heads that are ablated in it."""
        found: dict[Site, Change] = {}
        for layer in layers:
            gone = [[head.head for head in heads if head.layer == layer] for heads in removed]
            if any(gone):
                found[self.part.site(layer, Tap.HEAD_OUTPUT)] = _replaced(gone, instead[layer])
        return found


def _replaced(gone: Sequence[Sequence[int]], instead: Float[Tensor, "_ h d"]) -> Change:
    def change(values: Tensor) -> Tensor:
        copies = values.unflatten(0, (len(gone), -1)).clone()
        for place, heads in enumerate(gone):
            if heads:
                # Not by unbinding the copies, whose views autograd does not let anyone change.
                copies[place][:, list(heads)] = instead[:, list(heads)].to(copies.dtype)
        return copies.flatten(0, 1)

    return change


def _by_first_layer(sets: Sequence[Heads], copies: int) -> Iterator[tuple[int, list[int]]]:
    """Places of sets that can resume at the same layer, so many together."""

    def first(place: int) -> int:
        return min(head.layer for head in sets[place])

    order = sorted((place for place in range(len(sets)) if sets[place]), key=first)
    for layer, places in groupby(order, key=first):
        group = list(places)
        for start in range(0, len(group), copies):
            yield layer, group[start : start + copies]
