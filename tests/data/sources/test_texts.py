"""Texts come whole and in order, in passages, and memory does not grow with the corpus."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.sources import texts
from manyheads.data.sources.rows import FileRows, HubRows, row_source
from manyheads.data.sources.texts import (
    InMemoryTexts,
    RowTexts,
    TextFiles,
    TextSource,
    _cut,
    text_source,
)
from manyheads.errors import InputError
from tests.messages import refuses


def documents(source: TextSource) -> list[str]:
    result, parts = [], []
    for passage in source.read():
        parts.append(passage.text)
        if passage.ends:
            result.append("".join(parts))
            parts = []
    assert not parts
    return result


LETTERS = st.text(alphabet="ab \n;", max_size=60)


@given(chunks=st.lists(LETTERS, max_size=8), separator=st.sampled_from([None, ";", "\n\n", "a;"]))
def test_documents_are_those_of_a_plain_split(chunks: list[str], separator: str | None) -> None:
    kept, texts.PASSAGE = texts.PASSAGE, 8
    try:
        passages = list(_cut(chunks, separator))
    finally:
        texts.PASSAGE = kept
    whole = "".join(chunks)
    expected = whole.split(separator) if separator else [whole]
    joined = "".join(text + ("\0" if ends else "") for text, ends in passages)
    result = joined.split("\0")[:-1]
    assert [each for each in result if each.strip()] == [each for each in expected if each.strip()]
    assert all(len(text) <= 16 for text, _ in passages)


def test_a_file_is_a_document_and_a_separator_makes_more(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\n\n\n\n \n\nthree", newline="")
    (tmp_path / "b.txt").write_text(" \n")
    assert documents(TextFiles(tmp_path)) == ["one\n\ntwo\r\n\n\n\n \n\nthree"]
    assert documents(TextFiles(tmp_path, separator="\n\n")) == ["one", "two\r", "three"]


def test_a_long_document_is_cut_at_lines_and_comes_back_whole(tmp_path: Path) -> None:
    text = "".join(f"line {number} über alles 汉字\n" for number in range(20_000))
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    source = TextFiles(str(tmp_path / "*.gz"))
    passages = list(source.read())
    assert "".join(passage.text for passage in passages) == text
    assert [passage.ends for passage in passages] == [False] * (len(passages) - 1) + [True]
    assert all(passage.text.endswith("\n") for passage in passages)
    assert source.expected_bytes() is None


def test_rows_are_documents_wherever_they_come_from(tmp_path: Path) -> None:
    rows = [{"body": "one"}, {"body": "two " * 50_000}, {"body": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = ["one", "two " * 50_000]
    assert documents(TextFiles(tmp_path / "a.jsonl", text_column="body")) == expected
    assert documents(RowTexts(FileRows(tmp_path / "a.jsonl"), text_column="body")) == expected
    (tmp_path / "a.jsonl").rename(tmp_path / "a.data")
    assert documents(TextFiles(tmp_path / "a.data", text_column="body", format="jsonl")) == expected
    assert documents(InMemoryTexts(tuple(row["body"] for row in rows))) == expected


def test_reading_may_begin_at_any_file(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    result = [(passage.text, passage.file) for passage in TextFiles(tmp_path).read(1)]
    assert result == [("b", 1), ("c", 2)]


def test_bytes_that_are_no_utf8_are_named_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode() * 70_000 + b"\xff and more")
    with refuses(
        InputError,
        f"{tmp_path}/a.txt is not UTF-8: invalid start byte at byte 140000: "
        'convert it, or read it with errors = "replace".',
    ):
        list(TextFiles(tmp_path).read())
    assert documents(TextFiles(tmp_path, errors="replace"))[0].endswith("é\ufffd and more")
    with refuses(InputError, r"separator='' is empty or too long: use '\n\n', or None."):
        TextFiles(tmp_path, separator="")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_memory_does_not_grow_with_the_corpus(name: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "some words of a text " * 20}) + "\n"

    def peak(lines: int) -> int:
        open_ = gzip.open if name.endswith(".gz") else open
        with open_(tmp_path / name, "wt") as file:
            for _ in range(lines):
                file.write(line)
        source = TextFiles(tmp_path / name)
        tracemalloc.start()
        for _ in source.read():
            pass
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    # 0.9 and 3.5 MB of text; some kilobytes of the rest of the process may be counted too.
    small, large = peak(2_000), peak(8_000)
    assert large < 1.2 * small + 100_000
    assert large < 3_000_000


def test_a_small_text_comes_in_passages_that_end_with_lines() -> None:
    text = "a rose is a rose is a rose.\n" * 700
    passages = list(_cut([text], None))
    assert "".join(passage for passage, _ in passages) == text
    assert len(passages) == 5
    assert all(passage.endswith("\n") for passage, _ in passages)
    assert [ends for _, ends in passages] == [False] * 4 + [True]


def test_a_name_of_the_hub_is_a_dataset_and_all_else_are_files() -> None:
    assert row_source(["a.jsonl", "b.jsonl"]) == FileRows(("a.jsonl", "b.jsonl"))
    request = HubRows("org/name", subset="en", split="dev", revision="v1")
    assert row_source(["hub:org/name?subset=en&split=dev&revision=v1"]) == request
    assert text_source(["hub:org/name"], text_column="body") == RowTexts(
        HubRows("org/name"), "body"
    )
    result = text_source(["a.txt"], separator=";", errors="replace")
    assert result == TextFiles(("a.txt",), separator=";", errors="replace")


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["hub:a/b", "c.txt"], "hub:a/b, c.txt mix a dataset of the hub with other sources: "),
        (
            ["hub:a/b?part=train"],
            "hub:a/b?part=train has an unknown option part: write hub:org/name, or ",
        ),
        (["hub:?split=train"], "hub:?split=train lacks a dataset: write hub:org/name, or "),
    ],
)
def test_a_wrong_name_of_a_dataset_is_refused(paths: list[str], problem: str) -> None:
    with pytest.raises(InputError) as error:
        row_source(paths)
    assert str(error.value).startswith(problem)


def test_a_missing_source_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with refuses(InputError, "no.txt does not exist: check the path."):
        text_source(["no.txt"]).check()
    with refuses(InputError, "no.jsonl does not exist: check the path."):
        row_source(["no.jsonl"]).check()
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    source = text_source([f"hub:{tmp_path}?split=train"])
    source.check()
    assert [passage.text for passage in source.read()] == ["one"]
