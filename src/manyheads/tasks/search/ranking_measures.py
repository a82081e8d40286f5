"""How well documents are ranked: nDCG, MRR, recall and MAP, averaged over queries."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, Protocol, runtime_checkable

from manyheads.argument_checks import checked
from manyheads.data.sources.rows import FileRows
from manyheads.errors import InputError, check_int, short_repr
from manyheads.formatting import kind_of, pluralise

# Whether a larger number in the judgements means a better document, or 1 the best one.
Grades = Literal["best-last", "best-first"]
# Per query, documents from best to worst, or their scores.
Rankings = Mapping[str, Sequence[str] | Mapping[str, int | float]]


@dataclass(frozen=True, slots=True)
class JudgedQuery:
    """A query and the gain of each relevant document; documents not listed have none.

    >>> JudgedQuery("1", "boundary layer", {"12": 2, "15": 1}).relevant["12"]
    2
    """

    id: str
    text: str
    relevant: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class MeanScore:
    """A mean over queries and its standard error, which one query leaves unknown (NaN).

    >>> print(MeanScore(0.4162, 0.0253))
    0.416 ± 0.025
    """

    mean: float
    standard_error: float

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.3f}"
        return f"{self.mean:.3f}{error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScores:
    """The measures of one query."""

    ndcg: float
    mrr: float
    recall: float
    map: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalScores:
    """The measures of each query, and as attributes their means: `ndcg`, `mrr`, `recall`, `map`.

    nDCG (Järvelin and Kekäläinen, 2002) counts the first `cutoff` documents with a gain that falls
    with the logarithm of the rank; MRR is 1 / the rank of the first relevant document; recall is
    the fraction of relevant documents found, and MAP the mean of the precision at each of them.
    These three count the first `top_k` documents.
    """

    per_query: Mapping[str, QueryScores]
    cutoff: int
    top_k: int
    without_judgements: int = 0
    """Queries left out because no document is relevant to them."""

    @property
    def ndcg(self) -> MeanScore:
        return self._mean("ndcg")

    @property
    def mrr(self) -> MeanScore:
        return self._mean("mrr")

    @property
    def recall(self) -> MeanScore:
        return self._mean("recall")

    @property
    def map(self) -> MeanScore:
        return self._mean("map")

    def difference(
        self, other: "RetrievalScores", measure: Literal["ndcg", "mrr", "recall", "map"] = "ndcg"
    ) -> MeanScore:
        """How much better this is than `other`, query by query, and the standard error of it."""
        if self.per_query.keys() != other.per_query.keys():
            raise InputError(
                f"{len(self.per_query)} and {len(other.per_query)} queries differ",
                "compare scores of the same queries",
            )
        changes = [
            getattr(scores, measure) - getattr(other.per_query[query], measure)
            for query, scores in self.per_query.items()
        ]
        return _mean_score(changes)

    def _mean(self, measure: str) -> MeanScore:
        return _mean_score([getattr(scores, measure) for scores in self.per_query.values()])

    def rows(self) -> list[tuple[str, MeanScore]]:
        """The name and the mean of each measure."""
        return [
            (f"nDCG@{self.cutoff}", self.ndcg),
            (f"MRR@{self.top_k}", self.mrr),
            (f"recall@{self.top_k}", self.recall),
            (f"MAP@{self.top_k}", self.map),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "queries": len(self.per_query),
            "without_judgements": self.without_judgements,
            "measures": {name: asdict(mean) for name, mean in self.rows()},
            "per_query": {query: asdict(scores) for query, scores in self.per_query.items()},
        }

    def __str__(self) -> str:
        lines = [f"{name:12}{mean}" for name, mean in self.rows()]
        lines.append(f"over {pluralise(len(self.per_query), 'query')} (mean ± standard error)")
        if self.without_judgements:
            queries = pluralise(self.without_judgements, "query")
            lines[-1] += f", {queries} left out without relevant documents"
        return "\n".join(lines)


@runtime_checkable
class Searchable(Protocol):
    """An index, or anything else that finds documents with ids for many queries at once."""

    def search_many(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Any]]: ...


@checked
def evaluate_retrieval(
    source: Searchable | Rankings,
    queries: str | Path | Iterable[JudgedQuery],
    *,
    cutoff: int = 10,
    top_k: int = 100,
    grades: Grades = "best-last",
) -> RetrievalScores:
    """Score an index on judged queries, or rankings of documents that were made elsewhere.

    Rankings map the id of a query to ids of documents from best to worst, or to their scores, of
    which equal ones are ordered by id, the largest first, as trec_eval does. A query without a
    ranking counts as one that finds nothing. `queries` are `JudgedQuery` objects or a file as in
    `read_queries`, and `grades` the meaning of its numbers.

    >>> queries = [JudgedQuery("q", "lift", {"a": 2, "b": 1})]
    >>> print(evaluate_retrieval({"q": ["b", "c", "a"]}, queries).mrr)
    1.000
    """
    check_int("cutoff", cutoff, minimum=1)
    check_int("top_k", top_k, minimum=1)
    if isinstance(queries, str | Path):
        queries = read_queries(queries, grades=grades)
    listed = list(queries)
    judged = [query for query in listed if any(gain > 0 for gain in query.relevant.values())]
    if not judged:
        raise InputError(
            f"none of {pluralise(len(listed), 'query')} has a relevant document",
            "give each query the ids of documents that answer it",
        )
    depth = max(cutoff, top_k)
    if isinstance(source, Mapping):
        rankings = [_ranking(query.id, source.get(query.id, ()))[:depth] for query in judged]
    elif isinstance(source, Searchable):
        hits = source.search_many([query.text for query in judged], depth)
        rankings = [[hit.id for hit in ranking] for ranking in hits]
    else:
        raise InputError(
            f"cannot rank documents by {kind_of(source)}",
            "give an Index, or a dictionary from query ids to document ids",
        )
    per_query = {}
    for query, ids in zip(judged, rankings, strict=True):
        if query.id in per_query:
            raise InputError(f"two queries have the id {query.id!r}", "give each its own")
        per_query[query.id] = _score(ids, query.relevant, cutoff, top_k)
    return RetrievalScores(
        per_query=per_query,
        cutoff=cutoff,
        top_k=top_k,
        without_judgements=len(listed) - len(judged),
    )


@checked
def read_queries(file: str | Path, *, grades: Grades = "best-last") -> list[JudgedQuery]:
    """The queries of a .jsonl or .parquet file with the fields id, text and relevant.

    `relevant` is a list of document ids, or an object from ids to grades: gains, of which a larger
    one is better, or with `grades="best-first"` ranks of which 1 is the best. Ranks become gains by
    counting from the worst rank in the file, so that 1 to 4 become 4 to 1.
    """
    queries = []
    for row in FileRows((str(file),)):
        relevant = _judgements(row.get("relevant"), row.location)
        queries.append(JudgedQuery(str(row.get("id")), row.text("text"), relevant))
    if not queries:
        raise InputError(f"{file} has no queries", 'write {"id": ..., "text": ..., "relevant": []}')
    if grades == "best-last":
        return queries
    worst = max((grade for query in queries for grade in query.relevant.values()), default=0)
    for query in queries:
        for document, grade in query.relevant.items():
            if grade < 1:
                raise InputError(
                    f"query {query.id} gives document {document} the grade {grade:g}, below 1",
                    "correct it, or use grades best-last, where 0 is not relevant",
                )
    return [
        replace(query, relevant={key: worst + 1 - grade for key, grade in query.relevant.items()})
        for query in queries
    ]


def _judgements(value: Any, location: str) -> dict[str, float]:
    if isinstance(value, list | tuple):
        return {str(document): 1.0 for document in value}
    if not isinstance(value, Mapping):
        raise InputError(
            f"{location}: relevant is {short_repr(value)}",
            'write a list of document ids, or {"document id": grade}',
        )
    for document, grade in value.items():
        if grade is None:
            # Parquet fills absent keys of an object with null.
            continue
        number = isinstance(grade, Real) and not isinstance(grade, bool)
        if not number or not math.isfinite(grade) or grade < 0:
            raise InputError(
                f"{location}: document {document} has the grade {short_repr(grade)}",
                "write a number of at least 0",
            )
    return {str(key): float(grade) for key, grade in value.items() if grade is not None}


def _ranking(query: str, documents: Sequence[str] | Mapping[str, int | float]) -> list[str]:
    if isinstance(documents, Mapping):
        ids = sorted(documents, reverse=True)
        return sorted(ids, key=lambda document: -documents[document])
    if isinstance(documents, str) or len(set(documents)) < len(documents):
        raise InputError(
            f"the ranking of query {query!r} is no list of different documents",
            "list each document once, from best to worst",
        )
    return list(documents)


def _score(
    ranking: Sequence[str], relevant: Mapping[str, int | float], cutoff: int, top_k: int
) -> QueryScores:
    gains = [relevant.get(document, 0) for document in ranking]
    ideal = sorted(relevant.values(), reverse=True)
    # Ranks, from 1, of the relevant documents.
    ranks = [rank for rank, gain in enumerate(gains[:top_k], 1) if gain > 0]
    count = sum(gain > 0 for gain in ideal)
    return QueryScores(
        ndcg=_discounted(gains[:cutoff]) / _discounted(ideal[:cutoff]),
        mrr=1 / ranks[0] if ranks else 0.0,
        recall=len(ranks) / count,
        map=sum(number / rank for number, rank in enumerate(ranks, 1)) / count,
    )


def _discounted(gains: Sequence[int | float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _mean_score(values: Sequence[float]) -> MeanScore:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return MeanScore(fmean(values), error)
