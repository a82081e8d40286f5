"""Rows of files and of the hub, and errors that name the line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyheads.data.sources.rows import FileRows, HubRows
from manyheads.errors import InputError, MissingPackageError
from tests.messages import refuses


def lines(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


def test_json_lines_are_rows_and_blank_ones_are_not(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", '{"text": "one"}', "", '{"text": "two", "label": 3}')
    result = list(FileRows(file))
    assert [(row.text("text"), row.number) for row in result] == [("one", 1), ("two", 3)]
    assert result[1].get("label") == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"', "is not valid JSON (Expecting ',' delimiter: "),
        ("[1]", "is not an object"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, problem: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", "{}", line)
    with pytest.raises(InputError) as refused:
        list(FileRows(file))
    assert refused.value.problem.startswith(f"{file}, line 2 {problem}")


def test_bytes_that_are_no_utf8_are_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 2 is not valid JSON \('utf-8' codec"):
        list(FileRows(tmp_path / "a.jsonl"))


def test_missing_fields_and_fields_without_text_are_named(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", '{"body": 3, "half": "\\ud800"}')
    (row,) = FileRows((file,))
    with refuses(InputError, f"{file}, line 1 has no field 'text': use one of: body, half."):
        row.text("text")
    with refuses(
        InputError, f"{file}, line 1: field 'body' is an int, not a string: use a field of texts."
    ):
        row.text("body")
    with refuses(
        InputError,
        f"{file}, line 1: field 'half' has a lone surrogate at character 0: "
        "write the file again, for example with errors='replace'.",
    ):
        row.text("half")


def test_parquet_is_read_row_by_row(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number}" for number in range(1000)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=300)
    result = list(FileRows(tmp_path / "a.parquet"))
    assert [row.text("text") for row in result] == texts
    assert result[-1].location == f"{tmp_path}/a.parquet, row 1000"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(InputError, match=r"b\.parquet cannot be read as Parquet"):
        list(FileRows(tmp_path / "b.parquet"))


def test_extras_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses(
        MissingPackageError,
        f"{tmp_path}/a.parquet needs the package pyarrow: run pip install pyarrow.",
    ):
        list(FileRows(tmp_path / "a.parquet"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refuses(
        MissingPackageError,
        "the dataset org/name needs the package datasets: run pip install datasets.",
    ):
        list(HubRows("org/name"))


def test_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    request: dict[str, Any] = {}

    def load_dataset(name: str, subset: str | None, **options: Any) -> Any:
        request.update(options, name=name, subset=subset)
        if options["split"] == "train":
            return iter([{"text": "one"}, {"text": "two"}])
        raise ValueError("Bad split\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [row.text("text") for row in HubRows("org/name", subset="en")] == ["one", "two"]
    assert (request["streaming"], request["subset"]) == (True, "en")
    with refuses(
        InputError,
        "cannot load org/name, split 'dev', from the hub (ValueError: Bad split): "
        "check name, subset and split, and the connection to the hub.",
    ):
        list(HubRows("org/name", split="dev"))


def test_a_real_dataset_can_be_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [json.dumps({"text": f"text {number}"}) for number in range(5)]
    lines(tmp_path / "train.jsonl", *rows)
    result = [row.text("text") for row in HubRows(str(tmp_path))]
    assert result == [f"text {number}" for number in range(5)]
