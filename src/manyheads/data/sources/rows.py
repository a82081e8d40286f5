"""Rows with named fields, of .jsonl and .parquet files or of a dataset of the hub."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import parse_qsl

from manyheads.data.sources.files import Paths, decompress, find_files, open_file, suffix_of
from manyheads.errors import InputError, import_package
from manyheads.formatting import kind_of

HUB = "hub:"
FORM = f"write {HUB}org/name, or {HUB}org/name?subset=en&split=train&revision=main"
# Rows of a Parquet file converted to Python values at a time.
ROWS_AT_A_TIME = 256


class Row(NamedTuple):
    """Fields by name, and the location of the row for error messages.

    `fraction` of its file had been read when the row was.
    """

    fields: Mapping[str, Any]
    file: str
    number: int
    unit: str = "line"
    fraction: float = 0.0

    @property
    def location(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"

    def get(self, field: str) -> Any:
        if field not in self.fields:
            names = ", ".join(map(str, self.fields)) or "none"
            raise InputError(f"{self.location} has no field {field!r}", f"use one of: {names}")
        return self.fields[field]

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str):
            raise InputError(
                f"{self.location}: field {field!r} is {kind_of(value)}, not a string",
                "use a field of texts",
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self.location}: field {field!r} has a lone surrogate at character {error.start}",
                "write the file again, for example with errors='replace'",
            ) from None
        return value


@runtime_checkable
class RowSource(Protocol):
    """A source of rows; each iteration starts from the beginning."""

    def __iter__(self) -> Iterator[Row]: ...

    def check(self) -> None:
        """Raise if the source is known to be missing, without reading it."""
        ...


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of .jsonl and .parquet files, compressed or not, of folders and of globs."""

    paths: Paths

    def __iter__(self) -> Iterator[Row]:
        for file in self._files():
            yield from ROW_FORMATS[suffix_of(file)](file)

    def check(self) -> None:
        self._files()

    def _files(self) -> list[Path]:
        return find_files(self.paths, ROW_FORMATS.keys())


@dataclass(frozen=True, slots=True)
class HubRows:
    """The rows of a dataset of the Hugging Face hub, streamed without storing it."""

    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def check(self) -> None:
        self._package()

    def _package(self) -> Any:
        return import_package("datasets", f"the dataset {self.name}", "datasets")

    def __iter__(self) -> Iterator[Row]:
        datasets = self._package()
        try:
            rows = datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self.revision, streaming=True
            )
            for number, fields in enumerate(rows, 1):
                yield Row(fields, self.name, number, "row")
        except (OSError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(
                f"cannot load {self.name}, split {self.split!r}, from the hub "
                f"({type(error).__name__}: {first})",
                "check name, subset and split, and the connection to the hub",
            ) from error


def row_source(paths: Sequence[str]) -> RowSource:
    """The rows of .jsonl and .parquet files, or of one dataset of the Hugging Face hub."""
    return hub_rows(paths) or FileRows(tuple(paths))


def hub_rows(paths: Sequence[str]) -> HubRows | None:
    if not any(path.startswith(HUB) for path in paths):
        return None
    if len(paths) > 1:
        raise InputError(
            f"{', '.join(paths)} mix a dataset of the hub with other sources", "give it alone"
        )
    name, _, rest = paths[0].removeprefix(HUB).partition("?")
    options = dict(parse_qsl(rest, keep_blank_values=True))
    allowed = [field.name for field in fields(HubRows) if field.name != "name"]
    wrong = [key for key in options if key not in allowed]
    if not name or wrong:
        problem = f"has an unknown option {wrong[0]}" if wrong else "lacks a dataset"
        raise InputError(f"{paths[0]} {problem}", FORM)
    return HubRows(name, **options)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1."""
    with open_file(path) as file:
        yield from _numbered(file)


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, line


def json_row(line: bytes, path: Path, number: int) -> Row:
    """The row that a line of JSON is."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}, line {number} is not valid JSON ({error})", "correct or remove it"
        ) from None
    if not isinstance(fields, dict):
        raise InputError(
            f"{path}, line {number} is not an object", 'write {"text": "..."}, one per line'
        )
    return Row(fields, str(path), number)


def _json_rows(path: Path) -> Iterator[Row]:
    size = max(1, path.stat().st_size)
    with path.open("rb") as stored, decompress(path, stored) as file:
        for number, line in _numbered(file):
            yield json_row(line, path, number)._replace(fraction=stored.tell() / size)


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `ParquetFile` that is not held in memory, and errors that name the file."""
    arrow = import_package("pyarrow", str(path), "pyarrow")
    try:
        with import_module("pyarrow.parquet").ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path} cannot be read as Parquet ({str(error)[:100]})", "download it again"
        ) from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with open_parquet(path) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME))
        for number, fields in enumerate(chain.from_iterable(batches), 1):
            yield Row(fields, str(path), number, "row", number / file.metadata.num_rows)


ROW_FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".parquet": _parquet_rows,
}
