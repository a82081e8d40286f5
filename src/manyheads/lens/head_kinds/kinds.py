"""The kinds of every head, with scores, thresholds and evidence."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import TextReader, require_text_model
from manyheads.errors import InputError
from manyheads.formatting import listed, without_nan
from manyheads.lens.head_kinds import alignment, criteria, head_tests, stages, text_tests
from manyheads.lens.head_kinds.partners import InductionPartner, add_partners
from manyheads.lens.head_kinds.stored_tests import storable_fingerprint
from manyheads.lens.inputs import annotated, conllu
from manyheads.lens.inputs.synthetic import plain_words
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address, HeadName, blocks_of, pick_head
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import MAX_ROWS, ByHead, Tabular
from manyheads.models import build, model_interface, vision

KIND = "kinds"
# The name of a head without a kind.
MIXED = "mixed"
MAX_LABELS = 4
# The column of the difference between the halves of counterbalanced text.
BIAS = "bias"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Kinds(Tabular):
    """The labels of every head, the most specific first, and the scores behind them.

    `scores` has one column per kind with standard errors, heads below the threshold included, and
    "bias", where it was measured. `nearest` has the kind that each head without labels comes
    nearest to, and why it does not have it. `metadata` has the inputs, the thresholds, the partners
    of induction heads, and the kinds that could not be measured and why.
    """

    labels: Mapping[Address, tuple[criteria.Label, ...]]
    scores: ByHead
    nearest: Mapping[Address, criteria.Label] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """False if the measurement was interrupted."""
        return bool(self.metadata.get("complete", True))

    @property
    def missing(self) -> dict[str, str]:
        """Kinds that were not measured, and why."""
        return dict(self.metadata.get("missing", {}))

    @property
    def stages(self) -> dict[str, dict[Address, tuple[criteria.Label, ...]]]:
        """The heads of the four stages of arXiv 2409.03752, with the labels that are evidence.

        The stages are "recalling knowledge", "identifying context", "reasoning" and "expressing".
        A head can be in several; one without evidence is in none.
        """
        return stages.group_by_stage(self.labels)

    def of(self, head: HeadName) -> tuple[criteria.Label, ...]:
        """All labels of one head, the most specific first; none for a mixed one."""
        return self.labels[pick_head(self.labels, head)]

    def best(self, head: HeadName) -> str:
        """The name of the first label, or "mixed"."""
        labels = self.of(head)
        return labels[0].name if labels else MIXED

    def heads(self, kind: str) -> tuple[Address, ...]:
        """The heads of a kind, by score; "mixed" gives the heads without any."""
        if kind == MIXED:
            return tuple(address for address, labels in self.labels.items() if not labels)
        scored = [
            (max(label.score for label in own), address)
            for address, labels in self.labels.items()
            if (own := [label for label in labels if kind in (label.kind, label.name)])
        ]
        measured = self.metadata.get("thresholds", {})
        labels = [label.kind for labels in self.labels.values() for label in labels]
        if not scored and kind not in (*labels, *measured):
            kinds = ", ".join(measured)
            raise InputError(f"there is no kind {kind!r}", f"use {kinds} or {MIXED}")
        return tuple(address for _, address in sorted(scored, key=lambda pair: -pair[0]))

    def rows(self) -> list[dict[str, Any]]:
        """One record per label, and one for each head without labels."""
        records = []
        for address, labels in self.labels.items():
            where = address.record()
            if not labels:
                records.append(where | self._mixed_record(address))
            records += [where | _label_record(label) for label in labels]
        return records

    def table(self, *, max_rows: int | None = MAX_ROWS) -> Any:
        """A rich table: each head, its kinds, its bias if known, and the evidence for the first."""
        from rich.table import Table

        titles = ["head", "kinds", *(["bias"] if BIAS in self.scores else []), "evidence"]
        table = Table(*titles, box=None, pad_edge=False, title=KIND, title_justify="left")
        for address, labels in list(self.labels.items())[:max_rows]:
            evidence = labels[0].evidence if labels else self.why_mixed(address)
            cells = [str(address), self.describe(address), evidence]
            if BIAS in self.scores:
                bias = self.scores[BIAS]
                cells.insert(2, f"{bias.of(address):+.2f} ± {bias.error_of(address):.2f}")
            table.add_row(*cells)
        if max_rows is not None and len(self.labels) > max_rows:
            more = len(self.labels) - max_rows
            table.caption = f"{more} more heads: table(max_rows=None), frame() or save()"
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        counts = Counter(
            kind for labels in self.labels.values() for kind in {label.kind for label in labels}
        )
        parts = [f"{count} {kind}" for kind, count in counts.most_common()]
        parts.append(f"{len(self.heads(MIXED))} {MIXED}")
        lines = [f"kinds of {len(self.labels)} heads: {', '.join(parts)}"]
        named = [address for address, labels in self.labels.items() if labels]
        width = max((len(str(address)) for address in named), default=0)
        lines += [
            f"  {address!s:<{width}}  {self.describe(address)}" for address in named[:MAX_ROWS]
        ]
        if len(named) > MAX_ROWS:
            lines.append(f"  and {len(named) - MAX_ROWS} more: table(max_rows=None), frame()")
        heads = (f"{len(heads)} {stage}" for stage, heads in self.stages.items())
        lines.append(f"  heads with evidence for a stage: {', '.join(heads)}")
        for why in dict.fromkeys(self.missing.values()):
            these = ", ".join(kind for kind, reason in self.missing.items() if reason == why)
            lines.append(f"  not measured: {these} ({why})")
        if not self.complete:
            lines.append("  interrupted before everything was measured")
        return "\n".join(lines)

    __repr__ = __str__

    def describe(self, head: HeadName, max_labels: int = MAX_LABELS) -> str:
        """The labels of a head in one line, or "mixed" with the nearest kind and its score."""
        labels = self.of(head)
        if not labels:
            near = self.nearest.get(pick_head(self.labels, head))
            if near is None:
                return MIXED
            close = ", within two standard errors" if near.near_threshold else ""
            lacks = f": {near.lacks}{close}" if near.lacks else ""
            return f"{MIXED}, nearest {near.name} {near.score:.2f}{lacks}"
        return listed([*map(str, labels)], max_labels)

    def why_mixed(self, head: HeadName) -> str:
        """Why a head has no kind: what it comes nearest to, and what is lacking."""
        head = pick_head(self.labels, head)
        if str(head) in self.metadata.get("silent", ()):
            return "writes almost nothing to the residual stream"
        near = self.nearest.get(head)
        return "below all thresholds" if near is None else near.evidence

    def _mixed_record(self, address: Address) -> dict[str, Any]:
        near = self.nearest.get(address)
        blank = criteria.Label(kind="", score=0.0, threshold=0.0, evidence="")
        unknown = dict.fromkeys(_label_record(blank))
        record = unknown | {
            "kind": MIXED,
            "detail": "",
            "stage": "",
            "evidence": self.why_mixed(address),
        }
        if near is None:
            return record
        return record | {
            "nearest": near.name,
            "score": near.score,
            "near_threshold": near.near_threshold,
            "lacks": near.lacks,
        }


def _label_record(label: criteria.Label) -> dict[str, Any]:
    held, draws = label.draws or (None, None)
    record = {
        "kind": label.kind,
        "detail": label.detail,
        "stage": stages.stage_of(label.kind),
        "score": label.score,
        "score_error": label.error,
        "low": label.interval[0],
        "high": label.interval[1],
        "samples": label.samples,
        "unit": label.unit,
        "draws_held": held,
        "draws": draws,
        "threshold": label.threshold,
        "near_threshold": label.near_threshold,
        "nearest": "",
        "lacks": "",
        "evidence": label.evidence,
    }
    return dict(without_nan(record))


HeadTest = Callable[[], None]


@wrapping_models
def kinds(
    model: build.Model,
    texts: Inputs | None = None,
    *,
    syntax: Path | str | None = None,
    coreference: Path | str | Sequence[Path | str] | None = None,
    measured: Statistics | None = None,
    thresholds: Mapping[str, int | float] | None = None,
    sequences: int = head_tests.SEQUENCES,
    seed: int = 0,
    remeasure: bool = False,
    progress: bool = True,
) -> Kinds:
    """Classify every head: all kinds that fit it, the most specific first, with their evidence.

    Heads are tested on synthetic texts of the model's own tokens: `sequences` repeated random
    tokens, and words with brackets, quotes, numbers and punctuation. All are drawn five times, and
    a label must hold in most draws. If `texts` are given, as for `statistics`, they decide
    previous-token, next-token, self, positional, sink, punctuation and broad; `measured` are their
    statistics, where they are known. The thresholds and their sources are in `kinds.toml`;
    `thresholds` changes some, as in {"sink": 0.5}.

    `syntax` is a CoNLL-U file. A random half of the sentences chooses the labels, the other half
    confirms and scores them, corrected for the number of tests (Benjamini and Hochberg, at 5%).
    `coreference` are two files of counterbalanced text with brackets around mentions and pronouns,
    such as the pro- and the anti-stereotyped part of WinoBias: a label must hold in both, and
    "bias" is the accuracy in the first minus that in the second. One file alone gives no label.

    - previous-token, next-token, self, positional: more than half of the weight at one offset
    - duplicate-token, induction: on earlier copies of the token, or on the tokens after them; the
      evidence of an induction head names the earlier head without which it loses its score
    - copying: the OV circuit raises the logit of the attended token, by weights alone
    - sink, punctuation, broad: on the first or special tokens, on punctuation, on everything
    - retrieval: on the token that the model copies from a needle in an article
    - repetition: the output raises the next token of a repetition; recall: the OV circuit connects
      pairs of words such as France and Paris, by weights alone
    - context-blind: the same weights in unrelated texts of the same length
    - bracket, numbering: the partner of a bracket or quote, or the previous number, gets the most
      weight, and at least a quarter; a bracket head distinguishes the partner from other marks
    - acronym, tense, sentence-start, capitals: the word that a letter begins, verbs in the same
      tense, the first word of the sentence, or words with a capital get the most weight
    - syntactic, coreference: the right word gets the most weight, more often than by a fixed choice
    - bias-gap: the right mention gets it more often in one half of counterbalanced text
    - alignment: cross-attention whose place in the source moves on with the text, as of speech
    - images: self, local, row, column, class-token, broad

    A head without a kind is mixed, and `nearest` says what it resembles. Ctrl-C ends the
    measurement and keeps the finished tests. What does not depend on your texts is stored in the
    cache of `manyheads get`, by a hash of the model, and read from there the next time; with
    `remeasure` it is measured again.

    >>> from manyheads.models.build import build
    >>> result = kinds(build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0))
    >>> result.missing["bracket"]
    'the model has no tokenizer'
    """
    if sequences < 1:
        raise InputError(f"sequences must be at least 1, got {sequences}", "use 1 or more")
    table, fingerprint = criteria.threshold_table(thresholds), storable_fingerprint(model)
    tests = head_tests.HeadTests(model, table, progress, fingerprint, remeasure=remeasure)
    if isinstance(model, vision.Vision):
        if syntax is not None or coreference is not None:
            raise InputError("images have no syntax", "omit syntax and coreference")
        steps: list[HeadTest] = [partial(head_tests.measure_images, tests, model, texts, seed)]
    else:
        reader = require_text_model(model)
        inputs = None if texts is None else read_inputs(model, texts)
        if inputs is not None and inputs.examples and model.reads_pairs:
            if syntax is not None or coreference is not None:
                raise InputError("sounds have no syntax", "omit syntax and coreference")
            steps = _tests_on_examples(tests, inputs, measured)
        elif not model.reads_token_ids or (inputs is not None and inputs.examples):
            raise InputError(
                "kinds are decided on texts, and these inputs have more than token ids",
                "use statistics, patterns and ablation, or pass texts alone if the model can",
            )
        else:
            steps = _tests_without_files(tests, reader, inputs, measured, sequences, seed)
            steps += _tests_with_files(tests, reader, syntax, coreference)
    for step in steps:
        try:
            step()
        except KeyboardInterrupt:
            if not tests.scores:
                raise
            tests.complete = False
        if not tests.complete:
            break
    return _result(tests, seed)


def _tests_without_files(
    tests: head_tests.HeadTests,
    model: TextReader,
    texts: model_interface.ModelInputs | None,
    measured: Statistics | None,
    sequences: int,
    seed: int,
) -> list[HeadTest]:
    """Tests on random tokens, given or synthetic texts, and weights."""
    synthetic = texts is None
    steps: list[HeadTest] = [
        partial(head_tests.measure_repeats, tests, model, sequences, seed, positional=synthetic)
    ]
    if texts is not None:
        steps.append(partial(head_tests.measure_texts, tests, texts, measured))
    if texts is not None and model.reads_pairs:
        steps.append(partial(alignment.measure_alignment, tests, texts))
    steps += [
        partial(head_tests.measure_copying, tests, model),
        partial(text_tests.measure_repetition, tests, model, seed),
        partial(text_tests.measure_context, tests, model, seed),
    ]
    if model.tokenizer is None:
        for kind in ("punctuation", "retrieval", "recall", *head_tests.WORD_KINDS):
            tests.missing[kind] = "the model has no tokenizer"
        return steps
    words = plain_words(model.tokenizer, seed=seed)
    if synthetic:
        steps.append(partial(head_tests.measure_punctuation, tests, model, words, seed))
    return [
        *steps,
        partial(head_tests.measure_word_kinds, tests, words, seed),
        partial(text_tests.measure_retrieval, tests, model, words, seed),
        partial(text_tests.measure_recall, tests, model),
    ]


def _tests_on_examples(
    tests: head_tests.HeadTests, inputs: model_interface.ModelInputs, measured: Statistics | None
) -> list[HeadTest]:
    """Tests of an encoder-decoder on sounds or images with their texts."""
    on_texts = set(criteria.threshold_table()) - set(head_tests.TEXT_KINDS) - {"alignment"}
    for kind in on_texts - {"silent"}:
        tests.missing[kind] = "the inputs are not texts alone"
    return [
        partial(head_tests.measure_texts, tests, inputs, measured),
        partial(alignment.measure_alignment, tests, inputs),
    ]


def _tests_with_files(
    tests: head_tests.HeadTests,
    model: TextReader,
    syntax: Path | str | None,
    coreference: Path | str | Sequence[Path | str] | None,
) -> list[HeadTest]:
    """Tests on annotated files, which are read now so that errors come before any measurement."""
    paths = {"syntactic": syntax, "coreference": coreference, "bias-gap": coreference}
    for kind, path in paths.items():
        if path is None:
            tests.missing[kind] = "no file is given"
        elif model.tokenizer is None:
            raise InputError(
                f"{path} needs a tokenizer and the model has none", "set model.tokenizer"
            )
    steps: list[HeadTest] = []
    if syntax is not None:
        sentences = list(conllu.syntax_texts(list(conllu.read_conllu(syntax))))
        steps.append(partial(head_tests.measure_syntax, tests, sentences))
    if coreference is not None:
        files = [coreference] if isinstance(coreference, Path | str) else list(coreference)
        parts = [annotated.read_references(path) for path in files]
        annotated.check_counterbalanced(files, parts)
        texts = [list(annotated.coreference_texts(part)) for part in parts]
        steps.append(partial(head_tests.measure_coreference, tests, texts))
    return steps


def _result(tests: head_tests.HeadTests, seed: int) -> Kinds:
    blocks = blocks_of(tests.model)
    addresses = tuple(address for block in blocks for address in block.addresses)
    silent = np.zeros(len(addresses), dtype=bool)
    if tests.output_share is not None:
        silent = tests.output_share < tests.thresholds["silent"].above
    corrected, count = criteria.correct_for_chance(tests.scores)
    labels, nearest = criteria.label_heads(corrected, addresses, silent)
    partners = head_tests.partners_of_induction(tests, labels, seed)
    thresholds = {kind: asdict(threshold) for kind, threshold in tests.thresholds.items()}
    del thresholds["silent"]
    metadata = tests.metadata | {
        "thresholds": thresholds,
        "missing": tests.missing,
        "partners": {str(head): _partner_record(partner) for head, partner in partners.items()},
        "tests": count,
        "silent": [str(head) for head, quiet in zip(addresses, silent, strict=True) if quiet],
        "complete": tests.complete,
    }
    means = {kind.name: kind.scores for kind in tests.scores}
    errors = {kind.name: kind.errors for kind in tests.scores}
    if tests.bias is not None:
        means[BIAS], errors[BIAS] = tests.bias
    scores = ByHead(kind="scores of kinds", blocks=blocks, means=means, errors=errors)
    return Kinds(
        labels=add_partners(labels, partners), scores=scores, nearest=nearest, metadata=metadata
    )


def _partner_record(partner: InductionPartner) -> dict[str, Any]:
    by = "ablation" if partner.confirmed else "weights alone"
    record = {"head": str(partner.address), "composition": partner.composition, "by": by}
    if partner.confirmed:
        record |= {"score": partner.score, "without": partner.without}
    return record
