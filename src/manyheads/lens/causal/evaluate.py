"""Evaluation: the metric of a model and of modified versions of it, text by text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.inputs import metrics
from manyheads.lens.inputs.cached_run import ActivationEditor, EditFunction
from manyheads.lens.inputs.texts import (
    Inputs,
    Targets,
    announce_long_text,
    batch_ranges,
    read_inputs,
)
from manyheads.models import build, model_interface
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Head, Site, Tap

HeadSet = tuple[Head, ...]
# For every token and unit at a site, value . gradient.
Product = Callable[[ActivationEditor, Site, Tensor], Float[Tensor, "n k"]]

# Enough tokens to fill the machine, few enough to stay in its caches.
CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 32_768


def default_batch_tokens(model: build.Model) -> int:
    """How many tokens run side by side by default on the model's device."""
    return CUDA_BATCH_TOKENS if next(model.parameters()).is_cuda else CPU_BATCH_TOKENS


def is_harmful(sign: float, change: Any, error: Any, errors: float = 1.0) -> Any:
    """Whether removal improves the metric by more than `errors` standard errors.

    `sign` is 1 where a lower metric is better, else -1. A single text has no standard error (NaN),
    and then nothing counts as harmful. Floats and arrays both work.

    >>> is_harmful(1.0, -0.3, 0.1), is_harmful(-1.0, -0.3, 0.1), is_harmful(1.0, -0.3, float("nan"))
    (True, False, False)
    """
    return -sign * change > errors * error


Item = TypeVar("Item")


