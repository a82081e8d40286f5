"""Statistics of every head of a model, in one streaming pass over texts of any length."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import kind_of, number, percent, pluralise
from manyheads.lens.inputs.cached_run import run_until
from manyheads.lens.inputs.texts import Inputs, PassSummary, for_each_batch
from manyheads.lens.inputs.token_classes import TokenClasses, token_classes
from manyheads.lens.measure import measures
from manyheads.lens.measure.watcher import Activation, MeasurementPlan, StatisticsWatcher
from manyheads.lens.results import addresses, measure_names, tables
from manyheads.models import build, encoder, model_interface, vision
from manyheads.models.context_parallel import check_context_parallel
from manyheads.ragged import ContextShard, Ragged
from manyheads.taps import Site

KIND = "statistics"
# Not a mean, but a maximum.
LARGEST = "largest_logit"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Statistics(tables.ByHead):
    """Measures of every head by name, with standard errors; `metadata` says on what.

    A mean is over all queries of all texts, except for "sink" and "induction_score", which have one
    value per text, and "largest_logit", which is a maximum. Errors are over texts, whose queries
    may depend on each other, or over the queries of a single text (`metadata["errors_over"]`).
    """

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The largest value of the residual stream after each layer, and its position."""
        return tuple(Activation(**record) for record in self.metadata["activations"])

    @property
    def largest_activation(self) -> float:
        """The largest value of the residual stream after any layer; NaN if none was seen."""
        return max((activation.largest for activation in self.activations), default=math.nan)

    @property
    def mean_activation(self) -> float:
        """M-Act: the mean over layers of each layer's largest activation; NaN if none was seen."""
        largest = [activation.largest for activation in self.activations]
        return sum(largest) / len(largest) if largest else math.nan

    @property
    def sink_share(self) -> float:
        """The fraction of heads with a sink at the first token, mean over texts (Gu et al.).

        A sink is a mean weight above `sink_above` (0.3) in a text, as in arXiv 2410.10781, where
        texts have 64 tokens: `statistics(..., max_length=64)`. NaN if no head has a pattern.
        """
        sinks = self["sink"].means if "sink" in self else np.zeros(0)
        measured = sinks[~np.isnan(sinks)]
        return float(measured.mean()) if len(measured) else math.nan

    @property
    def class_fractions(self) -> dict[str, float]:
        """The fraction of all tokens in each class: the weight that uniform attention gives it."""
        return dict(self.metadata["class_fractions"])

    @property
    def complete(self) -> bool:
        """False if the measurement was interrupted before the last text."""
        return bool(self.metadata["complete"])

    def _lines(self) -> Iterator[str]:
        yield from tables.ByHead._lines(self)
        parts = [pluralise(self.metadata[f"{unit}s"], unit) for unit in ("text", "token")]
        yield f"  over {', '.join(parts)}, errors over {self.metadata['errors_over']}"
        if not math.isnan(self.sink_share):
            above = percent(self.metadata.get("sink_above", measures.SINK_ABOVE))
            yield f"  {percent(self.sink_share)} of heads have more than {above} on the first token"
        if self.activations:
            yield (
                f"  largest activation {number(self.largest_activation)}, mean over layers "
                f"{number(self.mean_activation)}"
            )
        for activation in self.activations:
            if activation.massive:
                yield (
                    f"  massive activation after layer {activation.layer}: "
                    f"{activation.largest:.0f} in channel {activation.channel} at position "
                    f"{activation.position} of text {activation.text}"
                )
        if not self.complete:
            yield "  interrupted before all texts were read"


