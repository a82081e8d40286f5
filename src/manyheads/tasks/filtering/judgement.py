"""One block of documents judged: which rows are kept, with their scores, and the counts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from manyheads.encoding.encode import Options
from manyheads.encoding.filter_rule import UNKNOWN, RuleName, RuleTypeError, TextRule
from manyheads.encoding.text_scores import (
    TextScores,
    TokenizedTexts,
    score_texts,
    tokenize_texts,
)
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.tasks.filtering.corpus import CorpusBlock, Problem
from manyheads.tasks.filtering.shards import arrow, table_of_rows

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

    def __add__(self, other: "FilterCounts") -> "FilterCounts":
        names = [each.name for each in fields(self)]
        return FilterCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class JudgeConfig(NamedTuple):
    """What decides about a document, besides the model."""

    rule: TextRule
    prefix: str = ""
    longest: int | None = None
    batch_tokens: int | None = None

    def new_columns(self, classes: tuple[str, ...]) -> list[str]:
        """The columns that are added to the rows."""
        names = ("score", "label", "probability") if classes else ("score",)
        return [f"{self.prefix}{name}" for name in names]


class Prepared(NamedTuple):
    """A block whose texts are tokenized, but for those that their columns rule out."""

    block: CorpusBlock
    columns: Mapping[str, list[Any]]
    chosen: list[int]
    texts: TokenizedTexts
    counts: FilterCounts
    problems: list[Problem]


class Judged(NamedTuple):
    """The rows of a block that are kept, as a table, and the counts of the block."""

    table: Any
    counts: FilterCounts
    problems: list[Problem]
    consumed: int
    fraction: float


def prepare(model: Model, block: CorpusBlock, config: JudgeConfig) -> Prepared:
    """Tokenize the texts that the model has to read."""
    columns = {name: block.column(name) for name in config.rule.columns}
    chosen: list[int] = []
    problems = [each for each in block.problems if not each.ends_file]
    empty = decided = 0
    for index, text in enumerate(block.texts):
        if text is None or not text.strip():
            empty += 1
            continue
        try:
            decision = config.rule.decide(partial(_column, columns=columns, row=index))
        except RuleTypeError as error:
            problems.append(Problem(f"a row: {error}"))
            continue
        if decision is False:
            decided += 1
        else:
            chosen.append(index)
    texts = tokenize_texts(model, [block.texts[index] or "" for index in chosen], config.longest)
    counts = FilterCounts(
        documents=len(block.texts) + sum(not each.ends_file for each in block.problems),
        tokens=sum(map(len, texts.ids)),
        empty=empty,
        undecodable=len(problems),
        truncated=sum(texts.truncated),
        decided=decided,
    )
    broken = [each for each in block.problems if each.ends_file]
    return Prepared(block, columns, chosen, texts, counts, [*broken, *problems[:SHOWN_PROBLEMS]])


def _column(name: RuleName, columns: Mapping[str, list[Any]], row: int) -> Any:
    return columns[name.name][row] if name.kind == "column" else UNKNOWN


def judge(model: Model, prepared: Prepared, config: JudgeConfig) -> Judged:
    """Score the texts and choose the rows that the rule keeps."""
    options = Options(batch_tokens=config.batch_tokens, progress=False)
    scores = score_texts(model, prepared.texts, options)
    kept: list[int] = []
    problems = list(prepared.problems)
    empty = undecodable = 0
    for index, row in enumerate(prepared.chosen):

        def value(name: RuleName, index: int = index, row: int = row) -> Any:
            if name.kind == "column":
                return prepared.columns[name.name][row]
            return scores.value(name, index)

        if not scores.tokens[index]:
            empty += 1
            continue
        try:
            if config.rule.decide(value):
                kept.append(index)
        except RuleTypeError as error:
            undecodable += 1
            problems.append(Problem(f"a row: {error}"))
    more = FilterCounts(kept=len(kept), empty=empty, undecodable=undecodable)
    block = prepared.block
    table = _table(prepared, scores, kept, config) if kept else None
    return Judged(
        table, prepared.counts + more, problems[:SHOWN_PROBLEMS], block.consumed, block.fraction
    )


def judge_block(model: Model, block: CorpusBlock, config: JudgeConfig) -> Judged:
    """Both steps in one, for a worker that has the model."""
    return judge(model, prepare(model, block, config), config)


def _table(prepared: Prepared, scores: TextScores, kept: list[int], config: JudgeConfig) -> Any:
    pa = arrow()
    rows = [prepared.chosen[index] for index in kept]
    block = prepared.block
    if isinstance(block.rows, list):
        table = table_of_rows([block.rows[row] for row in rows])
    else:
        table = block.rows.take(rows)
    names = config.new_columns(scores.classes)
    for name in names:
        if name in table.column_names:
            raise taken(name)
    columns: list[list[Any]] = [[scores.scores[index] for index in kept]]
    if scores.classes:
        columns.append([scores.label(index) for index in kept])
        columns.append([max(scores.probabilities[index]) for index in kept])
    types = (pa.float32(), pa.string(), pa.float32())
    for name, values, kind in zip(names, columns, types, strict=False):
        table = table.append_column(name, pa.array(values, kind))
    return table


def taken(name: str) -> InputError:
    """A column of the corpus has the name of one that is added."""
    return InputError(
        f"the corpus has a column {name!r} already", "choose other names with prefix='new_'"
    )
