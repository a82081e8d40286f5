"""The documents of a corpus of any size, in blocks that are the same at every reading."""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from manyheads.data.sources import files, rows
from manyheads.errors import ArgumentError, InputError

ROWS, PLAIN, PARQUET = (".jsonl", ".ndjson"), (".txt", ".text", ".md"), (".parquet",)
# Files that are read one after another belong together up to this size.
GROUP_BYTES = 2**26
# A block ends with the document that reaches this many characters.
BLOCK_CHARACTERS = 2**22
# Bytes of a plain text read at a time.
READ_BYTES = 2**20


class Problem(NamedTuple):
    """Why a row cannot be read; or a file, which ends here because it is broken."""

    reason: str
    ends_file: bool = False


class Layout(NamedTuple):
    """How documents are found in files."""

    text_column: str = "text"
    separator: str | None = None
    block_rows: int = 1024


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Consecutive files of one format, read by one reader."""

    files: tuple[str, ...]
    bytes: int


@dataclass(slots=True)
class CorpusBlock:
    """Consecutive rows, and the text of each; rows that cannot be read are `problems`.

    `rows` are dicts, or a table of Arrow where they come from Parquet. `consumed` counts the rows
    and the problems of the group up to the end of this block, and `fraction` says roughly how much
    of the group's bytes that is. A text is None where the column is null.
    """

    rows: Any
    texts: list[str | None] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: int = 0
    fraction: float = 0.0

    @property
    def names(self) -> list[str]:
        """The columns that any of the rows has."""
        if isinstance(self.rows, list):
            return list(dict.fromkeys(name for row in self.rows for name in row))
        return list(self.rows.column_names)

    def has_column(self, path: str) -> bool:
        return path in self.names or path.partition(".")[0] in self.names

    def column(self, path: str) -> list[Any]:
        """The values of a column, or of a field in nested ones; None where there is none."""
        if isinstance(self.rows, list):
            return [_value(row, path) for row in self.rows]
        first = path if path in self.rows.column_names else path.partition(".")[0]
        if first not in self.rows.column_names:
            return [None] * len(self.texts)
        return [_value({first: value}, path) for value in self.rows.column(first).to_pylist()]


def _value(row: Any, path: str) -> Any:
    if path in row:
        return row[path]
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def plan(paths: files.Paths) -> list[FileGroup]:
    """The files of a corpus in order, small ones of one format together."""
    groups: list[FileGroup] = []
    for file in files.find_files(paths, (*ROWS, *PARQUET, *PLAIN)):
        if file.suffix.lower() == ".zst":
            # Names a missing package before the first document is read.
            with files.open_file(file):
                pass
        size, last = file.stat().st_size, groups[-1] if groups else None
        if last and last.bytes + size <= GROUP_BYTES and _format(last.files[0]) == _format(file):
            groups[-1] = FileGroup((*last.files, str(file)), last.bytes + size)
        else:
            groups.append(FileGroup((str(file),), size))
    return groups


def _format(file: Path | str) -> str:
    suffix = files.suffix_of(Path(file))
    return "rows" if suffix in ROWS else "parquet" if suffix in PARQUET else "plain"


def read_blocks(group: FileGroup, layout: Layout, skip: int = 0) -> Iterator[CorpusBlock]:
    """The blocks of a group behind the first `skip` rows, which were read before.

    A file that is broken, such as a truncated .gz, ends at its last complete row.
    """
    if _format(group.files[0]) == "parquet":
        yield from _tables(group, layout, skip)
        return
    reader = _RowReader(group, layout, skip)
    block, characters = CorpusBlock([]), 0
    for row in chain(reader, [None]):
        if isinstance(row, Problem):
            block.problems.append(row)
        elif row is not None:
            text = row[layout.text_column]
            block.rows.append(row)
            block.texts.append(text)
            characters += len(text or "")
        size = len(block.texts) + len(block.problems)
        full = size >= layout.block_rows or characters >= BLOCK_CHARACTERS
        if full or (size and row is None):
            block.consumed, block.fraction = reader.index, reader.bytes / max(1, group.bytes)
            yield block
            block, characters = CorpusBlock([]), 0


class _RowReader:
    """Reads the rows of files one after another; a row is a dict, its text and its problem."""

    def __init__(self, group: FileGroup, layout: Layout, skip: int) -> None:
        self.group, self.layout, self.skip = group, layout, skip
        self.bytes = 0
        self.index = 0

    def __iter__(self) -> Iterator[Mapping[str, Any] | Problem]:
        for name in self.group.files:
            file, before = Path(name), self.bytes
            try:
                yield from self._lines(file) if _format(file) == "rows" else self._documents(file)
            except InputError as error:
                if self._counts():
                    yield Problem(f"{name}: {error.problem}", ends_file=True)
            self.bytes = before + file.stat().st_size

    def _counts(self) -> bool:
        """Count a row, and say whether it is behind those that were read before."""
        self.index += 1
        return self.index > self.skip

    def _lines(self, file: Path) -> Iterator[Mapping[str, Any] | Problem]:
        plain = file.suffix.lower() not in files.COMPRESSED
        for number, line in rows.numbered_lines(file):
            self.bytes += len(line) if plain else 0
            if not self._counts():
                continue
            try:
                row = rows.json_row(line, file, number)
                if row.get(self.layout.text_column) is not None:
                    row.text(self.layout.text_column)
                if b"\\u" in line:
                    # An escape may be half of a character.
                    json.dumps(row.fields, ensure_ascii=False).encode()
                yield row.fields
            except UnicodeEncodeError:
                yield Problem(f"{file}, line {number} has a lone surrogate")
            except InputError as error:
                yield Problem(str(error).removesuffix("."))

    def _documents(self, file: Path) -> Iterator[Mapping[str, Any] | Problem]:
        """The documents of a plain text: all of it, or the parts between separators."""
        separator = (self.layout.separator or "").encode()
        with files.open_file(file) as opened:
            waiting = b""
            while read := opened.read(READ_BYTES):
                waiting += read
                if separator:
                    *whole, waiting = waiting.split(separator)
                    for document in whole:
                        yield from self._document(document, file)
            yield from self._document(waiting, file)

    def _document(self, document: bytes, file: Path) -> Iterator[Mapping[str, Any] | Problem]:
        if (self.layout.separator and not document.strip()) or not self._counts():
            return
        try:
            text = document.removeprefix(codecs.BOM_UTF8).decode()
        except UnicodeDecodeError as error:
            yield Problem(f"{file}, document {self.index} is not UTF-8 ({error.reason})")
        else:
            yield {self.layout.text_column: text, "source": str(file)}


def _tables(group: FileGroup, layout: Layout, skip: int) -> Iterator[CorpusBlock]:
    """The blocks of Parquet files, none of which spans two files."""
    consumed, bytes_before = 0, 0
    for name in group.files:
        size = Path(name).stat().st_size
        for block in _tables_of(Path(name), layout):
            consumed += len(block.texts) + len(block.problems)
            block.consumed = consumed
            block.fraction = (bytes_before + block.fraction * size) / max(1, group.bytes)
            if consumed > skip:
                yield block
        bytes_before += size


def _tables_of(file: Path, layout: Layout) -> Iterator[CorpusBlock]:
    from pyarrow import Table

    rows_before = 0
    try:
        with rows.open_parquet(file) as opened:
            _check_text_column(file, opened.schema_arrow, layout.text_column)
            for batch in opened.iter_batches(batch_size=layout.block_rows):
                table = Table.from_batches([batch])
                texts = _texts(table.column(layout.text_column))
                for start, stop in _cuts(texts):
                    block = _readable(file, table, texts, start, stop, rows_before)
                    block.fraction = (rows_before + stop) / max(1, opened.metadata.num_rows)
                    yield block
                rows_before += len(texts)
    except ArgumentError:
        raise
    except InputError as error:
        problem = Problem(f"{file}: {error.problem}", ends_file=True)
        yield CorpusBlock([], problems=[problem], fraction=1.0)


def _check_text_column(file: Path, schema: Any, name: str) -> None:
    import pyarrow.types as kinds

    if name not in schema.names:
        raise ArgumentError(
            f"{file} has no text_column={name!r}", f"use one of: {', '.join(schema.names)}"
        )
    kind = schema.field(name).type
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    if not (kinds.is_string(kind) or kinds.is_large_string(kind)):
        raise ArgumentError(f"{file}: text_column={name!r} is {kind}", "use a column of strings")


def _texts(column: Any) -> list[Any]:
    """The texts of a column; False where one is not UTF-8."""
    try:
        texts: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        texts = []
        for value in column:
            try:
                texts.append(value.as_py())
            except UnicodeDecodeError:
                texts.append(False)
    return texts


def _cuts(texts: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The ends of blocks with a bounded number of characters.

    >>> list(_cuts(["a", None, "b"]))
    [(0, 3)]
    """
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text or "")
        if characters >= BLOCK_CHARACTERS:
            yield start, index + 1
            start, characters = index + 1, 0
    if start < len(texts):
        yield start, len(texts)


def _readable(
    file: Path, table: Any, texts: list[Any], start: int, stop: int, rows_before: int
) -> CorpusBlock:
    """The rows from `start` to `stop`, without those whose text cannot be decoded."""
    good = [index for index in range(start, stop) if texts[index] is not False]
    problems = [
        Problem(f"{file}, row {rows_before + index + 1} has a text that is not UTF-8")
        for index in range(start, stop)
        if texts[index] is False
    ]
    part = table.take(good) if problems else table.slice(start, stop - start)
    return CorpusBlock(part, [texts[index] for index in good], problems)
