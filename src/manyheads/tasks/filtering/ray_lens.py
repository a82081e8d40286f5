"""Statistics and ablation of heads over a corpus, on the workers of Ray.

The batches are those of one process, and so is the order in which their results are added up: only
the rounding of other numbers of threads can differ. With a folder for the state, finished batches
are not measured again.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from manyheads.argument_checks import checked
from manyheads.atomic_write import atomic_write
from manyheads.encoding import text_reader
from manyheads.errors import InputError
from manyheads.lens.causal import ablation, evaluate, replacements
from manyheads.lens.corpus.pass_files import pack_totals, unpack_totals, weights_fingerprint
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs import texts as lens_texts
from manyheads.lens.inputs.token_classes import TokenClasses
from manyheads.lens.measure import measures, statistics
from manyheads.lens.measure.watcher import MeasurementPlan
from manyheads.lens.results.addresses import Heads
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.progress import Progress
from manyheads.tasks.filtering.ray_engine import ray_map

HEADER_KEY = "manyheads.batch"
# What one batch has given: arrays by name, and plain values.
BatchResult = tuple[dict[str, NDArray[Any]], dict[str, Any]]


class BatchStore:
    """The results of finished batches, one file for each in a folder."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def file(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.safetensors"

    def has(self, batch: int) -> bool:
        """Whether a batch is finished; a file of other texts, models or settings is refused."""
        file = self.file(batch)
        try:
            with safe_open(file, framework="np") as opened:
                header = json.loads((opened.metadata() or {})[HEADER_KEY])
        except (SafetensorError, OSError, ValueError, KeyError):
            return False
        if header["key"] != self.key:
            raise InputError(
                f"{file} was made with another model, other texts or other settings",
                f"delete {self.folder}, or name another folder",
            )
        return True

    def load(self, batch: int) -> BatchResult:
        with safe_open(self.file(batch), framework="np") as opened:
            about = json.loads((opened.metadata() or {})[HEADER_KEY])["about"]
            return {name: opened.get_tensor(name) for name in opened.keys()}, about  # noqa: SIM118

    def save(self, batch: int, result: BatchResult) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in result[0].items()}
        header = json.dumps({"key": self.key, "about": result[1]})
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file(batch)) as beside:
            beside.write_bytes(save(arrays, metadata={HEADER_KEY: header}))


def _store(
    state: Path | str | None, model: Model, inputs: ModelInputs, *settings: object
) -> BatchStore | None:
    if state is None:
        return None
    digest = sha256(repr((weights_fingerprint(model), settings)).encode())
    for ids in (inputs.ids, inputs.source):
        if ids is not None:
            digest.update(repr(ids.lengths.each).encode())
            digest.update(ids.values.cpu().numpy().tobytes())
    for image in inputs.images:
        digest.update(image.cpu().contiguous().numpy().tobytes())
    return BatchStore(Path(state), digest.hexdigest()[:24])


def _run_batches(
    model: Model,
    batches: Sequence[Any],
    work: Callable[[Model, Any], BatchResult],
    store: BatchStore | None,
    workers: int | None,
    device: str,
) -> Iterator[BatchResult]:
    """The results of all batches, in order; stored ones are not measured."""
    pending = [index for index in range(len(batches)) if store is None or not store.has(index)]
    sources = [batches[index] for index in pending]
    results = ray_map(model, sources, work, workers=workers, device=device)
    unfinished = set(pending)
    for index in range(len(batches)):
        if index not in unfinished:
            assert store is not None, "only a store has finished batches"
            yield store.load(index)
            continue
        result = next(results)
        if store is not None:
            store.save(index, result)
        yield result
    # Ray is stopped when it has nothing more to give.
    for _ in results if pending else ():
        pass


