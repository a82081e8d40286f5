"""Labelled texts, pairs and tags are read from named fields, and errors name the line."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.labelled import LabelledTexts, TaggedTexts, TextPairs
from manyheads.data.sources.rows import FileRows
from manyheads.errors import InputError
from tests.messages import refuses


def rows(folder: Path, *values: dict[str, Any]) -> FileRows:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, values)))
    return FileRows(folder / "a.jsonl")


def test_fields_are_chosen_by_name(tmp_path: Path) -> None:
    found = rows(tmp_path, {"text": "good", "label": 1, "de": "gut", "tokens": ["a"], "tags": [0]})
    location = f"{tmp_path}/a.jsonl, line 1"
    assert list(LabelledTexts(found)) == [("good", 1, location)]
    assert list(LabelledTexts(found, text="de", label="text")) == [("gut", "good", location)]
    assert list(TextPairs(found, first="text", second="de")) == [("good", "gut", location)]
    assert list(TaggedTexts(found)) == [(("a",), (0,), location)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "has no field 'label': use one of: text"),
        (
            {"text": "a", "label": 0.5},
            ": field 'label' is 0.5: give a name, or a number of 0 or more",
        ),
        (
            {"text": "a", "label": -1},
            ": field 'label' is -1: give a name, or a number of 0 or more",
        ),
        ({"text": 5, "label": 1}, ": field 'text' is a int: give a text"),
    ],
)
def test_wrong_labels_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    gap = "" if message.startswith(":") else " "
    with refuses(InputError, f"{tmp_path}/a.jsonl, line 1{gap}{message}."):
        list(LabelledTexts(rows(tmp_path, row)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": []}, " has 1 tokens and 0 tags: give one tag a word"),
        ({"tokens": "a", "tags": [1]}, ": field 'tokens' is a str: give a list"),
        ({"tokens": [1], "tags": [1]}, ": tokens are no words: give a list of texts"),
    ],
)
def test_wrong_tags_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with refuses(InputError, f"{tmp_path}/a.jsonl, line 1{message}."):
        list(TaggedTexts(rows(tmp_path, row)))
