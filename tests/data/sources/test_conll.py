"""CoNLL files: words, tags and sentences, and the line of an error."""

from pathlib import Path

import pytest

from manyheads.data.labeled import TaggedTexts, tagged_examples
from manyheads.data.sources.conll import ConllRows, tagged_rows
from manyheads.errors import InputError
from tests.data.tiny import tokenizer
from tests.messages import refuses


def read(tmp_path: Path, content: str) -> list[tuple[list[str], list[str]]]:
    file = tmp_path / "a.conll"
    file.write_text(content, encoding="utf-8")
    return [(row.get("tokens"), row.get("tags")) for row in ConllRows(file)]


@pytest.mark.parametrize(
    "content",
    [
        "New\tB-x\nYork\tI-x\n\t\n#tag\tO\n",
        "-DOCSTART- -X- O O\n\nNew NNP B-NP B-x\nYork NNP I-NP I-x\n\n\n#tag NN O O",
        "\ufeff# id 7\tdomain=dev\nNew _ _ B-x\r\nYork _ _ I-x\r\n\r\n# id 8\n#tag _ _ O\r\n",
    ],
)
def test_sentences_are_read_in_all_layouts(content: str, tmp_path: Path) -> None:
    assert read(tmp_path, content) == [(["New", "York"], ["B-x", "I-x"]), (["#tag"], ["O"])]


def test_a_number_sign_is_a_word(tmp_path: Path) -> None:
    assert read(tmp_path, "the O\n# O\n1 O\n") == [(["the", "#", "1"], ["O", "O", "O"])]


def test_errors_name_the_line(tmp_path: Path) -> None:
    with refuses(InputError, "a.conll, line 2", "'York'", "tag last"):
        read(tmp_path, "New\tB-x\nYork\n")
    (tmp_path / "b.conll").write_bytes(b"caf\xe9\tO\n")
    with refuses(InputError, "b.conll, line 1", "UTF-8", "convert"):
        list(ConllRows(tmp_path / "b.conll"))
    with refuses(InputError, "mix CoNLL files", "one format"):
        tagged_rows(("a.conll", "b.jsonl"))


def test_schemes_are_converted_and_rare_tags_become_classes(tmp_path: Path) -> None:
    file = tmp_path / "a.conll"
    file.write_text("the\tO\ncat\tB-x\nmat\tI-x\n\non\tB-y\n")
    source = TaggedTexts(ConllRows(file), scheme="BILOU")
    assert [row.tags for row in source] == [("O", "B-x", "L-x"), ("U-y",)]
    pieces = tokenizer("wordpiece")
    assert tagged_examples(source, pieces).names == tuple(
        sorted(["O", *(f"{prefix}-{kind}" for prefix in "BILU" for kind in "xy")])
    )
    assert tagged_examples(TaggedTexts(ConllRows(file)), pieces).names == (
        "B-x",
        "B-y",
        "I-x",
        "I-y",
        "O",
    )
