"""The inspection of a model: statistics, kinds, sinks, dead and duplicate heads in one result."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.argument_checks import checked
from manyheads.bridge.automatic import wrapping_models
from manyheads.checkpoints.deferred.layer_stream import LayerStream
from manyheads.formatting import UNKNOWN, listed, number, pluralise
from manyheads.lens.causal.head_importance import HeadImportance
from manyheads.lens.head_kinds import criteria, head_tests
from manyheads.lens.head_kinds.kinds import BIAS, Kinds, kinds
from manyheads.lens.inputs.synthetic import default_texts
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.measure.streamed_statistics import statistics_from_folder
from manyheads.lens.measure.watcher import Activation
from manyheads.lens.redundant.dead_heads import LOSS_BELOW, DeadHeads, dead_by_statistics
from manyheads.lens.redundant.heads import DuplicatePair, Redundancy, redundancy
from manyheads.lens.results.addresses import Address, HeadName, blocks_of
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.measure_names import describe_measure, format_value
from manyheads.lens.results.tables import MAX_ROWS, Tabular, caption_more
from manyheads.models import build, vision


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The type of a model, the layers and heads of each stack, and its size.

    `mixers` counts the layers that mix tokens by something else than attention.

    >>> from manyheads.models.build import build
    >>> print(summarize_model(build("gpt2", layers=2, width=32, heads=4, vocabulary=60, seed=0)))
    A Decoder of 2 layers with 4 heads each: 8 heads, width 32, vocabulary 60, 60,160 parameters.
    """

    type: str
    stacks: dict[str, list[int]]
    width: int
    vocabulary: int | None
    parameters: int
    mixers: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        layers = "; ".join(
            ("" if name == "main" else f"{name}: ") + _layers(heads)
            for name, heads in self.stacks.items()
        )
        total = sum(sum(heads) for heads in self.stacks.values())
        vocabulary = "" if self.vocabulary is None else f"vocabulary {self.vocabulary:,}, "
        article = "An" if self.type[0] in "AEIOU" else "A"
        if self.mixers:
            every = (f"{count} {name}" for name, count in self.mixers.items())
            layers += f" (mixers: {', '.join(every)})"
        return (
            f"{article} {self.type} of {layers}: {total:,} heads, width {self.width:,}, "
            f"{vocabulary}{self.parameters:,} parameters."
        )


