"""Pairs of clean and corrupted texts of a model, batch by batch, and circuits evaluated on them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.lens.causal.evaluate import default_batch_tokens
from manyheads.lens.circuit_discovery.graph import Graph, Mask
from manyheads.lens.circuit_discovery.pair_runs import Outputs, PairBatch, Replacement
from manyheads.lens.circuit_discovery.sublayers import check_edges
from manyheads.lens.circuit_discovery.wrapped_sublayers import make_graph
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.aligned_pairs import check_aligned
from manyheads.lens.inputs.texts import Inputs, Targets, batch_ranges, read_inputs
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.progress import Progress

# Bytes for what all writers and readers of a batch have, and tokens whose runs stay in memory.
BATCH_BYTES, CUDA_BATCH_BYTES = 2**29, 2**33
CACHED_TOKENS = 4096


@dataclass(eq=False, kw_only=True)
class CircuitPairs:
    """Pairs of texts that match token by token, and the metric that sets them apart."""

    scope: cached_run.HeadScope
    graph: Graph
    clean: ModelInputs
    corrupted: ModelInputs
    metric: metrics.Metric
    targets: Targets | None
    batches: list[range]
    max_copies: int
    _ends: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    _cached: dict[int, PairBatch] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        clean: Inputs,
        corrupted: Inputs,
        metric: metrics.Metric,
        targets: Targets | None,
        batch_tokens: int | None,
    ) -> "CircuitPairs":
        scope = cached_run.head_scope(model, headless=True)
        check_edges(scope)
        inputs = [read_inputs(model, texts) for texts in (clean, corrupted)]
        graph = make_graph(scope, inputs[0])
        check_aligned(model, *inputs)
        sizes = inputs[0].sizes(model)
        most = default_batch_tokens(model) if batch_tokens is None else batch_tokens
        weight = next(model.parameters())
        token = scope.stack.config.width * weight.element_size()
        most_bytes = CUDA_BATCH_BYTES if weight.is_cuda else BATCH_BYTES
        fitting = most_bytes // (token * (len(graph.writers) + len(graph.readers)))
        batches = list(batch_ranges(sizes, max(1, min(most, fitting))))
        largest = max(sum(sizes[text] for text in texts) for texts in batches)
        return cls(
            scope=scope,
            graph=graph,
            clean=inputs[0],
            corrupted=inputs[1],
            metric=metric,
            targets=targets,
            batches=batches,
            max_copies=max(1, most // largest),
        )

    @property
    def sign(self) -> float:
        """1 where a higher metric is worse, else -1."""
        return 1.0 if metrics.better_direction(self.metric) == "lower" else -1.0

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model evaluates, and nothing is differentiated unless it is asked for."""
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.scope.model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_constant_parameters(self.scope.model))
            yield

    def run_batches(self, replacement: Replacement = "corrupted") -> Iterator[PairBatch]:
        """Both runs of every batch; those of few texts are computed once."""
        base = None if replacement == "corrupted" else self._base(replacement)
        few = sum(self.clean.sizes(self.scope.model)) <= CACHED_TOKENS
        for number, texts in enumerate(self.batches):
            if base is None and number in self._cached:
                yield self._cached[number]
                continue
            with self.ready():
                bound = metrics.bind_metric(
                    self.scope.model, self.clean, texts, self.metric, self.targets
                )
                inputs = self.clean.select(texts), self.corrupted.select(texts)
                batch = PairBatch(self.scope, self.graph, *inputs, bound, base)
                runs = [
                    bound(run.hidden)[0].double().cpu() for run in (batch.clean, batch.corrupted)
                ]
                self._ends[number] = runs[0], runs[1], bound.weights.double().cpu()
            if base is None and few:
                self._cached[number] = batch
            yield batch

    @cached_property
    def ends(self) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
        """The metric of each text in the clean and the corrupted run, and the texts' weights."""
        if len(self._ends) < len(self.batches):
            for _ in self.run_batches():
                pass
        clean, corrupted, weights = zip(
            *(self._ends[key] for key in sorted(self._ends)), strict=True
        )
        return torch.cat(clean), torch.cat(corrupted), torch.cat(weights)

    @property
    def end_means(self) -> tuple[float, float]:
        clean, corrupted, weights = self.ends
        means = [float(metrics.weighted_mean(run, weights)[0]) for run in (clean, corrupted)]
        return means[0], means[1]

    @property
    def effect_error(self) -> float:
        clean, corrupted, weights = self.ends
        return float(metrics.weighted_mean(clean - corrupted, weights)[1])

    def evaluate(
        self, masks: Sequence[Mask], replacement: Replacement, progress: bool
    ) -> Float[Tensor, "circuits b"]:
        """The metric of each text in each circuit."""
        total = len(masks) * len(self.batches)
        columns = []
        with Progress("evaluating circuits", total=total, unit="runs", enabled=progress) as bar:
            for batch in self.run_batches(replacement):
                values = []
                with self.ready():
                    for mask in masks:
                        values.append(batch.evaluate(mask))
                        bar.advance()
                columns.append(torch.stack(values))
        return torch.cat(columns, dim=1)

    def faithfulness(self, values: Float[Tensor, " b"]) -> tuple[float, float]:
        """(metric - corrupted) / (clean - corrupted), of means over texts, and its error."""
        clean, corrupted, weights = self.ends
        return fraction_kept(values, corrupted, clean, weights)

    def _base(self, replacement: Replacement) -> Outputs:
        """What writers write on average in the corrupted texts, or zeros."""
        sums: list[Tensor] = []
        for batch in self.run_batches():
            with self.ready():
                values = [part.sum(-2, keepdim=True) for part in batch.corrupted_outputs()]
            sums = list(map(torch.add, sums, values)) if sums else values
        tokens = sum(self.clean.sizes(self.scope.model))
        factor = 0.0 if replacement == "zero" else 1 / tokens
        return [total * factor for total in sums]


def fraction_kept(
    values: Float[Tensor, " b"],
    start: Float[Tensor, " b"],
    end: Float[Tensor, " b"],
    weights: Float[Tensor, " b"],
) -> tuple[float, float]:
    """How far the mean over texts has moved from the start (0) to the end (1), and its error."""
    full = metrics.weighted_mean(end - start, weights)[0]
    fraction = metrics.weighted_mean(values - start, weights)[0] / full
    spread = metrics.weighted_mean(values - start - fraction * (end - start), weights)[1]
    return float(fraction), float((spread / full).abs())


@contextmanager
def _constant_parameters(model: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
