"""The data of a report: an inspection, importance, patterns, predictions and suggestions."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.formatting import pluralise, without_nan
from manyheads.lens.attention_maps.patterns import TopKeys, top_keys
from manyheads.lens.causal.head_importance import (
    HeadImportance,
    ImportanceMethod,
    measure_importance,
)
from manyheads.lens.corpus.corpus_pass import read_corpus
from manyheads.lens.corpus.corpus_watcher import ExampleSettings
from manyheads.lens.corpus.examples import HeadExample
from manyheads.lens.corpus.pass_state import PassSettings
from manyheads.lens.head_kinds.kinds import BIAS, Kinds
from manyheads.lens.inspection import Inspection, inspect
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.redundant.dead_heads import LOSS_BELOW
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import MeasureInfo, describe_measure, sort_measures
from manyheads.models import build, decoder, readout
from manyheads.report.composition_graph import HeadComposition, strongest_compositions
from manyheads.report.inputs import ReportInput, read_image_input, read_text_input
from manyheads.report.predictions import TextPredictions, predict
from manyheads.taps import Sublayer
from manyheads.tokenizers import token_text

FloatsByHead = Float[np.ndarray, " h"]

# A few texts are enough to compare patterns and outputs.
REDUNDANCY_TEXTS = 8
# The most important heads are shown with the texts where they are sharpest.
EXAMPLE_HEADS, EXAMPLES = 6, 3
# Kinds that show well what a head can do, the most telling first.
TELLING_KINDS = (
    *("induction", "alignment", "duplicate-token", "bracket", "coreference", "syntactic"),
    *("previous-token", "retrieval", "numbering", "acronym", "next-token", "class-token"),
)
# Stored weights of all heads together, and keys per query.
MAX_WEIGHTS = 900_000
MIN_KEYS, MAX_KEYS = 4, 32
# Weights of examples are whole numbers of thousandths.
WEIGHT_UNITS = 1000
# The columns of the table of heads; other measures only color the atlas.
TABLE_COLUMNS = (
    *("loss_change", "similarity_drop", "bias", "normalized_entropy", "max_weight", "distance"),
    *("first_token", "previous_token", "duplicate_token", "induction", "output_share"),
)
# Variants of other measures, and single offsets.
HIDDEN = ("previous_token_all_queries", "induction_score", "offset")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReportMeasure:
    """One value per head, with its standard error where it is known."""

    name: str
    about: MeasureInfo
    values: FloatsByHead
    errors: FloatsByHead

    @property
    def in_table(self) -> bool:
        return self.name in TABLE_COLUMNS


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReportData:
    """An inspection, the text or image it was made on, and the largest weights of every head.

    `unknown_importance` says why the inspection has no importance, where it has none, and
    `unknown_compositions` why no composition of heads is known. `examples` are the texts where the
    most important heads are sharpest, `passages` the tokens of those texts by stack.
    """

    name: str
    model: build.Model
    input: ReportInput
    inspection: Inspection
    unknown_importance: str
    largest: tuple[TopKeys, ...]
    keys: int
    predictions: TextPredictions
    compositions: tuple[HeadComposition, ...] = ()
    unknown_compositions: str = ""
    examples: Mapping[Address, tuple[HeadExample, ...]] = field(default_factory=dict)
    passages: Mapping[int, Mapping[str, list[str]]] = field(default_factory=dict)

    @property
    def statistics(self) -> Statistics:
        return self.inspection.statistics

    @property
    def kinds(self) -> Kinds:
        assert self.inspection.kinds is not None, "no report is made of an interrupted inspection"
        return self.inspection.kinds

    @property
    def importance(self) -> HeadImportance | None:
        return self.inspection.importance

    @property
    def heads(self) -> int:
        return len(self.inspection.addresses)

    def measures(self) -> list[ReportMeasure]:
        """Importance first, where it is known, then every statistic that some head has."""
        return list_measures(self.inspection)


def kind_words(inspection: Inspection, head: Address) -> str:
    """The most specific kind of a head, or the closest one and what it lacks.

    For example "closest: previous-token, 0.41 of the 0.50 it needs".
    """
    kinds = inspection.kinds
    if kinds is None or kinds.of(head):
        return inspection.best_kind(head)
    near = kinds.nearest.get(head)
    if near is None:
        return f"no kind: {kinds.why_mixed(head)}"
    if near.score <= near.threshold:
        return f"closest: {near.name}, {near.score:.2f} of the {near.threshold:.2f} it needs"
    return f"closest: {near.name}, {near.score:.2f}, but {near.lacks}"


def short_kind(inspection: Inspection, head: Address) -> str:
    """The same for a small square: "induction", "near induction" or "no kind"."""
    kinds = inspection.kinds
    if kinds is None or kinds.of(head):
        return inspection.best_kind(head)
    near = kinds.nearest.get(head)
    return "no kind" if near is None else f"near {near.name}"


def telling_head(inspection: Inspection) -> Address:
    """The head that a page opens on: of the most telling kind, the one that matters most."""
    kinds, importance = inspection.kinds, inspection.importance
    worth = np.zeros(len(inspection.addresses))
    if importance is not None:
        worth = np.nan_to_num(importance.change)

    def rank(index: int) -> tuple[int, float, float]:
        labels = inspection.labels(inspection.addresses[index])
        kind = labels[0].kind if labels else ""
        place = TELLING_KINDS.index(kind) if kind in TELLING_KINDS else len(TELLING_KINDS)
        return -place, float(worth[index]), labels[0].score if labels else 0.0

    assert kinds is None or kinds.labels, "a model without heads has no page"
    return inspection.addresses[max(range(len(inspection.addresses)), key=rank)]


def list_measures(inspection: Inspection) -> list[ReportMeasure]:
    """Importance first, where it is known, then every statistic that some head has."""
    measures = []
    importance, kinds, statistics = inspection.importance, inspection.kinds, inspection.statistics

    def add(name: str, values: FloatsByHead, errors: FloatsByHead, note: str = "") -> None:
        about = describe_measure(name)
        about = replace(about, label=f"{about.label}{note}")
        measures.append(ReportMeasure(name=name, about=about, values=values, errors=errors))

    if importance is not None:
        note = ", estimated" if importance.by == "gradient" else ""
        add(importance.measure, importance.change, importance.errors, note)
    if kinds is not None and BIAS in kinds.scores:
        add(BIAS, kinds.scores[BIAS].means, kinds.scores[BIAS].errors)
    order = sort_measures(name for name in statistics.names if not name.startswith(HIDDEN))
    for name in sorted(order, key=lambda name: name not in TABLE_COLUMNS):
        column = statistics[name]
        if not np.isnan(column.means).all():
            add(name, column.means, column.errors)
    return measures


def collect_report(
    model: build.Model,
    text: str | Sequence[str] | Sequence[tuple[str, str]] | Path,
    *,
    name: str,
    by: ImportanceMethod = "auto",
    tokens: int = 4096,
    pattern_tokens: int = 256,
    syntax: Path | str | None = None,
    coreference: Path | str | Sequence[Path | str] | None = None,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ReportData:
    """Inspect a model on texts of `tokens` tokens; keep patterns of the first `pattern_tokens`.

    A text that is longer than the model reads is measured in pieces. An encoder-decoder reads
    (source, target) pairs, and a `Vision` the image at a path. Importance is measured `by` ablation
    or estimated from one backward pass; "auto" ablates small models. `syntax` and `coreference` are
    files of annotated text, as for `lens.kinds`. `on_progress` receives the name of each step.
    """
    for argument, count in (("tokens", tokens), ("pattern_tokens", pattern_tokens)):
        if count < 2:
            raise InputError(f"{argument} must be at least 2, got {count}", "use 2 or more")
    if isinstance(text, Path):
        report_input = read_image_input(model, name, text)
    else:
        report_input = read_text_input(model, name, text, measured=tokens, shown=pattern_tokens)
    texts = list(report_input.measured)
    inspection = inspect(
        model,
        texts,
        syntax=syntax,
        coreference=coreference,
        redundancy_texts=REDUNDANCY_TEXTS,
        progress=progress,
        on_progress=on_progress,
    )
    if not inspection.complete:
        # A page without kinds or duplicates would be misread as a model without any.
        raise KeyboardInterrupt
    on_progress("importance of each head")
    importance, unknown_importance = measure_importance(
        model, texts, by, inspection.statistics.metadata["tokens"], progress
    )
    on_progress(f"attention patterns on {len(report_input)} tokens")
    # As many keys per query as keep the file small.
    weights = MAX_WEIGHTS // (len(inspection.addresses) * len(report_input))
    keys = max(MIN_KEYS, min(MAX_KEYS, weights))
    largest = top_keys(model, report_input.shown, top_k=keys)
    on_progress("predictions, compositions of heads and examples")
    inspection = replace(inspection, importance=importance)
    compositions, unknown_compositions = strongest_compositions(model, inspection.kinds)
    examples, passages = _find_examples(model, report_input, inspection, progress)
    return ReportData(
        name=name,
        model=model,
        input=report_input,
        inspection=inspection,
        unknown_importance=unknown_importance,
        largest=largest,
        keys=keys,
        predictions=predict(model, report_input),
        compositions=compositions,
        unknown_compositions=unknown_compositions,
        examples=examples,
        passages=passages,
    )


def example_record(example: HeadExample, decile: int = 0) -> dict[str, Any]:
    """What pages read of an example; the decile of one of the sharpest is 0."""
    return {
        "text": example.text,
        "decile": decile,
        "query": example.query,
        "activation": round(example.activation, 4),
        "start": example.rows.start,
        "counts": example.counts.tolist(),
        "keys": example.keys.tolist(),
        "weights": np.rint(example.weights * WEIGHT_UNITS).astype(int).tolist(),
    }


def _find_examples(
    model: build.Model, source: ReportInput, inspection: Inspection, progress: bool
) -> tuple[dict[Address, tuple[HeadExample, ...]], dict[int, dict[str, list[str]]]]:
    """The texts where the most important heads are sharpest, and their tokens by stack."""
    if source.image is not None:
        return {}, {}
    heads, importance = list(inspection.addresses), inspection.importance
    if importance is not None:
        order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf), kind="stable")
        heads = [heads[index] for index in order]
    else:
        clear = {
            head: max((label.margin for label in inspection.labels(head)), default=0.0)
            for head in heads
        }
        heads.sort(key=lambda head: -clear[head])
    settings = PassSettings(
        max_length=None, examples=ExampleSettings(sharpest=EXAMPLES, per_decile=1)
    )
    done, _ = read_corpus(model, list(source.measured), settings, progress=progress)
    if not done.complete:
        raise KeyboardInterrupt
    books = {
        head: (part.book, index)
        for block, part in done.sums.blocks.items()
        for index, head in enumerate(block.addresses)
    }
    chosen = [head for head in heads if head in books][:EXAMPLE_HEADS]
    examples = {head: tuple(books[head][0].sharpest(books[head][1])) for head in chosen}
    used = sorted({example.text for sharpest in examples.values() for example in sharpest})
    return examples, {
        text: {
            stack: [token_text(model.tokenizer, token) for token in ids.tolist()]
            for stack, ids in done.pool[text].items()
        }
        for text in used
    }


def report_json(report: ReportData) -> dict[str, Any]:
    """The tables of a report as plain JSON: one row per head, and what they were measured on.

    Names are those of `manyheads inspect --json`. In a row each measure has its standard error
    beside it as `<name>_error`; what is not known is null.
    """
    inspection, importance = report.inspection, report.importance
    reasons, duplicates = inspection.dead.reasons, inspection.duplicates
    rows = inspection.rows()
    for address, row in zip(inspection.addresses, rows, strict=True):
        row["kinds"] = [asdict(label) for label in inspection.labels(address)]
        row["dead"] = list(reasons.get(address, ()))
        row["duplicates"] = [str(duplicate) for duplicate in duplicates.get(address, ())]
    fields = ("measure", "metric", "by", "baseline", "texts")
    method = {field: getattr(importance, field) for field in fields} if importance else None
    tables = {"kind": "report", "name": report.name, "statistics": report.statistics.metadata}
    return dict(without_nan(tables | {"importance": method, "rows": rows}))


# Heads that a suggested command names.
MAX_NAMED = 8
# Gates are suggested where at least this fraction of the heads has a sink.
MANY_SINKS = 0.15


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One suggestion: its title, the reason and the command."""

    title: str
    why: str
    command: str


