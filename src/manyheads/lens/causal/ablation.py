"""Ablation: the metric of a model without one head, a set of heads, or one head after another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import plain_table, standard_error
from manyheads.lens.causal import evaluate, racing
from manyheads.lens.causal.evaluate import BatchValues, Effects, HeadSet
from manyheads.lens.causal.replacements import (
    Replacement,
    ReplacementValues,
    replacement_values,
)
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.lens.results import addresses, files, tables
from manyheads.models import build, model_interface
from manyheads.parts.linear_layout import column_major_weights
from manyheads.ragged import Ragged
from manyheads.taps import Head, Site, Sublayer, Tap


class AblationOptions(TypedDict, total=False):
    """How heads are ablated and what is measured; see `ablate`."""

    replace_with: Replacement
    metric: metrics.Metric
    targets: Targets | None
    stack: cached_run.StackName | None
    sublayer: Sublayer | None
    mixers: bool
    seed: int
    batch_tokens: int | None
    progress: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadAblation:
    """Runs of a model without some of its heads, which share the layers below those heads."""

    evaluation: evaluate.Evaluation
    scope: cached_run.HeadScope
    heads: HeadSet
    replacement: ReplacementValues

    @classmethod
    def of(
        cls,
        model: build.Model,
        texts: Inputs,
        heads: addresses.Heads = "all",
        *,
        replace_with: Replacement = "zero",
        metric: metrics.Metric = "loss",
        targets: Targets | None = None,
        stack: cached_run.StackName | None = None,
        sublayer: Sublayer | None = None,
        mixers: bool = True,
        seed: int = 0,
        batch_tokens: int | None = None,
        progress: bool = True,
    ) -> "HeadAblation":
        names = addresses.head_names(heads)
        scope = cached_run.head_scope(model, stack, sublayer, heads=names, mixers=mixers)
        chosen = scope.find(names)
        evaluation = evaluate.Evaluation.of(
            model, texts, metric, targets, batch_tokens=batch_tokens, progress=progress
        )
        inputs, batch_tokens = evaluation.inputs, evaluation.batch_tokens
        with build.eval_mode(model), torch.no_grad():
            replacement = replacement_values(
                scope, inputs, replace_with, seed=seed, batch_tokens=batch_tokens
            )
        return cls(evaluation=evaluation, scope=scope, heads=chosen, replacement=replacement)

    def measure(self, sets: Sequence[HeadSet], fixed: HeadSet = ()) -> Effects:
        """The metric without each set of heads, the `fixed` heads being ablated throughout.

        Ctrl-C keeps the results so far.
        """
        batches = self.evaluation.batches
        runs = (run for texts in batches for run in self.run_sets(texts, sets, fixed))
        return self._collect("ablating", sets, runs)

    def measure_in_order(self, order: Sequence[Head]) -> Effects:
        """The metric without the first head, the first two, and so on.

        The same as `measure` of those sets, but each step resumes at the layer of the head that it
        removes, since nothing changes below. Ctrl-C keeps the results so far.
        """
        sets = [tuple(order[: count + 1]) for count in range(len(order))]
        runs = (run for texts in self.evaluation.batches for run in self._run_order(texts, sets))
        return self._collect("ablating in order", sets, runs)

    def measure_by_race(self, target: racing.TopHeads, seed: int) -> tuple[Effects, racing.Race]:
        """The metric without each head, on as many texts as it takes to find the top heads."""
        sets, evaluation = [(head,) for head in self.heads], self.evaluation
        race = racing.Race(len(sets), len(evaluation.inputs), target)

        def measure(texts: range, active: list[int]) -> Iterator[BatchValues]:
            for run in self.run_sets(texts, [sets[index] for index in active], ()):
                yield replace(run, indices=[active[index] for index in run.indices])

        batches = [
            texts[start : start + racing.FIRST_LOOK]
            for texts in evaluation.batches
            for start in range(0, len(texts), racing.FIRST_LOOK)
        ]
        runs = racing.run_race(race, batches, measure, sign=evaluation.sign, seed=seed)
        return self._collect("ablating", sets, runs), race

    def changes(self, heads: HeadSet) -> dict[Site, cached_run.EditFunction]:
        """The edits that ablate these heads in any batch; "resample" has none, as it differs."""
        assert not self.replacement.donors, "resampled values belong to one batch"
        layers = sorted({head.layer for head in heads})
        return self.edits([heads], layers, self.replacement.of(range(0), layers))

    def _collect(self, label: str, sets: Sequence[HeadSet], runs: Iterable[BatchValues]) -> Effects:
        with self.running(len(sets)):
            return replace(self.evaluation.collect(label, len(sets), runs), sets=tuple(sets))

    @contextmanager
    def running(self, versions: int) -> Iterator[None]:
        """The model at rest, its weights laid out for so many versions of it."""
        model = self.scope.model
        tokens = sum(self.evaluation.sizes) * max(1, versions)
        readout = None if model.reads_images else model.readout
        unembedding = [] if readout is None else [readout.vectors(model.table)]
        parameters = [matrix for matrix in unembedding if isinstance(matrix, nn.Parameter)]
        with build.eval_mode(model), column_major_weights(model, tokens, *parameters):
            yield

    def run_sets(
        self, texts: range, sets: Sequence[HeadSet], fixed: HeadSet
    ) -> Iterator[BatchValues]:
        """Yield the baseline without the fixed heads, then one group of sets after another."""
        evaluation = self.evaluation
        layers = sorted({head.layer for heads in (*sets, fixed) for head in heads})
        replacements = self.replacement.of(texts, layers)
        bound_metric = evaluation.bind(texts)
        changes = self.edits([fixed], layers, replacements)
        cached = cached_run.CachedRun(
            self.scope, evaluation.inputs.select(texts), layers=layers, edits=changes
        )
        yield BatchValues.of(bound_metric, cached.hidden)
        tokens = sum(evaluation.sizes[text] for text in texts)
        copies = max(1, evaluation.batch_tokens // max(1, tokens))
        first_layers = {
            index: min(head.layer for head in heads) for index, heads in enumerate(sets) if heads
        }
        order = sorted(first_layers, key=first_layers.__getitem__)
        # Sets that resume at the same layer run side by side.
        for indices in evaluate.group_by(first_layers.__getitem__, order, copies):
            start = first_layers[indices[0]]
            removed = [(*sets[index], *fixed) for index in indices]
            above = [layer for layer in layers if layer >= start]
            edits = cached_run.ActivationEditor(self.edits(removed, above, replacements))
            hidden = cached.resume_after_heads(start, edits, len(indices))
            yield BatchValues.of(bound_metric, hidden, indices)

    def _run_order(self, texts: range, sets: Sequence[HeadSet]) -> Iterator[BatchValues]:
        """Yield the baseline with all heads, then with one head fewer each time."""
        steps = AblationSteps(self, texts, [heads[-1] for heads in sets])
        yield BatchValues.of(steps.metric, steps.cached.hidden)
        for index, removed in enumerate(sets):
            hidden = steps.run([removed], removed[-1].layer)
            yield BatchValues.of(steps.metric, hidden, [index])

    def edits(
        self, removed: Sequence[HeadSet], layers: Sequence[int], replacements: Mapping[int, Tensor]
    ) -> dict[Site, cached_run.EditFunction]:
        """The edits that ablate heads of these layers, one set in each copy of the batch."""
        changes: dict[Site, cached_run.EditFunction] = {}
        for layer in layers:
            ablated = [[head.head for head in heads if head.layer == layer] for heads in removed]
            if any(ablated):
                site = self.scope.site(layer, Tap.HEAD_OUTPUT)
                changes[site] = replace_heads(ablated, replacements[layer])
        return changes


class AblationSteps:
    """One batch of texts, in copies, whose ablated heads change from step to step.

    A step resumes at the lowest layer that it changes, from where the step before has left it.
    """

    def __init__(
        self, ablation: HeadAblation, texts: range, heads: Sequence[Head], copies: int = 1
    ) -> None:
        self._ablation, self._copies = ablation, copies
        self._layers = sorted({head.layer for head in heads})
        self._replacements = ablation.replacement.of(texts, self._layers)
        self.metric = ablation.evaluation.bind(texts)
        inputs = ablation.evaluation.inputs.select(texts)
        self.cached = cached_run.CachedRun(ablation.scope, inputs, layers=self._layers)
        self._entries = {
            layer: model_interface.repeat_batch(self.cached.entering(layer), copies)
            for layer in self._layers
        }

    def run(self, removed: Sequence[HeadSet], start: int) -> Ragged:
        """The input of the readout without one set of heads per copy.

        The sets differ from those of the last step in no layer below `start`.
        """
        above = [layer for layer in self._layers if layer > start]
        stack = self._ablation.scope.stack
        entry_sites = {layer: cached_run.entry_sites(stack, layer) for layer in above}
        changes = self._ablation.edits(removed, [start, *above], self._replacements)
        edits = cached_run.ActivationEditor(changes, chain(*entry_sites.values()))
        hidden = self.cached.continue_from(self._entries[start], start, edits, self._copies)
        self._entries |= {
            layer: cached_run.join_streams([edits[site] for site in sites])
            for layer, sites in entry_sites.items()
        }
        return hidden


def replace_heads(
    ablated: Sequence[Sequence[int]], replacements: Float[Tensor, "_ h d"]
) -> cached_run.EditFunction:
    """Replace the outputs of some heads in each copy of a batch; one row holds for all tokens."""

    def change(values: Tensor) -> Tensor:
        copies = values.unflatten(0, (len(ablated), -1)).clone()
        for index, heads in enumerate(ablated):
            if heads:
                # Indexed, as autograd forbids in-index changes of unbound views.
                copies[index][:, list(heads)] = replacements[:, list(heads)].to(copies.dtype)
        return copies.flatten(0, 1)

    return change


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Ablation(tables.ByHead):
    """The metric without each head alone ("metric") and its change ("change"), with errors.

    Heads that were not requested, or not measured before Ctrl-C, have NaN. After a race ("until"),
    "low" and "high" are the interval of each change, and "texts" and "tokens" what it was measured
    on.
    """

    @property
    def baseline(self) -> float:
        """The metric of the model with all heads."""
        return float(self.metadata["baseline"])

    @property
    def complete(self) -> bool:
        """False if the measurement was interrupted."""
        return bool(self.metadata["complete"])

    @property
    def top(self) -> tuple[addresses.Address, ...]:
        """After a race, the heads that are certain to be at the top, the one of most harm first."""
        by_name = {str(address): address for address in self.addresses}
        return tuple(by_name[name] for name in self.metadata.get("race", {}).get("top", ()))

    def harmful(self, errors: float = 1.0) -> list[tuple[addresses.Address, float]]:
        """Heads whose removal improves the metric by more than `errors` standard errors."""
        sign = 1.0 if self.metadata["better"] == "lower" else -1.0
        column = self["change"]
        harmful = evaluate.is_harmful(sign, column.means, column.errors, errors)
        pairs = zip(self.addresses, column.means.tolist(), harmful, strict=True)
        return sorted(
            ((address, change) for address, change, harms in pairs if harms),
            key=lambda pair: sign * pair[1],
        )

    def ranking(self) -> Any:
        """A rich table of the measured heads, the one that matters most first."""
        columns = ("metric", "change", "low", "high", "texts", "importance", "predicted")
        names = [name for name in columns if name in self]
        titles = [
            f"{self.metadata['metric']} without" if name == "metric" else name for name in names
        ]
        titles.insert(2, "±")
        change = self["change"]
        rows = []
        for address, _ in change.ranked(smallest=self.metadata["better"] != "lower"):
            values = {name: self[name].of(address) for name in names}
            cells = [
                "" if np.isnan(value) else f"{value:{FORMATS.get(name, '.4f')}}"
                for name, value in values.items()
            ]
            cells.insert(2, standard_error(change.error_of(address)))
            rows.append([str(address), *cells])
        return plain_table(["head"], titles, rows)

    def _lines(self) -> Iterator[str]:
        yield from tables.ByHead._lines(self)
        if "race" in self.metadata:
            yield f"  {racing.verdict(self.metadata['race'], self.metadata['texts'])}"


# The columns of a ranking that are not plain numbers of four digits.
FORMATS = {"change": "+.4f", "low": "+.4f", "high": "+.4f", "texts": ".0f"}


@dataclass(frozen=True, slots=True)
class JointAblation(files.Result):
    """The metric without a set of heads, its change, and the standard error of the change."""

    heads: tuple[Head, ...]
    value: float
    change: float
    error: float
    baseline: float
    complete: bool = True

    def __str__(self) -> str:
        names = ", ".join(map(str, self.heads)) or "no heads"
        changed = tables.format_change(self.change, self.error)
        return f"without {names}: {self.value:.4f}, a change of {changed}"


@dataclass(frozen=True, slots=True)
class CumulativeAblation(tables.Tabular):
    """Heads removed one after another: each step includes all previous removals."""

    steps: tuple[JointAblation, ...]
    baseline: float
    complete: bool = True

    @property
    def order(self) -> tuple[Head, ...]:
        return tuple(step.heads[-1] for step in self.steps)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "removed": index + 1,
                "head": str(step.heads[-1]),
                "value": step.value,
                "change": step.change,
                "change_error": step.error,
            }
            for index, step in enumerate(self.steps)
        ]

    def table(self) -> Any:
        """A rich table of the steps, beginning with the full model."""
        rows = [["0", "none", f"{self.baseline:.4f}", "", ""]]
        for row in self.rows():
            value, change = f"{row['value']:.4f}", f"{row['change']:+.4f}"
            error = standard_error(row["change_error"])
            rows.append([str(row["removed"]), row["head"], value, change, error])
        return plain_table(["", "head"], ["value", "change", "±"], rows)

    def __str__(self) -> str:
        steps = (
            f"  {row['removed']:>4}  {row['head']:<8} {row['value']:.4f}" for row in self.rows()
        )
        return "\n".join([f"with all heads: {self.baseline:.4f}", *steps])


def ablation_result(
    ablation: HeadAblation,
    effects: Effects,
    replace_with: Replacement,
    race: racing.Race | None = None,
) -> Ablation:
    """The effects of ablating each head alone, by head."""
    scope = ablation.scope
    indices = [scope.heads.index(head) for head in ablation.heads]

    def column(values: Any) -> tables.FloatsByHead:
        by_head = np.full(len(scope.heads), np.nan)
        by_head[indices] = values
        return by_head

    values = np.array([effects.of(index) for index in range(len(indices))]).T
    means = {"metric": column(values[0]), "change": column(values[1])}
    baseline, error = effects.baseline_mean
    metadata = {
        "replace_with": replace_with,
        "metric": metrics.metric_name(ablation.evaluation.metric),
        "better": metrics.better_direction(ablation.evaluation.metric),
        "baseline": baseline,
        "baseline_error": None if np.isnan(error) else error,
        "texts": int((~effects.baseline.isnan()).sum()),
        "complete": effects.complete,
    }
    if race is not None:
        measured = (~effects.values.isnan()).double().numpy()
        columns = race.intervals(ablation.evaluation.sign) | {
            "texts": measured.sum(0),
            "tokens": np.array(ablation.evaluation.sizes) @ measured,
        }
        means |= {name: column(by_head) for name, by_head in columns.items()}
        names = [str(scope.addresses[index]) for index in indices]
        metadata["race"] = race.summary(names) | {"measured": float(measured.mean())}
    return Ablation(
        kind="ablation",
        blocks=scope.blocks,
        means=means,
        errors={"change": column(values[2])},
        metadata=metadata,
    )


@wrapping_models
def ablate(
    model: build.Model,
    texts: Inputs,
    heads: addresses.Heads = "all",
    replace_with: Replacement = "zero",
    metric: metrics.Metric = "loss",
    *,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer | None = None,
    until: racing.TopHeads | str | None = None,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Ablation:
    """Ablate one head at a time (arXiv 1905.10650): exact, and only its layer and those above run.

    `texts` are strings, token ids or a Ragged; pairs for a `Seq2Seq`, images for a `Vision`.
    `targets` are the correct answers where the texts do not contain them: {position: id} per text
    for masked words, one class per text. `batch_tokens` is how many tokens run side by side.
    `stack` and `sublayer` are by default those of the `heads`, else self-attention.

    With `until`, as in "top 10 at 95 %", heads race: texts are read in random order, a head is
    measured until it is certain whether it is among those that matter most, and the right ones are
    found with that probability. Texts are the units: few of them leave some places undecided, and
    the result says how many would be needed.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = ablate(model, [[1, 2, 3, 4], [5, 6, 7]])
    >>> [str(address) for address in result.addresses], result.complete
    (['L0H0', 'L0H1', 'L1H0', 'L1H1'], True)
    """
    ablation = HeadAblation.of(
        model,
        texts,
        heads,
        replace_with=replace_with,
        metric=metric,
        targets=targets,
        stack=stack,
        sublayer=sublayer,
        seed=seed,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    target = racing.as_target(until)
    if target is None:
        effects, race = ablation.measure([(head,) for head in ablation.heads]), None
    else:
        effects, race = ablation.measure_by_race(target, seed)
    return ablation_result(ablation, effects, replace_with, race)


@wrapping_models
def ablate_together(
    model: build.Model, texts: Inputs, heads: addresses.Heads, **options: Unpack[AblationOptions]
) -> JointAblation:
    """Ablate a set of heads together."""
    ablation = HeadAblation.of(model, texts, heads, **options)
    return _joint(ablation.measure([ablation.heads]), 0)


@wrapping_models
def ablate_in_order(
    model: build.Model, texts: Inputs, order: addresses.Heads, **options: Unpack[AblationOptions]
) -> CumulativeAblation:
    """Ablate the first head, the first two, and so on: the pruning curve of arXiv 1905.10650."""
    ablation = HeadAblation.of(model, texts, order, **options)
    effects = ablation.measure_in_order(ablation.heads)
    steps = tuple(_joint(effects, index) for index in range(len(ablation.heads)))
    return CumulativeAblation(steps, effects.baseline_mean[0], effects.complete)


@wrapping_models
def ablate_greedily(
    model: build.Model,
    texts: Inputs,
    steps: int,
    heads: addresses.Heads = "all",
    **options: Unpack[AblationOptions],
) -> CumulativeAblation:
    """Remove one head per step: the one whose removal hurts least, given those already removed.

    Each step measures every remaining head, so it costs about as much as one `ablate`.
    """
    ablation = HeadAblation.of(model, texts, heads, **options)
    remaining = list(ablation.heads)
    if not 1 <= steps <= len(remaining):
        raise InputError(
            f"steps must be between 1 and {len(remaining)} heads, got {steps}",
            f"use 1 to {len(remaining)}",
        )
    removed: HeadSet = ()
    steps_done: list[JointAblation] = []
    first: Effects | None = None
    for _ in range(steps):
        try:
            effects = ablation.measure([(head,) for head in remaining], fixed=removed)
        except KeyboardInterrupt:
            if first is None:
                raise
            break
        first = first or effects
        if not effects.complete:
            # The best of the heads measured so far need not be the best of all.
            break
        values = [effects.of(index)[0] for index in range(len(remaining))]
        best = int(np.argmin(ablation.evaluation.sign * np.array(values)))
        removed = (*removed, remaining.pop(best))
        without = effects.values[:, [best]]
        # The change is relative to the full model, not to the previous step.
        step = replace(effects, sets=(removed,), baseline=first.baseline, values=without)
        steps_done.append(_joint(step, 0))
    assert first is not None
    complete = len(steps_done) == steps
    return CumulativeAblation(tuple(steps_done), first.baseline_mean[0], complete)


def _joint(effects: Effects, index: int) -> JointAblation:
    value, change, error = effects.of(index)
    baseline = effects.baseline_mean[0]
    if not effects.sets[index]:
        value, change, error = baseline, 0.0, 0.0
    return JointAblation(effects.sets[index], value, change, error, baseline, effects.complete)