@wrapping_models
def statistics(
    model: build.Model,
    texts: Inputs,
    *,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = measures.SINK_ABOVE,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    context_parallel: bool = False,
    progress: bool = True,
) -> Statistics:
    """Measure every head on texts, in a streaming pass that never stores an n x n pattern.

    Texts are strings, lists of ids or a `Ragged`; (source, target) pairs for a `Seq2Seq`, images
    for a `Vision`; also an iterator of them. With `max_length` only the first tokens of each text
    are read. A is the attention weight of query i on key j.

    - entropy: -sum A ln A in nats; normalized_entropy: divided by ln of the number of visible keys
    - effective_keys: 1 / sum A^2; max_weight: max A, the confidence of arXiv 1905.09418
    - largest_logit: the largest score before the softmax, over all queries and texts
    - distance: sum A |i - j|; spread: standard deviation of the attended position
    - first_token: A[i, 0]; sink: fraction of texts whose mean of it exceeds `sink_above`
    - previous_token, self, next_token and any of `offsets`: A[i, i + offset] where that
      key exists; previous_token_all_queries divides by all queries (arXiv 1906.04341)
    - on_<class>: weight on tokens of a class: punctuation, digits, newline, brackets, special, or
      your own {name: ids}
    - duplicate_token, induction: weight on earlier copies of the token, and on the tokens after
      them, over queries that have one; induction_score: the detector's score of a text, with and
      without the first token
    - output_norm: norm of the head's output; output_share: its ratio to the residual stream's
    - gate_<gate>: a gate's value; gate_<gate>_closed: the fraction below 0.1
    - on_no_key: weight of a learned sink
    - memory_length: of the heads of causal mixers, how many of the latest tokens have 90% of the
      weight

    Heads of mixers have patterns too (see `docs/concepts/mixers.md`). Their weights may be
    negative: A is the absolute weight over the sum of those of its row. Mixers without a pattern
    have only output_norm and output_share; those without heads have no row.

    With `context_parallel` the processes of `torch.distributed`, each of which makes this call,
    share the tokens of every text, and no process has the activations of a whole one. All get the
    same result as one process (see `docs/guides/many-gpus.md`).

    Ctrl-C ends the measurement and keeps the finished batches.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, seed=0)
    >>> result = statistics(model, [[5, 6, 7, 5, 6], [8, 9]], offsets=(-2,))
    >>> sorted(set(result.names) & {"entropy", "offset-2", "induction"})
    ['entropy', 'induction', 'offset-2']
    """
    check_heads(model)
    if context_parallel:
        check_shares_texts(model)
        progress = progress and torch.distributed.get_rank() == 0
    plan = make_plan(model, classes, offsets, sink_above)
    return measure_by_plan(
        model,
        texts,
        plan,
        max_length=max_length,
        batch_tokens=batch_tokens,
        context_parallel=context_parallel,
        progress=progress,
    )


