"""Negatives that a search finds, and the scores of a teacher."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads import encode, load
from manyheads.errors import ConfigError, InputError
from manyheads.models.provenance import LateInteractionConfig
from manyheads.tasks import Document, Index, mine_negatives, score_candidates

PAIRS = [
    {"first": "how to cut bread", "second": "a knife cuts bread", "id": 1},
    {"first": "how to cut bread", "second": "tear the bread by hand", "id": 2},
    {"first": "where the cat sleeps", "second": "the cat sleeps on the mat", "id": 3},
    {"first": "what ships carry", "second": "ships carry grain and oil", "id": 4},
    {"first": "when the sun sets", "second": "the sun sets late in June", "id": 5},
]
TEXTS = [row["second"] for row in PAIRS]


@pytest.fixture(scope="module")
def model() -> Any:
    return load("house-bert")


def cosines(model: Any, one: list[str], other: list[str]) -> torch.Tensor:
    first, second = (
        F.normalize(encode(model, each, progress=False), dim=-1) for each in (one, other)
    )
    return first @ second.T


def test_negatives_are_the_closest_texts_that_are_no_answers(model: Any, tmp_path: Path) -> None:
    result = mine_negatives(model, PAIRS, top_k=2, output=tmp_path / "rows.jsonl", progress=False)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert result == [json.loads(line) for line in lines]
    scores = cosines(model, [str(row["first"]) for row in PAIRS], [str(each) for each in TEXTS])
    for row, mined, own in zip(PAIRS, result, scores, strict=True):
        answers = {each["second"] for each in PAIRS if each["first"] == row["first"]}
        ranked = [TEXTS[index] for index in own.argsort(descending=True)]
        assert mined["negatives"] == [text for text in ranked if text not in answers][:2]
        assert {key: mined[key] for key in row} == row
    skipped = mine_negatives(model, PAIRS, top_k=1, skip_first=1, progress=False)
    assert [row["negatives"] for row in skipped] == [row["negatives"][1:] for row in result]


def test_a_margin_keeps_out_what_scores_like_the_answer(model: Any) -> None:
    scores = cosines(model, [str(row["first"]) for row in PAIRS], [str(each) for each in TEXTS])
    margin = 0.02
    result = mine_negatives(model, PAIRS, top_k=5, margin=margin, progress=False)
    for index, row in enumerate(result):
        for text in row["negatives"]:
            assert scores[index, TEXTS.index(text)] <= scores[index, index] - margin + 1e-5
    with pytest.raises(InputError, match="smaller margin"):
        mine_negatives(model, PAIRS, margin=5.0, progress=False)


def test_an_index_and_late_interaction_mine_too(model: Any, tmp_path: Path) -> None:
    documents = [Document(id=str(n), text=str(text)) for n, text in enumerate(TEXTS)]
    index = Index.create(tmp_path / "index", model, documents, kind="dense", progress=False)
    assert mine_negatives(index, PAIRS, top_k=2, progress=False) == mine_negatives(
        model, PAIRS, top_k=2, progress=False
    )
    with pytest.raises(InputError, match="leave out documents"):
        mine_negatives(index, PAIRS, documents=["a"], progress=False)
    late: Any = load("house-bert")
    late.late = LateInteractionConfig()
    rows = mine_negatives(late, PAIRS, top_k=1, progress=False)
    assert [len(row["negatives"]) for row in rows] == [1] * 5
    scored = score_candidates(late, rows, progress=False)
    assert all(score > 1 for row in scored for score in row["scores"])


def test_a_teacher_scores_answers_and_negatives(model: Any) -> None:
    rows = mine_negatives(model, PAIRS, top_k=2, progress=False)
    for row in score_candidates(model, rows, progress=False):
        texts = [row["second"], *row["negatives"]]
        expected = cosines(model, [row["first"]], texts)[0]
        torch.testing.assert_close(torch.tensor(row["scores"]), expected, rtol=1e-4, atol=1e-5)
    by_length = score_candidates(lambda _, texts: [len(each) for each in texts], rows)
    assert by_length[0]["scores"] == [len(each) for each in [TEXTS[0], *rows[0]["negatives"]]]
    with pytest.raises(InputError, match="14 of them finite"):
        score_candidates(lambda _, texts: [float("nan"), *[1.0] * (len(texts) - 1)], rows)
    with pytest.raises(InputError, match="mine_negatives"):
        score_candidates(model, [{**PAIRS[0], "negatives": []}])


def test_rows_that_are_no_pairs_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no field 'second': use one of: first"):
        mine_negatives(model, [{"first": "a"}])
    with pytest.raises(InputError, match="row 0: field 'first' is empty"):
        mine_negatives(model, [{"first": " ", "second": "b"}])
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        mine_negatives(model, PAIRS, top_k=0)
    with pytest.raises(InputError, match=r"is no \.jsonl file"):
        mine_negatives(model, PAIRS, output=tmp_path / "rows.csv")