def suggest_commands(report: ReportData, *, model_path: str, text_file: str) -> list[Suggestion]:
    """Suggest commands, the most promising first; the studio comes last."""
    model, text = shlex.quote(model_path), shlex.quote(text_file)
    stacks = report.model.stacks()
    # The heads that can be cut out; those of mixers share weights.
    attends = {
        address
        for block in report.statistics.blocks
        if stacks[block.stack].config.layers[block.layer].mixer is None
        for address in block.addresses
    }
    studio = Suggestion(
        "Switch heads off yourself",
        "The studio shows this model in the browser: type any text, switch heads off, and see how "
        "its answers change.",
        f"manyheads studio {model}",
    )
    steps = (_prune, _gate, _merge, _check_harmful, _measure_exactly, _name_more, _see_corpus)
    suggestions = [suggest(report, attends, model, text) for suggest in steps]
    return [*filter(None, suggestions), *([] if report.model.reads_pairs else [studio])]


def _prune(report: ReportData, attends: set[Address], model: str, text: str) -> Suggestion | None:
    importance = report.importance
    if importance is None:
        return None
    if report.model.reads_pairs:
        # The command prunes one of the three attentions; by default that of the decoder.
        own = ("decoder", Sublayer.ATTENTION)
        attends = {head for head in attends if (head.stack, head.sublayer) == own}
    least = LOSS_BELOW if importance.metric == "loss" else 1e-3
    changes = zip(report.statistics.addresses, importance.change, strict=True)
    idle = sum(bool(change < least) for address, change in changes if address in attends)
    if not idle:
        return None
    unit = importance.metric
    cost = "costs" if importance.by == "ablation" else "would cost, by its gradient,"
    return Suggestion(
        "Prune heads that do nothing",
        f"Each of {idle} of {len(attends)} heads {cost} less than {least:g} of {unit} on its own. "
        "Together they may cost more: the command removes heads one by one while the "
        f"{unit} stays within the budget, and saves a smaller model.",
        f"manyheads prune {model} --file {text} --loss-budget 0.01 -o pruned/",
    )


