"""Negatives for training a retriever: what a search finds that is not the answer, with scores."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from manyheads.argument_checks import checked
from manyheads.atomic_write import atomic_write
from manyheads.data.sources.rows import Row, row_source
from manyheads.encoding.encode import check_file, encode
from manyheads.encoding.late_scores import maxsim
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import ConfigError, InputError, check_int, short_repr
from manyheads.models.build import Model
from manyheads.models.provenance import Role
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tasks.search.index import Index

# Pairs of texts: a .jsonl or .parquet file, or rows with named fields.
PairRows = str | Path | Iterable[Mapping[str, Any]]
# From queries and as many texts to one score each, such as those of a cross-encoder.
PairScorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]

QUERIES_AT_ONCE = 512
# A search has to find this many times more than is kept, because answers are among the hits.
SPARE = 8


class MinedText(NamedTuple):
    text: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MiningRule:
    """Which candidates of a query become negatives, from the best on.

    The `skip_first` best are passed over, since they may be answers that nobody has marked. With a
    `margin` a negative scores at least so much less than the answer.
    """

    top_k: int
    skip_first: int
    margin: float | None

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, minimum=1)
        check_int("skip_first", self.skip_first, minimum=0)
        if self.margin is not None and not self.margin >= 0:
            raise ConfigError(f"margin must be at least 0, got {self.margin:g}", "use 0 or more")

    @property
    def depth(self) -> int:
        """How many candidates to look at."""
        return self.top_k + self.skip_first + SPARE

    def negatives(
        self, candidates: Iterable[MinedText], answers: Sequence[str], answer_score: float | None
    ) -> list[MinedText]:
        wrong = [candidate for candidate in candidates if not _is_answer(candidate.text, answers)]
        if self.margin is not None:
            highest = -torch.inf if answer_score is None else answer_score - self.margin
            wrong = [candidate for candidate in wrong if candidate.score <= highest]
        return wrong[self.skip_first : self.skip_first + self.top_k]


@checked
def mine_negatives(
    source: Index | Model,
    pairs: PairRows,
    *,
    documents: Sequence[str] | None = None,
    top_k: int = 4,
    skip_first: int = 0,
    margin: float | None = None,
    first: str = "first",
    second: str = "second",
    output: str | Path | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Each row with `negatives`: `top_k` texts or fewer, close to its first and not its second.

    `source` is an index, or a model that compares the first texts with `documents`, by default with
    all second texts; a model with late interaction does so by MaxSim. All second texts of equal
    first texts are answers, and so is a chunk of one. The `skip_first` best others are passed over,
    and with a `margin` negatives score at least so much less than the answer; if the search does
    not find the answer, there are none. `output` is a .jsonl file for the rows, which `Contrastive`
    reads with `data.negatives = "negatives"`.
    """
    rule = MiningRule(top_k=top_k, skip_first=skip_first, margin=margin)
    target = _target(output)
    rows = _read(pairs, first, second)
    queries = [row[first] for row in rows]
    answers: dict[str, list[str]] = {}
    for row in rows:
        answers.setdefault(row[first], []).append(row[second])
    if isinstance(source, Index):
        if documents is not None:
            raise InputError("an index has its own documents", "leave out documents")
        candidates_of_queries = _from_index(source, queries, rule.depth, progress)
    else:
        texts = list(dict.fromkeys(row[second] for row in rows) if documents is None else documents)
        candidates_of_queries = _from_model(source, queries, texts, answers, rule.depth, progress)
    mined = []
    for row, candidates in zip(rows, candidates_of_queries, strict=True):
        own = [score for text, score in candidates if _is_answer(text, [row[second]])]
        negatives = rule.negatives(candidates, answers[row[first]], max(own, default=None))
        mined.append({**row, "negatives": [negative.text for negative in negatives]})
    if not any(row["negatives"] for row in mined):
        raise InputError(
            f"no negatives were found for {len(mined)} pairs",
            "give more documents, or a smaller margin or skip_first",
        )
    return _written(mined, target)