def measure_by_plan(
    model: build.Model,
    texts: Inputs,
    plan: MeasurementPlan,
    *,
    last: Site | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    context_parallel: bool = False,
    progress: bool = True,
) -> Statistics:
    """The same, with a plan that several passes share; each may end after a site."""
    totals = StatisticsTotals()

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        totals.add(watch_batch(model, plan, inputs, numbers, last, context_parallel))

    summary = for_each_batch(
        model,
        texts,
        visit,
        label="measuring",
        max_length=max_length,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return totals.result(model, plan, summary)


def watch_batch(
    model: build.Model,
    plan: MeasurementPlan,
    inputs: model_interface.ModelInputs,
    numbers: list[int],
    last: Site | None = None,
    context_parallel: bool = False,
) -> StatisticsWatcher:
    """Measure one batch, whose texts have these numbers, up to a site."""
    watcher = StatisticsWatcher(plan, ids_by_stack(model, inputs), numbers)
    if context_parallel:
        assert inputs.ids is not None, "checked by `check_shares_texts`"
        shard = ContextShard.in_group(inputs.ids.lengths.each)
        inputs = model_interface.ModelInputs(ids=inputs.ids.shard(shard))
    with torch.inference_mode():
        run_until(partial(model.run_hidden, inputs), watcher, last)
    return watcher


def check_shares_texts(model: build.Model) -> None:
    """Refuse to share the texts of this model among processes, or to do so without any."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise InputError(
            "context_parallel=True needs the processes of torch.distributed, and there are none",
            "start this program with torchrun and call torch.distributed.init_process_group first",
        )
    if not isinstance(model, encoder.TextModel):
        raise InputError(
            f"processes cannot share the inputs of {kind_of(model)}",
            "use an encoder or a decoder of manyheads, or one process",
        )
    stack = model.config.stack
    check_context_parallel(stack.layers, stack.halting, trains=False)


def check_heads(model: build.Model) -> None:
    """Refuse a model whose mixers have no heads."""
    layers = [layer for stack in model.stacks().values() for layer in stack.config.layers]
    names = sorted({type(layer.mixer.inner).__name__ for layer in layers if layer.mixer})
    if names and not addresses.blocks_of(model):
        raise InputError(
            f"the model has no heads: its layers mix tokens by {', '.join(names)}",
            "use lens.influence, or a model with attention",
        )


def ids_by_stack(model: build.Model, inputs: model_interface.ModelInputs) -> dict[str, Ragged]:
    """The token ids of each stack."""
    if inputs.ids is None:
        return {}
    if not model.reads_pairs:
        return {model.readout_stack: inputs.ids}
    if inputs.source is None:
        return {"decoder": inputs.ids}
    return {"encoder": inputs.source, "decoder": inputs.ids}


def make_plan(
    model: build.Model,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = measures.SINK_ABOVE,
    only: frozenset[str] | None = None,
) -> MeasurementPlan:
    """The plan that all batches of a model share; `only` are names of measures (None: all)."""
    columns = {}
    if not isinstance(model, vision.Vision):
        vocabulary = model.config.embedding.vocabulary
        columns = token_classes(model.tokenizer, vocabulary, classes)
    elif classes:
        raise InputError("images have no token classes", "omit classes")
    every = tuple(dict.fromkeys((*measures.NEIGHBORS, *offsets)))
    return MeasurementPlan(model.stacks(), columns, every, sink_above, only)


class StatisticsTotals:
    """The sums over all finished batches."""

    def __init__(self) -> None:
        self.sums = measures.MeasureSums()
        self.logits: dict[addresses.Block, Float[Tensor, " h"]] = {}
        self.activations: dict[tuple[str, int], Activation] = {}
        self.tokens = 0
        self.class_counts: dict[str, float] = {}

    def add(self, watcher: StatisticsWatcher) -> None:
        batch = StatisticsTotals()
        batch.sums, batch.logits, batch.activations = (
            watcher.sums,
            watcher.scores,
            watcher.activations,
        )
        batch.tokens, batch.class_counts = watcher.tokens, watcher.class_counts
        self.merge(batch)

    def merge(self, batch: "StatisticsTotals") -> None:
        self.sums.merge(batch.sums)
        for block, scores in batch.logits.items():
            before = self.logits.get(block)
            self.logits[block] = scores if before is None else torch.maximum(before, scores)
        for layer, activation in batch.activations.items():
            largest = self.activations.get(layer)
            if largest is None or activation.largest > largest.largest:
                self.activations[layer] = activation
        self.tokens += batch.tokens
        for name, count in batch.class_counts.items():
            self.class_counts[name] = self.class_counts.get(name, 0.0) + count

    def result(self, model: build.Model, plan: MeasurementPlan, summary: PassSummary) -> Statistics:
        blocks, measured = addresses.blocks_of(model), self.sums.names
        if "normalized_entropy" not in measured and self.tokens:
            # None of the heads has a pattern.
            only = plan.only or measures.OF_PATTERNS
            measured += tuple(name for name in measures.OF_PATTERNS if name in only)
            measured += tuple(map(measures.offset_name, plan.offsets))
            measured += tuple(f"on_{name}" for name in plan.classes)
        names = measure_names.sort_measures((*measured, *([LARGEST] if self.logits else [])))
        several = summary.texts > 1
        fractions = {name: count / self.tokens for name, count in self.class_counts.items()}
        metadata = {
            "texts": summary.texts,
            "tokens": self.tokens,
            "errors_over": "texts" if several else "queries",
            "sink_above": plan.sink_above,
            "class_fractions": fractions,
            "activations": [asdict(largest) for _, largest in sorted(self.activations.items())],
            "complete": summary.complete,
        }
        means = {name: self.sums.means(blocks, name) for name in names}
        if self.logits:
            means[LARGEST] = self.largest_logits(blocks)
        errors = {name: self.sums.errors(blocks, name, over_sequences=several) for name in names}
        return Statistics(kind=KIND, blocks=blocks, means=means, errors=errors, metadata=metadata)

    def largest_logits(self, blocks: tuple[addresses.Block, ...]) -> tables.FloatsByHead:
        """The largest score of each head before the softmax; NaN for heads without scores."""
        parts = [
            self.logits[block].double().cpu()
            if block in self.logits
            else torch.full((block.heads,), torch.nan)
            for block in blocks
        ]
        largest = torch.cat([*parts, torch.zeros(0)]).double().numpy()
        return np.where(np.isinf(largest), np.nan, largest)