def _gate(report: ReportData, attends: set[Address], model: str, text: str) -> Suggestion | None:
    writes = isinstance(report.model, decoder.Decoder)
    writes = writes and isinstance(report.model.config.readout, readout.LanguageHead)
    gated = any(name.startswith("gate_") for name in report.statistics.names)
    if not writes or gated or not attends:
        return None
    sinks = int((report.statistics["first_token"].means > SINK_ABOVE).sum())
    massive = sum(layer.massive for layer in report.statistics.activations)
    if sinks < MANY_SINKS * report.heads and not massive:
        return None
    return Suggestion(
        "Give the heads a gate",
        f"{sinks} of {report.heads} heads have a sink at the first token, and there are massive "
        f"activations in {pluralise(massive, 'layer')}. With a gate after its output a head can "
        "write nothing without a sink (Qiu et al., arXiv 2505.06708).",
        f"manyheads gate {model} --file {text} -o gated/ --at output --per head",
    )


def _merge(report: ReportData, attends: set[Address], model: str, text: str) -> Suggestion | None:
    duplicates = [
        pair for pair in report.inspection.duplicate_pairs if {pair.one, pair.other} <= attends
    ]
    # Pruning needs texts.
    if not duplicates or report.input.image is not None:
        return None
    pair = duplicates[0]
    return Suggestion(
        "Remove duplicate heads",
        f"In {pluralise(len(duplicates), 'pair')} both heads have the same pattern and output, "
        f"above all {pair.one} and {pair.other}. Prune by redundancy to keep one of each pair.",
        f"manyheads prune {model} --file {text} --by redundancy --fraction 0.1 -o pruned/",
    )