@checked
def score_candidates(
    teacher: Model | PairScorer,
    pairs: PairRows,
    *,
    first: str = "first",
    second: str = "second",
    negatives: str = "negatives",
    output: str | Path | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Rows that have negatives with `scores`: a teacher's for the second text and each negative.

    `teacher` is a model, which scores by cosine or with late interaction by MaxSim, or a function
    of queries and as many texts, such as a cross-encoder. Rows without negatives are left out.
    `Distillation` reads the rows with `data.scores = "scores"`.
    """
    target = _target(output)
    rows = [row for row in _read(pairs, first, second, negatives) if row[negatives]]
    if not rows:
        raise InputError(f"no row has {negatives}", "mine them with mine_negatives")
    queries = [row[first] for row in rows for _ in range(len(row[negatives]) + 1)]
    texts = [text for row in rows for text in (row[second], *row[negatives])]
    if isinstance(teacher, Model):
        values = _model_scores(teacher, queries, texts, progress)
    else:
        values = [float(value) for value in teacher(queries, texts)]
    if len(values) != len(texts) or not torch.tensor(values).isfinite().all():
        raise InputError(
            f"the teacher gave {len(values)} scores for {len(texts)} texts, "
            f"{int(torch.tensor(values).isfinite().sum())} of them finite",
            "return one finite number per text",
        )
    left = iter(values)
    scored = [{**row, "scores": list(islice(left, len(row[negatives]) + 1))} for row in rows]
    return _written(scored, target)


def _read(pairs: PairRows, *names: str) -> list[dict[str, Any]]:
    """Rows whose first two fields are texts, and the third, if it is named, a list of texts."""
    if isinstance(pairs, str | Path):
        rows: Iterable[Row] = row_source([str(pairs)])
    else:
        rows = (Row(fields, "pairs", number, "row") for number, fields in enumerate(pairs))
    read = []
    for row in rows:
        if not isinstance(row.fields, Mapping):
            raise InputError(
                f"{row.location} is {short_repr(row.fields)}", "give a mapping of fields to values"
            )
        for name in names[:2]:
            if not row.text(name).strip():
                raise InputError(f"{row.location}: field {name!r} is empty", "leave the row out")
        for name in names[2:]:
            value = row.get(name)
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise InputError(f"{row.location}: field {name!r} is no list of texts", "give one")
        read.append(dict(row.fields))
    if not read:
        raise InputError("there are no pairs", "give at least one")
    return read


def _is_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether the text is an answer or a chunk of one."""
    return any(text.strip() in answer for answer in answers)


def _from_index(
    index: Index, queries: Sequence[str], depth: int, progress: bool
) -> Iterator[list[MinedText]]:
    with Progress("mining", total=len(queries), unit="queries", enabled=progress) as bar:
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            block = queries[start : start + QUERIES_AT_ONCE]
            for hits in index.search_many(block, depth):
                yield [MinedText(hit.text, hit.score) for hit in hits]
            bar.advance(len(block))


def _from_model(
    model: Model,
    queries: Sequence[str],
    texts: list[str],
    answers: Mapping[str, Sequence[str]],
    depth: int,
    progress: bool,
) -> Iterator[list[MinedText]]:
    """The best texts for each query, and its answers among the texts."""
    if not texts:
        raise InputError("there are no documents", "give at least one")
    unique = list(dict.fromkeys(queries))
    query_vectors = _vectors(model, unique, "query", progress)
    text_vectors = _vectors(model, texts, "document", progress)
    place = {text: index for index, text in enumerate(texts)}
    candidates: dict[str, list[MinedText]] = {}
    with Progress("mining", total=len(unique), unit="queries", enabled=progress) as bar:
        for number, query in enumerate(unique):
            if isinstance(query_vectors, Ragged):
                scores = maxsim(query_vectors.of(number), text_vectors)
            else:
                scores = text_vectors @ query_vectors[number]
            best = scores.topk(min(depth, len(texts))).indices.tolist()
            right = [place[text] for text in answers[query] if text in place]
            chosen = list(dict.fromkeys([*best, *right]))
            candidates[query] = [MinedText(texts[index], float(scores[index])) for index in chosen]
            bar.advance(1)
    yield from (candidates[query] for query in queries)


def _vectors(model: Model, texts: Sequence[str], role: Role, progress: bool) -> Any:
    """The vectors of texts as rows, or in a Ragged those of the tokens of each."""
    if model.late is not None:
        return encode_tokens(model, list(texts), role=role, progress=progress)
    return F.normalize(encode(model, list(texts), progress=progress), dim=-1)


def _model_scores(
    model: Model, queries: Sequence[str], texts: Sequence[str], progress: bool
) -> list[float]:
    """The score of each query with its text; each distinct one is encoded once."""
    first = {text: number for number, text in enumerate(dict.fromkeys(queries))}
    second = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    query_vectors = _vectors(model, list(first), "query", progress)
    text_vectors = _vectors(model, list(second), "document", progress)
    rows, columns = [first[query] for query in queries], [second[text] for text in texts]
    if isinstance(query_vectors, Ragged):
        return [
            float(maxsim(query_vectors.of(row), text_vectors.select([column])))
            for row, column in zip(rows, columns, strict=True)
        ]
    products: list[float] = (query_vectors[rows] * text_vectors[columns]).sum(1).tolist()
    return products


def _target(output: str | Path | None) -> Path | None:
    """The file to write, checked before any work."""
    if output is None:
        return None
    if Path(output).suffix != ".jsonl":
        raise InputError(f"output={str(output)!r} is no .jsonl file", "name one: rows.jsonl")
    check_file(Path(output))
    return Path(output)


def _written(rows: list[dict[str, Any]], target: Path | None) -> list[dict[str, Any]]:
    if target is not None:
        with atomic_write(target) as file:
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return rows