def _on(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    return ModelInputs(
        ids=None if inputs.ids is None else inputs.ids.to(device),
        source=None if inputs.source is None else inputs.source.to(device),
        images=tuple(image.to(device) for image in inputs.images),
    )


def _read(model: Model, texts: lens_texts.Inputs, max_length: int | None = None) -> ModelInputs:
    inputs = lens_texts.read_inputs(model, texts, max_length)
    if inputs.examples:
        raise InputError("engine='ray' reads texts or images", "leave out the engine")
    return inputs


class _StatisticsWork:
    """Measures the texts of one batch, with one plan for all batches of a worker."""

    def __init__(
        self, inputs: ModelInputs, classes: TokenClasses, offsets: Sequence[int], sink_above: float
    ) -> None:
        self.inputs, self.settings = inputs, (classes, offsets, sink_above)
        self.plan: MeasurementPlan | None = None

    def __call__(self, model: Model, batch: list[int]) -> BatchResult:
        if self.plan is None:
            self.plan = statistics.make_plan(model, *self.settings)
        selected = _on(self.inputs.select(batch), next(model.parameters()).device)
        totals = statistics.StatisticsTotals()
        with eval_mode(model):
            totals.add(statistics.watch_batch(model, self.plan, selected, batch))
        return pack_totals(totals)


@checked
def statistics_with_ray(
    model: Model,
    texts: lens_texts.Inputs,
    *,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = measures.SINK_ABOVE,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    state: Path | str | None = None,
    progress: bool = True,
) -> statistics.Statistics:
    """`lens.statistics` on `workers` copies of the model, each on a `device` of Ray: the same.

    `state` is a folder for finished batches, from which an interrupted measurement goes on. A
    worker that dies is replaced, and its batch measured again.
    """
    statistics.check_heads(model)
    inputs = _read(model, texts, max_length)
    plan = statistics.make_plan(model, classes, offsets, sink_above)
    limit = lens_texts.default_batch_tokens(model) if batch_tokens is None else batch_tokens
    batches = list(text_reader.batch_by_length(inputs.sizes(model), limit))
    store = _store(
        state, model, inputs, "statistics", sorted(plan.classes), plan.offsets, sink_above, limit
    )
    work = _StatisticsWork(_on(inputs, torch.device("cpu")), classes, offsets, sink_above)
    totals = statistics.StatisticsTotals()
    with Progress("measuring", total=len(inputs), unit="texts", enabled=progress) as bar:
        results = _run_batches(model, batches, work, store, workers, device)
        for batch, result in zip(batches, results, strict=True):
            totals.merge(unpack_totals(*result))
            bar.advance(len(batch))
    summary = lens_texts.PassSummary(len(inputs), sum(inputs.sizes(model)), complete=True)
    return totals.result(model, plan, summary)


class _AblationWork:
    """Ablates each head on the texts of one batch."""

    def __init__(self, ablated: ablation.HeadAblation, mixers: bool) -> None:
        scope, evaluation = ablated.scope, ablated.evaluation
        self.site, self.mixers = (scope.stack_name, scope.sublayer), mixers
        self.heads, self.donors = ablated.heads, ablated.replacement.donors
        self.means = {layer: mean.cpu() for layer, mean in ablated.replacement.means.items()}
        self.inputs = _on(evaluation.inputs, torch.device("cpu"))
        self.metric, self.targets = evaluation.metric, evaluation.targets
        self.batch_tokens = evaluation.batch_tokens
        self.ablation: ablation.HeadAblation | None = None
        self.layout: ExitStack | None = None

    def __call__(self, model: Model, texts: range) -> BatchResult:
        if self.ablation is None:
            self.ablation, self.layout = self._prepare(model), ExitStack()
            # For as long as the worker lives: it has its own copy of the weights.
            self.layout.enter_context(self.ablation.running(len(self.heads)))
        with torch.no_grad():
            runs = list(self.ablation.run_sets(texts, [(head,) for head in self.heads], ()))
        values = np.full((len(self.heads), len(texts)), np.nan)
        for run in runs[1:]:
            values[list(run.indices)] = run.values.numpy()
        first = {"baseline": runs[0].values[0].numpy(), "weights": runs[0].weights.numpy()}
        return first | {"values": values}, {}

    def _prepare(self, model: Model) -> ablation.HeadAblation:
        device = next(model.parameters()).device
        scope = cached_run.head_scope(model, *self.site, mixers=self.mixers)
        inputs = _on(self.inputs, device)
        evaluation = evaluate.Evaluation.of(
            model,
            inputs,
            self.metric,
            self.targets,
            batch_tokens=self.batch_tokens,
            progress=False,
        )
        means = {layer: mean.to(device) for layer, mean in self.means.items()}
        replacement = replacements.ReplacementValues(
            scope=scope, inputs=inputs, means=means, donors=self.donors
        )
        return ablation.HeadAblation(
            evaluation=evaluation, scope=scope, heads=self.heads, replacement=replacement
        )


@checked
def ablate_with_ray(
    model: Model,
    texts: lens_texts.Inputs,
    heads: Heads = "all",
    *,
    workers: int | None = None,
    device: str = "auto",
    state: Path | str | None = None,
    **options: Unpack[ablation.AblationOptions],
) -> ablation.Ablation:
    """`lens.ablate` on `workers` copies of the model, each on a `device` of Ray: the same.

    `options` are those of `lens.ablate`, without `until`. `state` is a folder for finished batches,
    from which an interrupted measurement goes on. A worker that dies is replaced, and its batch
    measured again.
    """
    inputs = _read(model, texts)
    ablated = ablation.HeadAblation.of(model, inputs, heads, **options)
    evaluation, replace_with = ablated.evaluation, options.get("replace_with", "zero")
    settings = (replace_with, evaluation.targets, options.get("seed", 0), evaluation.batch_tokens)
    place = (ablated.scope.stack_name, ablated.scope.sublayer, ablated.heads)
    store = _store(state, model, inputs, "ablation", repr(evaluation.metric), place, settings)
    batches = evaluation.batches
    work = _AblationWork(ablated, options.get("mixers", True))

    def runs() -> Iterator[evaluate.BatchValues]:
        results = _run_batches(model, batches, work, store, workers, device)
        for batch, (arrays, _) in zip(batches, results, strict=True):
            parts = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
            weights, every = parts["weights"], range(len(ablated.heads))
            yield evaluate.BatchValues(batch, (), parts["baseline"][None], weights)
            yield evaluate.BatchValues(batch, every, parts["values"], weights)

    sets = tuple((head,) for head in ablated.heads)
    effects = evaluation.collect("ablating", len(sets), runs())
    return ablation.ablation_result(ablated, replace(effects, sets=sets), replace_with)