def _check_harmful(
    report: ReportData, attends: set[Address], model: str, text: str
) -> Suggestion | None:
    importance = report.importance
    if importance is None or report.input.image is not None or not importance.harmful:
        return None
    heads = [report.inspection.addresses[index] for index in importance.harmful]
    heads = [head for head in heads if head in attends][:MAX_NAMED]
    if not heads:
        return None
    names = shlex.quote(",".join(map(str, heads)))
    return Suggestion(
        "Check the heads that seem to harm",
        f"On this text the model does better without {pluralise(len(heads), 'head')}, by more than "
        "two standard errors. On more text that may vanish: measure those heads again.",
        f"manyheads ablate {model} --heads {names} --file {text} --tokens 20000",
    )


def _measure_exactly(
    report: ReportData, _: set[Address], model: str, text: str
) -> Suggestion | None:
    importance = report.importance
    if importance is None or importance.by == "ablation":
        return None
    return Suggestion(
        "Measure what heads are worth",
        "The importance of heads was estimated from one backward pass. Ablation measures it, one "
        f"head at a time: {pluralise(report.heads, 'run')} over the text.",
        f"manyheads report {model} --file {text} --by ablation -o report.html",
    )


def _name_more(report: ReportData, _: set[Address], model: str, text: str) -> Suggestion | None:
    unnamed = sum(not report.kinds.of(head) for head in report.inspection.addresses)
    if 2 * unnamed < report.heads or "syntactic" not in report.kinds.missing:
        return None
    return Suggestion(
        "Find out what the other heads do",
        f"{unnamed} of {report.heads} heads have no kind, and none was tested for syntax. With a "
        "treebank in CoNLL-U, such as one of universaldependencies.org, heads that follow a "
        "relation between words are found.",
        f"manyheads report {model} --file {text} --syntax treebank.conllu -o report.html",
    )


def _see_corpus(report: ReportData, _: set[Address], model: str, text: str) -> Suggestion | None:
    if report.input.image is not None:
        return None
    return Suggestion(
        "See every head over a corpus",
        f"This page shows {pluralise(len(report.input), 'token')}. An atlas reads any amount of "
        "text, and shows for each head the passages where it is sharpest and the tokens that it "
        "looks at most.",
        f"manyheads atlas {model} --corpus {text} -o atlas/",
    )
