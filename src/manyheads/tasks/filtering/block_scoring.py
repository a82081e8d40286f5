"""One block of documents: which rows are kept, with their scores, and the counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from manyheads.encoding import encode, filter_rule, text_scores
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.tasks.filtering import corpus, shards

# Rows that could not be read and are named in the report.
SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterCounts:
    """How many documents there were, and what became of them.

    `decided` were dropped by their columns alone, without the model; `tokens` are those that the
    model read. Empty and undecodable documents are dropped too.
    """

    documents: int = 0
    kept: int = 0
    tokens: int = 0
    empty: int = 0
    undecodable: int = 0
    truncated: int = 0
    decided: int = 0

    def __add__(self, more: "FilterCounts") -> "FilterCounts":
        names = [field.name for field in fields(self)]
        return FilterCounts(**{name: getattr(self, name) + getattr(more, name) for name in names})


class ScoringConfig(NamedTuple):
    """What decides about a document, besides the model."""

    rule: filter_rule.TextRule
    prefix: str = ""
    max_length: int | None = None
    batch_tokens: int | None = None

    def new_columns(self, classes: tuple[str, ...]) -> list[str]:
        """The columns that are added to the rows."""
        names = ("score", "label", "probability") if classes else ("score",)
        return [f"{self.prefix}{name}" for name in names]


class RunPlan(NamedTuple):
    """The files to read, and how their documents are scored."""

    groups: list[corpus.FileGroup]
    layout: corpus.Layout
    scoring: ScoringConfig


class Prepared(NamedTuple):
    """A block whose texts are tokenized, but for those that their columns rule out."""

    block: corpus.CorpusBlock
    columns: Mapping[str, list[Any]]
    chosen: list[int]
    texts: text_scores.TokenizedTexts
    counts: FilterCounts
    problems: list[corpus.Problem]


class Scored(NamedTuple):
    """The rows of a block that are kept, as a table, and the counts of the block."""

    table: Any
    counts: FilterCounts
    problems: list[corpus.Problem]
    consumed: int
    fraction: float


def prepare_block(model: Model, block: corpus.CorpusBlock, config: ScoringConfig) -> Prepared:
    """Tokenize the texts that the model has to read."""
    columns = {name: block.column(name) for name in config.rule.columns}
    chosen: list[int] = []
    broken_files = [problem for problem in block.problems if problem.ends_file]
    problems = [problem for problem in block.problems if not problem.ends_file]
    documents = len(block.texts) + len(problems)
    empty = decided = 0
    for row, text in enumerate(block.texts):
        if text is None or not text.strip():
            empty += 1
            continue

        def value(name: filter_rule.RuleName, row: int = row) -> Any:
            return columns[name.name][row] if name.kind == "column" else filter_rule.UNKNOWN

        try:
            if config.rule.decide(value) is False:
                decided += 1
            else:
                chosen.append(row)
        except filter_rule.RuleTypeError as error:
            problems.append(corpus.Problem(f"a row: {error}"))
    texts = text_scores.tokenize_texts(
        model, [block.texts[row] or "" for row in chosen], config.max_length
    )
    counts = FilterCounts(
        documents=documents,
        tokens=sum(map(len, texts.ids)),
        empty=empty,
        undecodable=len(problems),
        truncated=sum(texts.truncated),
        decided=decided,
    )
    problems = [*broken_files, *problems[:SHOWN_PROBLEMS]]
    return Prepared(block, columns, chosen, texts, counts, problems)


def score_block(model: Model, prepared: Prepared, config: ScoringConfig) -> Scored:
    """Score the texts and choose the rows that the rule keeps."""
    options = encode.Options(batch_tokens=config.batch_tokens, progress=False)
    scores = text_scores.score_texts(model, prepared.texts, options)
    indices: list[int] = []
    problems = list(prepared.problems)
    empty = undecodable = 0
    for index, row in enumerate(prepared.chosen):

        def value(name: filter_rule.RuleName, index: int = index, row: int = row) -> Any:
            if name.kind == "column":
                return prepared.columns[name.name][row]
            return scores.value(name, index)

        if not scores.tokens[index]:
            empty += 1
            continue
        try:
            if config.rule.decide(value):
                indices.append(index)
        except filter_rule.RuleTypeError as error:
            undecodable += 1
            problems.append(corpus.Problem(f"a row: {error}"))
    more = FilterCounts(kept=len(indices), empty=empty, undecodable=undecodable)
    block = prepared.block
    table = kept_rows(prepared, scores, indices, config) if indices else None
    return Scored(
        table, prepared.counts + more, problems[:SHOWN_PROBLEMS], block.consumed, block.fraction
    )


def kept_rows(
    prepared: Prepared, scores: text_scores.TextScores, indices: list[int], config: ScoringConfig
) -> Any:
    """The rows with these indices as a table, with the columns of the scores."""
    pa = shards.arrow()
    block, rows = prepared.block, [prepared.chosen[index] for index in indices]
    if isinstance(block.rows, list):
        table = shards.table_of_rows([block.rows[row] for row in rows])
    else:
        table = block.rows.take(rows)
    names = config.new_columns(scores.classes)
    check_new_columns(names, table.column_names)
    columns: list[list[Any]] = [[scores.scores[index] for index in indices]]
    if scores.classes:
        columns.append([scores.label(index) for index in indices])
        columns.append([max(scores.probabilities[index]) for index in indices])
    types = (pa.float32(), pa.string(), pa.float32())
    for name, values, kind in zip(names, columns, types, strict=False):
        table = table.append_column(name, pa.array(values, kind))
    return table


def check_new_columns(names: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a corpus with a column that has the name of one that is added."""
    for name in names:
        if name in columns:
            raise InputError(
                f"the corpus has a column {name!r} already", "choose other names with prefix='new_'"
            )