def group_by(
    key: Callable[[Item], Any], items: Iterable[Item], max_size: int
) -> Iterator[list[Item]]:
    """Items with the same key that follow each other, at most `max_size` together."""
    for _, members in groupby(items, key):
        group = list(members)
        yield from (group[start : start + max_size] for start in range(0, len(group), max_size))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Effects:
    """The metric of each text under each version of a model; NaN where it was not measured.

    `sets` are the heads that each version lacks, where versions differ by heads.
    """

    baseline: Float[Tensor, " b"]
    values: Float[Tensor, "b versions"]
    weights: Float[Tensor, " b"]
    complete: bool
    sets: tuple[HeadSet, ...] = ()

    @property
    def baseline_mean(self) -> tuple[float, float]:
        """The metric of the unmodified model over the measured texts, and its standard error."""
        measured = ~self.baseline.isnan()
        mean, error = metrics.weighted_mean(self.baseline[measured], self.weights[measured])
        return float(mean), float(error)

    def of(self, index: int) -> tuple[float, float, float]:
        """The metric of one version, its change, and the standard error of that change.

        The comparison is paired by text, so the error is that of the change alone.
        """
        measured = ~self.values[:, index].isnan()
        if not bool((self.weights[measured] > 0).any()):
            return (torch.nan,) * 3
        after, weights = self.values[measured, index], self.weights[measured]
        change, error = metrics.weighted_mean(after - self.baseline[measured], weights)
        return float(metrics.weighted_mean(after, weights)[0]), float(change), float(error)

    def from_first(self) -> "Effects":
        """The effects relative to the first version, which becomes the baseline."""
        return replace(
            self, sets=self.sets[1:], baseline=self.values[:, 0], values=self.values[:, 1:]
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchValues:
    """The metric of a batch of texts under some versions; without indices it is the baseline."""

    texts: range
    indices: Sequence[int]
    values: Float[Tensor, "copies b"]
    weights: Float[Tensor, " b"]

    @classmethod
    def of(
        cls, metric: metrics.BoundMetric, hidden: Ragged, indices: Sequence[int] = ()
    ) -> "BatchValues":
        """The metric of the last hidden states, a copy of the batch for each version."""
        values = metric(hidden, max(1, len(indices))).double().cpu()
        return cls(metric.texts, indices, values, metric.weights.double().cpu())


@dataclass(frozen=True, slots=True, eq=False)
class GradientScores:
    """Gradient estimates for all units at a site.

    `importance` is the mean of |value . gradient|, summed over the tokens of a text; `predicted`
    keeps the sign: the change of the metric without the unit if the model were linear. `error` and
    `importance_error` are standard errors over texts.
    """

    importance: Float[Tensor, " k"]
    predicted: Float[Tensor, " k"]
    error: Float[Tensor, " k"]
    importance_error: Float[Tensor, " k"]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A version of a model: another model, or the same one with other values at some sites."""

    model: build.Model
    changes: dict[Site, EditFunction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluation:
    """A model, and the texts and metric that versions of it are compared on."""

    model: build.Model
    inputs: model_interface.ModelInputs
    metric: metrics.Metric
    targets: Targets | None
    batch_tokens: int
    progress: bool
    sizes: list[int]

    @classmethod
    def of(
        cls,
        model: build.Model,
        texts: Inputs,
        metric: metrics.Metric = "loss",
        targets: Targets | None = None,
        *,
        batch_tokens: int | None = None,
        progress: bool = True,
    ) -> "Evaluation":
        inputs = read_inputs(model, texts)
        limit = default_batch_tokens(model) if batch_tokens is None else batch_tokens
        return cls(
            model=model,
            inputs=inputs,
            metric=metric,
            targets=targets,
            batch_tokens=1 if inputs.examples else limit,
            progress=progress,
            sizes=inputs.sizes(model),
        )

    @property
    def sign(self) -> float:
        """1 where a higher metric is worse, else -1."""
        return 1.0 if metrics.better_direction(self.metric) == "lower" else -1.0

    @property
    def batches(self) -> list[range]:
        """The texts that run together."""
        return list(batch_ranges(self.sizes, self.batch_tokens))

    def bind(self, texts: range) -> metrics.BoundMetric:
        """The metric of these texts, read off the model's last hidden states."""
        return metrics.bind_metric(self.model, self.inputs, texts, self.metric, self.targets)

    def measure(
        self, variants: Sequence[Variant | Callable[[], Variant]], label: str = "measuring"
    ) -> Effects:
        """The metric of every text under each variant, each with its own readout.

        A variant passed as a function is built when it is measured and freed afterwards, so that no
        two are in memory at once. Ctrl-C keeps the results so far.
        """
        return self.collect(label, len(variants), self._run_variants(variants))

    def collect(self, label: str, count: int, runs: Iterable[BatchValues]) -> Effects:
        """All values of `count` versions, batch by batch; Ctrl-C keeps the results so far."""
        texts = len(self.inputs)
        baseline = torch.full((texts,), torch.nan, dtype=torch.float64)
        weights = torch.zeros(texts, dtype=torch.float64)
        values = torch.full((texts, count), torch.nan, dtype=torch.float64)
        complete = True
        total = len(self.batches) * (count + 1)
        bar = Progress(label, total=total, unit="runs", enabled=self.progress)
        with bar, torch.no_grad():
            announce_long_text(bar, self.sizes)
            try:
                for run in runs:
                    rows = slice(run.texts.start, run.texts.stop)
                    weights[rows] = run.weights
                    if run.indices:
                        values[rows, list(run.indices)] = run.values.T
                    else:
                        baseline[rows] = run.values[0]
                    bar.advance(max(1, len(run.indices)))
            except KeyboardInterrupt:
                if values.isnan().all():
                    raise
                complete = False
        return Effects(baseline=baseline, values=values, weights=weights, complete=complete)

    def _run_variants(
        self, variants: Sequence[Variant | Callable[[], Variant]]
    ) -> Iterator[BatchValues]:
        bound_metrics = [self.bind(texts) for texts in self.batches]
        for index, source in enumerate((Variant(self.model), *variants), start=-1):
            variant = source if isinstance(source, Variant) else source()
            for metric in bound_metrics:
                record = ActivationEditor(variant.changes, [_last(variant.model)])
                with build.eval_mode(variant.model):
                    variant.model.run_hidden(self.inputs.select(metric.texts), record)
                hidden, indices = record[_last(variant.model)], [index] if index >= 0 else []
                # Not bound to a name, so that the model is freed afterwards.
                yield BatchValues.of(replace(metric, model=variant.model), hidden, indices)
            del variant

    def gradient_scores(
        self,
        sites: Sequence[Site],
        product: Product,
        *,
        keep: Sequence[Site] = (),
        changes: Mapping[Site, EditFunction] | None = None,
    ) -> list[GradientScores]:
        """Estimates for all units at each site, from one forward and one backward per batch.

        `product` multiplies value and gradient of each unit at a site; it can read the sites in
        `keep` as well. `changes` are applied first.
        """
        sums: list[list[Tensor]] = [[] for _ in sites]
        weights, batches = [], self.batches
        edits, last = dict(changes or {}), _last(self.model)
        edits |= {site: partial(_track, edits.get(site)) for site in sites}
        label, total = "differentiating", len(batches)
        with Progress(label, total=total, unit="runs", enabled=self.progress) as bar:
            for texts in batches:
                record = ActivationEditor(edits, [*sites, *keep, last])
                metric = self.bind(texts)
                with build.eval_mode(self.model), torch.enable_grad():
                    self.model.run_hidden(self.inputs.select(texts), record)
                    tracked = [record[site].values for site in sites]
                    gradients = torch.autograd.grad(metric(record[last]).sum(), tracked)
                for by_batch, site, gradient in zip(sums, sites, gradients, strict=True):
                    along = product(record, site, gradient).detach().double()
                    both = torch.stack((along.abs(), -along), dim=-1)
                    owner = record[site].lengths.sequence_of_token
                    summed = both.new_zeros(len(texts), *both.shape[1:]).index_add(0, owner, both)
                    by_batch.append(summed.cpu())
                weights.append(metric.weights.double().cpu())
                bar.advance()
        scores = []
        for by_batch in sums:
            means, errors = metrics.weighted_mean(torch.cat(by_batch), torch.cat(weights))
            scores.append(GradientScores(means[:, 0], means[:, 1], errors[:, 1], errors[:, 0]))
        return scores

    def activations(
        self, sites: Sequence[Site], label: str, changes: Mapping[Site, EditFunction] | None = None
    ) -> Iterator[ActivationEditor]:
        """The values at the sites, batch by batch."""
        batches = self.batches
        with Progress(label, total=len(batches), unit="runs", enabled=self.progress) as bar:
            for texts in batches:
                record = ActivationEditor(changes or {}, sites)
                with build.eval_mode(self.model), torch.no_grad():
                    self.model.run_hidden(self.inputs.select(texts), record)
                yield record
                bar.advance()


def _last(model: build.Model) -> Site:
    return Site(-1, Tap.FINAL, stack=model.readout_stack)


def _track(change: EditFunction | None, values: Tensor) -> Tensor:
    values = values if change is None else change(values)
    return values if values.requires_grad else values.detach().requires_grad_()
