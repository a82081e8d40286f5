"""Measures of rankings equal those of ir_measures, and judgements are read as their files mean."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from manyheads.errors import InputError
from manyheads.tasks.search.ranking_measures import (
    JudgedQuery,
    evaluate_retrieval,
    read_queries,
)


def _random_case(seed: int) -> tuple[list[JudgedQuery], dict[str, dict[str, float]]]:
    random = Random(seed)
    documents = [f"d{number}" for number in range(60)]
    queries = [
        JudgedQuery(
            f"q{number}",
            "words",
            {document: random.randint(0, 3) for document in random.sample(documents, 9)}
            | {"d1": 1},
        )
        for number in range(12)
    ]
    # Rounded, so that some scores are equal; the last query finds nothing.
    rankings = {
        query.id: {document: round(random.random(), 1) for document in random.sample(documents, 40)}
        for query in queries[:-1]
    }
    return queries, rankings


@pytest.mark.parametrize("seed", range(3))
def test_measures_equal_ir_measures(seed: int) -> None:
    measures = pytest.importorskip("ir_measures")
    queries, rankings = _random_case(seed)
    scores = evaluate_retrieval(rankings, queries, cutoff=10, top_k=20)
    judgements = {query.id: dict(query.relevant) for query in queries}
    names = {
        "ndcg": measures.nDCG @ 10,
        "mrr": measures.RR,
        "recall": measures.R @ 20,
        "map": measures.AP @ 20,
    }
    # RR has no cutoff there: rankings are cut before.
    cut = {
        query: dict(sorted(sorted(result.items(), reverse=True), key=lambda each: -each[1])[:20])
        for query, result in rankings.items()
    }
    for name, measure in names.items():
        ours = getattr(scores, name)
        run = cut if name == "mrr" else rankings
        peer = measures.calc_aggregate([measure], judgements, run)[measure]
        assert ours.mean == pytest.approx(peer, abs=1e-9), name


def test_gains_and_ranks_by_hand() -> None:
    query = JudgedQuery("q", "", {"a": 2, "b": 1, "c": 0})
    scores = evaluate_retrieval({"q": ["c", "b", "x", "a"]}, [query])
    ideal = 2 + 1 / math.log2(3)
    assert scores.ndcg.mean == pytest.approx((1 / math.log2(3) + 2 / math.log2(5)) / ideal)
    assert scores.mrr.mean == 0.5
    assert scores.map.mean == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert scores.recall.mean == 1
    assert math.isnan(scores.ndcg.standard_error)


def test_standard_errors_and_paired_differences() -> None:
    queries = [JudgedQuery(name, "", {"a": 1}) for name in ("1", "2", "3")]
    good = evaluate_retrieval({name: ["a"] for name in "123"}, queries)
    bad = evaluate_retrieval({"1": ["b", "a"], "2": ["b", "a"]}, queries)
    assert bad.mrr.mean == pytest.approx(1 / 3)
    # Values 1/2, 1/2 and 0: the deviation of the sample over the root of three.
    assert bad.mrr.standard_error == pytest.approx(math.sqrt(1 / 12) / math.sqrt(3))
    assert good.difference(bad, "mrr").mean == pytest.approx(2 / 3)
    assert good.difference(good).standard_error == 0
    with pytest.raises(InputError, match="same queries"):
        good.difference(evaluate_retrieval({}, queries[:1]))


def test_an_index_searches_once_for_all_queries() -> None:
    @dataclass
    class Found:
        id: str

    class Shelf:
        def __init__(self) -> None:
            self.asked: list[Sequence[str]] = []

        def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Found]]:
            self.asked.append(queries)
            return [[Found("b"), Found("a")][:top_k] for _ in queries]

    shelf = Shelf()
    queries = [JudgedQuery("1", "one", {"a": 1}), JudgedQuery("2", "two", {})]
    scores = evaluate_retrieval(shelf, queries)
    assert shelf.asked == [["one"]]
    assert scores.mrr.mean == 0.5
    assert scores.without_judgements == 1


def _file(folder: Path, *rows: object) -> Path:
    file = folder / "queries.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_ranks_become_gains_by_counting_from_the_worst(tmp_path: Path) -> None:
    file = _file(
        tmp_path,
        {"id": 1, "text": "lift", "relevant": {"12": 1, "15": 4}},
        {"id": 2, "text": "drag", "relevant": {"7": 2}},
    )
    first, second = read_queries(file, grades="best-first")
    assert first.relevant == {"12": 4, "15": 1}
    assert second.relevant == {"7": 3}
    assert read_queries(file)[0].relevant == {"12": 1, "15": 4}


def test_a_list_of_ids_means_equal_gains(tmp_path: Path) -> None:
    [query] = read_queries(_file(tmp_path, {"id": "q", "text": "lift", "relevant": [3, "b"]}))
    assert query.relevant == {"3": 1, "b": 1}


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ({"id": 1, "text": "lift", "relevant": "12"}, "12"),
        ({"id": 1, "text": "lift", "relevant": {"12": -1}}, "-1"),
        ({"id": 1, "text": "lift", "relevant": {"12": "high"}}, "high"),
        ({"id": 1, "text": "lift"}, "relevant"),
        ({"id": 1, "text": 5, "relevant": []}, "text"),
    ],
)
def test_wrong_judgements_are_named(tmp_path: Path, row: object, value: str) -> None:
    with pytest.raises(InputError, match=value):
        read_queries(_file(tmp_path, row))


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    query = JudgedQuery("q", "", {"a": 1})
    with pytest.raises(InputError, match="relevant"):
        evaluate_retrieval({}, [JudgedQuery("q", "", {})])
    with pytest.raises(InputError, match="'q'"):
        evaluate_retrieval({}, [query, query])
    with pytest.raises(InputError, match="once"):
        evaluate_retrieval({"q": ["a", "a"]}, [query])
    with pytest.raises(InputError, match="below 1"):
        read_queries(
            _file(tmp_path, {"id": 1, "text": "x", "relevant": {"a": 0}}), grades="best-first"
        )
