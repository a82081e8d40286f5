"""manyheads filter and the guard of manyheads generate, as a person at a terminal meets them."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from manyheads import save, with_classes
from manyheads.cli.main import main
from tests.encoding.tiny import small

ROWS = [{"text": "the cat sat " * (1 + index % 4), "n": index} for index in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(with_classes(small(), ("fine", "toxic")), tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "oops\n")
    return tmp_path


def filter_with(folder: Path, *words: str) -> int:
    corpus, model, out = (str(folder / name) for name in ("a.jsonl", "model", "out"))
    return main(["filter", corpus, "--model", model, "-o", out, *words])


def test_a_filter_prints_what_it_kept_and_what_it_cost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--keep", "score >= 0 and n < 5", "--price-per-hour", "3.6")
    assert filter_with(folder, *words) == 0
    said = capsys.readouterr().out
    for part in ("5 of 21 documents kept", "tokens/s", "per million tokens", "1 undecodable"):
        assert part in said
    assert pq.read_table(folder / "out").column("n").to_pylist() == [0, 1, 2, 3, 4]
    # The same command again has nothing left to do.
    assert filter_with(folder, *words) == 0
    assert "5 of 21" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--keep", "score = 3"], ["--keep 'score = 3'", "character 7", "use =="]),
        (["--keep", "m < 3"], ["--keep 'm < 3'", "no column 'm'"]),
        (["--keep", "n < 3", "--text-column", "body"], ["'body'", "--text-column"]),
        (["--keep", "n < 3", "--workers", "2"], ["--workers", "--engine ray"]),
        (["--keep", "n < 3", "--block-rows", "0"], ["--block-rows must be at least 1, got 0"]),
    ],
)
def test_wrong_use_names_the_flag(
    folder: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert filter_with(folder, *words) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said


def test_a_guard_stops_and_marks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guarded = [
        "generate",
        "--text",
        "Once",
        "--max-new-tokens",
        "8",
        "--guard",
        str(folder / "model"),
    ]
    assert main([*guarded, "--guard-threshold", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "\n"
    assert "guard: stopped before sentence 1 (toxic" in said.err
    assert "of the time" in said.err
    out = folder / "out.json"
    marked = [*guarded, "--refuse", "tokens > 0", "--guard-action", "mark", "--json", str(out)]
    assert main(marked) == 0
    [row] = json.loads(out.read_text())
    assert row["finish_reason"] == "length"
    assert [each["sentence"] for each in row["guard"]["refused"]] == [1]
    assert main([*guarded, "--refuse", "toxc"]) == 2
    assert "--refuse 'toxc'" in capsys.readouterr().err
    assert main(["generate", "--text", "a", "--refuse", "toxic"]) == 2
