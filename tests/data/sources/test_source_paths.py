"""Names say where data come from."""

import json
from pathlib import Path

import pytest

from manyheads.data.sources.rows import FileRows, HubRows, row_source
from manyheads.data.sources.texts import RowTexts, TextFiles, text_source
from manyheads.errors import InputError
from tests.messages import refuses


def test_a_name_of_the_hub_is_a_dataset_and_all_else_are_files() -> None:
    assert row_source(["a.jsonl", "b.jsonl"]) == FileRows(("a.jsonl", "b.jsonl"))
    asked = HubRows("org/name", subset="en", split="dev", revision="v1")
    assert row_source(["hub:org/name?subset=en&split=dev&revision=v1"]) == asked
    assert text_source(["hub:org/name"], field="body") == RowTexts(HubRows("org/name"), "body")
    found = text_source(["a.txt"], separator=";", errors="replace")
    assert found == TextFiles(("a.txt",), separator=";", errors="replace")


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["hub:a/b", "c.txt"], "hub:a/b, c.txt are several sources with one of the hub: "),
        (["hub:a/b?part=train"], "hub:a/b?part=train does not know part: write hub:org/name, or "),
        (["hub:?split=train"], "hub:?split=train names no dataset: write hub:org/name, or "),
    ],
)
def test_a_name_that_cannot_be_read_is_told(paths: list[str], problem: str) -> None:
    with pytest.raises(InputError) as error:
        row_source(paths)
    assert str(error.value).startswith(problem)


def test_what_is_not_there_is_known_before_it_is_read(tmp_path: Path) -> None:
    with refuses(InputError, "there is no file no.txt: check the name."):
        text_source(["no.txt"]).check()
    with refuses(InputError, "there is no file no.jsonl: check the name."):
        row_source(["no.jsonl"]).check()
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    source = text_source([f"hub:{tmp_path}?split=train"])
    source.check()
    assert [passage.text for passage in source.read()] == ["one"]
