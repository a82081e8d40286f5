"""manyheads search and manyheads answer as a person at a terminal meets them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

import manyheads
from manyheads.cli.main import main
from manyheads.decoding.generation_config import Generation
from manyheads.tasks.search.documents import Document

pytest.importorskip("lancedb")

DOCUMENTS = [
    Document("rain", "It rained all day and the streets were wet.", "Weather", {"year": 1990}),
    Document("bread", "She baked bread in the old oven.", "Kitchen", {"year": 2001}),
    Document("train", "The train to the city leaves at noon.", "", {"year": 2010}),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    from manyheads.tasks.search.index import Index

    path = tmp_path_factory.mktemp("search") / "notes.index"
    Index.create(path, manyheads.load("house-bert"), DOCUMENTS, kind="hybrid", progress=False)
    return str(path)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_page_shows_titles_and_passages(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", index, "bread from an oven", "--top-k", "2"]) == 0
    page = capsys.readouterr().out
    assert "1. Kitchen" in page
    assert "She baked bread in the old oven." in page
    assert "2. " in page
    assert "3. " not in page


def test_json_has_one_line_per_query_of_a_pipe(
    index: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("wet streets\n\nold oven\n"))
    assert main(["search", index, "--json", "-", "--top-k", "1"]) == 0
    first, second = _lines(capsys)
    assert first["query"] == "wet streets"
    assert first["hits"][0]["id"] == "rain"
    assert second["hits"][0]["metadata"] == {"year": 2001}
    result = second["hits"][0]
    assert DOCUMENTS[1].text[result["start"] : result["end"]] == result["text"]


def test_a_json_file_lists_what_the_pages_show(
    index: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.stdin", io.StringIO("wet streets\nold oven\n"))
    assert main(["search", index, "--json", str(out)]) == 0
    assert "1. Kitchen" in capsys.readouterr().out
    assert [each["query"] for each in json.loads(out.read_text())] == ["wet streets", "old oven"]
    arguments = ["answer", index, "What did she bake?", "--reader", "house-gpt"]
    assert main([*arguments, "--max-new-tokens", "4", "--json", str(out)]) == 0
    page = capsys.readouterr().out
    [answered] = json.loads(out.read_text())
    assert answered["answer"] in page
    assert answered["question"] == "What did she bake?"
    assert main(["search", index, "x", "--json", "found.txt"]) == 2
    assert ".json" in capsys.readouterr().err


def test_conditions_and_likeness(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", index, "wet streets", "--where", "year > 2000", "--json", "-"]) == 0
    [result] = _lines(capsys)
    assert {hit["id"] for hit in result["hits"]} == {"bread", "train"}
    assert main(["search", index, "--like", "rain", "--json", "-"]) == 0
    [result] = _lines(capsys)
    assert {hit["id"] for hit in result["hits"]} == {"bread", "train"}


def test_judged_queries_score_the_index(
    index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "queries.jsonl"
    rows = [
        {"id": 1, "text": "wet streets", "relevant": {"rain": 1, "train": 2}},
        {"id": 2, "text": "bread in an oven", "relevant": ["bread"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["search", index, "--evaluate", str(file), "--grades", "best-first"]) == 0
    page = capsys.readouterr().out
    for name in ("nDCG@10", "MRR@100", "recall@100", "MAP@100", "2 queries"):
        assert name in page
    assert main(["search", index, "--evaluate", str(file), "--json", "-"]) == 0
    [scores] = _lines(capsys)
    assert scores["measures"]["recall@100"]["mean"] == 1
    out = tmp_path / "scores.json"
    assert main(["search", index, "--evaluate", str(file), "--json", str(out)]) == 0
    assert "nDCG@10" in capsys.readouterr().out
    assert json.loads(out.read_text()) == scores


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["  "], "QUERY"),
        (["x", "--like", "rain"], "--like"),
        (["--like", "nothing"], "nothing"),
        (["x", "--top-k", "0"], "--top-k"),
        (["x", "--where", "color = 'red'"], "color"),
        (["--evaluate", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_use_is_named(
    index: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", index, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_index_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["search", str(tmp_path / "none"), "x"]) == 2
    assert "none" in capsys.readouterr().err


def test_an_answer_has_numbered_sources(
    index: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["answer", index, "What did she bake?", "--reader", "house-gpt"]
    arguments += ["--top-k", "2", "--max-new-tokens", "4"]
    for text, citation in (
        ("She baked bread.", "She baked bread [1].\n\n   [1] Kitchen"),
        ("She baked stones.", "She baked stones.\n\n   No passage supports this answer."),
    ):
        generation = Generation(text=text, ids=(), finish_reason="eos")
        with monkeypatch.context() as patch:
            patch.setattr(
                "manyheads.tasks.search.answering.generate",
                lambda *_, generation=generation, **__: [generation],
            )
            assert main(arguments) == 0
        page = capsys.readouterr().out
        assert citation in page
        assert "[2] " not in page
    assert main([*arguments, "--json", "-"]) == 0
    [result] = _lines(capsys)
    assert result["question"] == "What did she bake?"
    assert [source["number"] for source in result["sources"]] == [1, 2]
    assert result["sources"][0]["id"] == "bread"


def test_a_reader_is_needed(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["answer", index, "What?"]) == 2
    assert "--reader" in capsys.readouterr().err
    assert main(["answer", index, "What?", "--reader", "house-bert"]) == 2
    assert "decoder" in capsys.readouterr().err


def test_matches_are_explained_and_drawn(
    index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "why.png"
    options = ["--heads-by", "gradient", "--top-k", "1"]
    assert main(["search", index, "old oven", "--picture", str(picture), *options]) == 0
    page = capsys.readouterr().out
    assert "1. Kitchen" in page
    assert "She baked bread in the old oven." in page
    for part in ("dense match", "document:", "query:", "heads:", "oven"):
        assert part in page
    assert picture.stat().st_size > 10_000
    assert main(["search", index, "old oven", "--explain", "--json", "-", *options]) == 0
    [result] = _lines(capsys)
    why = result["hits"][0]["explanation"]
    text = why["document"]["text"]
    assert text.startswith("Kitchen\n")
    assert all(
        text[word["start"] : word["end"]] == word["text"] for word in why["document"]["words"]
    )
    assert main(["search", index, "--like", "rain", "--explain"]) == 2
    assert main(["search", index, "oven", "--picture", str(tmp_path / "why.gif")]) == 2
    assert ".png" in capsys.readouterr().err