def summarize_model(model: build.Model) -> ModelSummary:
    """Summarize the configuration of a model."""
    stacks = model.stacks()
    heads = {name: [0] * len(stack.config.layers) for name, stack in stacks.items()}
    for block in blocks_of(model):
        heads[block.stack][block.layer] += block.heads
    layers = [layer for stack in stacks.values() for layer in stack.config.layers]
    return ModelSummary(
        mixers=dict(Counter(type(layer.mixer.inner).__name__ for layer in layers if layer.mixer)),
        type=type(model).__name__,
        stacks=heads,
        width=next(iter(stacks.values())).config.width,
        vocabulary=None if isinstance(model, vision.Vision) else model.config.embedding.vocabulary,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _layers(heads: list[int]) -> str:
    """
    >>> _layers([4, 4]), _layers([4, 3, 0]), _layers([4])
    ('2 layers with 4 heads each', '3 layers with 0 to 4 heads', '1 layer with 4 heads')
    """
    if len(heads) == 1:
        return f"1 layer with {heads[0]} heads"
    if min(heads) == max(heads):
        return f"{len(heads)} layers with {heads[0]} heads each"
    return f"{len(heads)} layers with {min(heads)} to {max(heads)} heads"


KIND = "inspection"
# The measures that fit into a terminal.
TABLE_MEASURES = (
    "normalized_entropy",
    "effective_keys",
    "distance",
    "first_token",
    "previous_token",
    "induction",
    "output_share",
)
MAX_KINDS = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Inspection(Tabular):
    """A model's summary, and the statistics, kinds and redundancy of its heads.

    `kinds` is None and `redundancy` empty if the measurement was interrupted before them; there is
    one `Redundancy` per stack and sublayer. `importance` is None unless it was measured, as by
    `manyheads report`.
    """

    model: ModelSummary
    statistics: Statistics
    kinds: Kinds | None = None
    redundancy: tuple[Redundancy, ...] = ()
    importance: HeadImportance | None = None
    metadata: Metadata = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.statistics.addresses

    @property
    def complete(self) -> bool:
        """False if the measurement was interrupted."""
        return bool(self.metadata["complete"])

    @property
    def dead(self) -> DeadHeads:
        """By entropy and norm, and by ablation where `importance` comes from it.

        Estimates and changes with a large error do not make a head dead.
        """
        measured, importance = self.statistics, self.importance
        if importance is not None and (importance.by, importance.metric) == ("ablation", "loss"):
            certain = np.where(importance.errors < LOSS_BELOW, importance.change, np.nan)
            means = {**measured.means, "loss_change": certain}
            errors = {**measured.errors, "loss_change": importance.errors}
            measured = replace(measured, means=means, errors=errors)
        return dead_by_statistics(measured)

    @property
    def sinks(self) -> list[tuple[Address, float]]:
        """Heads with a sink at the first token of some text, by their mean weight on it."""
        fraction = dict(self.statistics["sink"].items()) if "sink" in self.statistics else {}
        ranked = self.statistics["first_token"].ranked() if fraction else []
        return [(address, weight) for address, weight in ranked if fraction[address] > 0]

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The largest value of the residual stream after each layer."""
        return self.statistics.activations

    @property
    def duplicate_pairs(self) -> tuple[DuplicatePair, ...]:
        """Pairs of heads with the same patterns and the same outputs."""
        return tuple(pair for result in self.redundancy for pair in result.duplicates)

    @property
    def duplicates(self) -> dict[Address, list[Address]]:
        """The heads of such pairs, each with its duplicates."""
        duplicates: dict[Address, list[Address]] = {}
        for pair in self.duplicate_pairs:
            duplicates.setdefault(pair.one, []).append(pair.other)
            duplicates.setdefault(pair.other, []).append(pair.one)
        return duplicates

    @property
    def clusters(self) -> tuple[tuple[Address, ...], ...]:
        return tuple(group for result in self.redundancy for group in result.clusters)

    def labels(self, head: HeadName) -> tuple[criteria.Label, ...]:
        return () if self.kinds is None else self.kinds.of(head)

    def best_kind(self, head: HeadName) -> str:
        """The most specific kind of a head, "mixed" where it has none."""
        return UNKNOWN if self.kinds is None else self.kinds.best(head)

    def flags(self) -> dict[Address, list[str]]:
        """The problems of each head: dead, harmful, duplicate."""
        harmful = () if self.importance is None else self.importance.harmful
        problems = {
            "dead": self.dead.heads,
            "harmful": [self.addresses[index] for index in harmful],
            "duplicate": self.duplicates,
        }
        return {
            head: [flag for flag, heads in problems.items() if head in heads]
            for head in self.addresses
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: statistics, importance, kinds, stages, what makes it dead."""
        reasons, duplicates = self.dead.reasons, self.duplicates
        rows, stages = self.statistics.rows(), {} if self.kinds is None else self.kinds.stages
        for index, (head, row) in enumerate(zip(self.addresses, rows, strict=True)):
            if self.importance is not None:
                name = self.importance.measure
                row[name] = float(self.importance.change[index])
                row[f"{name}_error"] = float(self.importance.errors[index])
                row["harmful"] = index in self.importance.harmful
            row["kinds"] = ", ".join(map(str, self.labels(head)))
            row["stages"] = ", ".join(stage for stage, heads in stages.items() if head in heads)
            near = None if self.kinds is None else self.kinds.nearest.get(head)
            row["nearest_kind"] = "" if near is None else str(near)
            if self.kinds is not None and BIAS in self.kinds.scores:
                row[BIAS] = self.kinds.scores[BIAS].of(head)
                row[f"{BIAS}_error"] = self.kinds.scores[BIAS].error_of(head)
            row["dead"] = ", ".join(reasons.get(head, ()))
            row["duplicates"] = ", ".join(map(str, duplicates.get(head, [])))
        return rows

    def table(self, *, max_rows: int | None = MAX_ROWS) -> Any:
        """A rich table: every head, its best kinds if they are known, and the main measures."""
        return self._table(TABLE_MEASURES, max_rows)

    def kinds_table(self, *, max_rows: int | None = MAX_ROWS) -> Any:
        """A rich table without the measures: every head, its best kinds, dead or duplicate."""
        return self._table((), max_rows)

    def _table(self, measures: Sequence[str], max_rows: int | None) -> Any:
        from rich.table import Table

        about = {name: describe_measure(name) for name in measures if name in self.statistics}
        reasons, duplicates = self.dead.reasons, self.duplicates
        titles = ["Head"] if self.kinds is None else ["Head", "Kinds"]
        table = Table(*titles, box=None, pad_edge=False)
        for measure in about.values():
            # A title takes a line per word, so that the kinds have room for theirs.
            widest = max(map(len, (*measure.title.split(), "0.00 %")))
            table.add_column(measure.title, justify="right", max_width=widest)
        bias = None if self.kinds is None or BIAS not in self.kinds.scores else self.kinds.scores
        if bias is not None:
            table.add_column(describe_measure(BIAS).title, justify="right")
        table.add_column("")
        for head in self.addresses[:max_rows]:
            values = self.statistics.of(head)
            cells = [format_value(values[name], measure.unit) for name, measure in about.items()]
            if bias is not None:
                cells.append(format_value(bias[BIAS].of(head), error=bias[BIAS].error_of(head)))
            remarks = [f"dead by {why}" for why in reasons.get(head, ())]
            remarks += [f"duplicate of {other}" for other in duplicates.get(head, [])]
            names = [str(head)] if self.kinds is None else [str(head), self._describe(head)]
            table.add_row(*names, *cells, ", ".join(remarks))
        return caption_more(table, len(self.addresses), max_rows)

    def _summary(self) -> Metadata:
        return {
            "heads": [str(head) for head in self.addresses],
            "sinks": {str(head): weight for head, weight in self.sinks},
            "dead": {str(head): list(why) for head, why in self.dead.reasons.items()},
            "duplicates": [[str(pair.one), str(pair.other)] for pair in self.duplicate_pairs],
            "clusters": [[str(head) for head in group] for group in self.clusters],
        }

    def _lines(self) -> Iterator[str]:
        metadata = self.statistics.metadata
        read = pluralise(metadata["texts"], "text"), pluralise(metadata["tokens"], "token")
        yield f"{self.model} Read: {', '.join(read)}."
        if self.kinds is not None:
            yield str(self.kinds)
        yield f"{len(self.sinks)} heads have a sink at the first token of some text"
        if self.activations:
            largest, mean = self.statistics.largest_activation, self.statistics.mean_activation
            yield f"largest activation {number(largest)}, mean over layers {number(mean)}"
        yield str(self.dead)
        for result in self.redundancy:
            yield str(result)
        if not self.complete:
            yield "interrupted before everything was measured"

    def _describe(self, head: Address) -> str:
        # Most heads that do not look at tokens have a kind that says where they look instead.
        labels = [str(label) for label in self.labels(head) if label.kind != "context-blind"]
        if labels or self.kinds is None:
            return listed(labels, MAX_KINDS) if labels else UNKNOWN
        return self.kinds.describe(head, MAX_KINDS)


@wrapping_models
def inspect(
    model: build.Model,
    texts: Inputs | None = None,
    *,
    syntax: Path | str | None = None,
    coreference: Path | str | Sequence[Path | str] | None = None,
    sequences: int = head_tests.SEQUENCES,
    seed: int = 0,
    redundancy_texts: int | None = None,
    measured: Statistics | None = None,
    remeasure: bool = False,
    batch_tokens: int | None = None,
    context_parallel: bool = False,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
    on_statistics: Callable[["Inspection"], None] = lambda _: None,
) -> Inspection:
    """Inspect every head of a model: statistics, kinds, sinks, dead and duplicate heads.

    Texts are as for `statistics`; by default short articles that come with the package (both as
    source and target for a `Seq2Seq`), or random images for a `Vision`. They are read once for
    statistics, positional kinds, sinks and dead heads, and twice for `redundancy` (only the first
    `redundancy_texts` of them); `kinds` adds `sequences` of random tokens, and `syntax` and
    `coreference` for it are files of annotated text; with `remeasure` it ignores what is cached.
    `measured` are the statistics of the texts, where they are known. With `context_parallel`
    processes share the texts, as in `statistics`, and kinds and duplicates are left out.
    `on_progress` receives the name of each step, and `on_statistics` an inspection that has nothing
    but the statistics, as soon as these are measured.

    Ctrl-C ends the measurement and keeps the finished steps.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    >>> inspection = inspect(model, [[5, 6, 7, 5, 6], [8, 9, 10]], sequences=2)
    >>> [str(head) for head in inspection.dead.heads]
    ['L0H0', 'L0H1']
    """
    inputs = read_inputs(model, default_texts(model, seed) if texts is None else texts)
    offsets = () if model.reads_images else head_tests.OFFSETS
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    on_progress("head statistics")
    if measured is None:
        measured = statistics(
            model, inputs, offsets=offsets, context_parallel=context_parallel, **shared
        )
    metadata = {"complete": measured.complete, "seed": seed, "default_texts": texts is None}
    first_result = Inspection(model=summarize_model(model), statistics=measured, metadata=metadata)
    complete, classified, redundant = measured.complete, None, []
    if context_parallel:
        return first_result
    try:
        on_statistics(first_result)
        # Kinds are decided on texts, or on sounds with theirs, not on images with text.
        if complete and (not inputs.examples or model.reads_pairs):
            on_progress("head kinds")
            classified = kinds(
                model,
                inputs,
                syntax=syntax,
                coreference=coreference,
                measured=measured,
                sequences=sequences,
                seed=seed,
                remeasure=remeasure,
                progress=progress,
            )
            complete = classified.complete
        on_progress("duplicate heads")
        limit = len(inputs) if redundancy_texts is None else redundancy_texts
        first = inputs.select(range(min(limit, len(inputs))))
        # The images of a wrapped model are not read where there are only texts.
        ran = ~np.isnan(np.stack(list(measured.means.values()))).all(0)
        parts = dict.fromkeys(
            (address.stack, address.sublayer)
            for address, seen in zip(measured.addresses, ran, strict=True)
            if seen
        )
        for stack, sublayer in parts if complete else ():
            result = redundancy(model, first, stack=stack, sublayer=sublayer, **shared)
            redundant.append(result)
            complete &= bool(result.metadata["complete"])
    except KeyboardInterrupt:
        complete = False
    return replace(
        first_result,
        kinds=classified,
        redundancy=tuple(redundant),
        metadata=metadata | {"complete": complete},
    )


@checked
def inspect_from_folder(
    where: str | Path | LayerStream,
    texts: Inputs | None = None,
    *,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Inspection:
    """Inspect a model larger than memory, layer by layer from disk: all but kinds and duplicates.

    See `statistics_from_folder`; the default texts are those of `inspect`.
    """
    stream = where if isinstance(where, LayerStream) else LayerStream(where)
    model = stream.model
    measured = statistics_from_folder(
        stream,
        default_texts(model, seed) if texts is None else texts,
        offsets=() if model.reads_images else head_tests.OFFSETS,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    metadata = {"complete": measured.complete, "seed": seed, "default_texts": texts is None}
    return Inspection(model=summarize_model(model), statistics=measured, metadata=metadata)
