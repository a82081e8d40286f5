"""Texts of any size, read in passages, so that memory does not grow with the corpus.

A plain text file is one document, or several with a `separator`; a row of .jsonl or .parquet is
one. A document longer than a passage is cut into several, at the end of a line or else before a
space. Documents that are only white space are skipped.
"""

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from manyheads.data.sources import files as sources
from manyheads.data.sources.rows import ROW_FORMATS, FileRows, HubRows, Row, hub_rows
from manyheads.errors import InputError

# Characters per passage: few, since a validation split is cut between two passages.
PASSAGE = 2**12
# Characters read at a time.
READ = 2**16

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".log"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs"),
    *(".rb", ".sh", ".sql", ".r", ".jl", ".hs", ".ml", ".lean", ".toml", ".yaml", ".yml"),
)
# Files without a suffix are texts too, such as enwik8.
KNOWN = (".txt", *ROW_FORMATS, *TEXT_SUFFIXES[1:], "")

Format = Literal["as named", "text", "jsonl", "parquet"]
Errors = Literal["strict", "replace"]


class Passage(NamedTuple):
    """Some text of a document, whether the document `ends` with it, and the index of its file."""

    text: str
    ends: bool
    file: int = 0


@runtime_checkable
class TextSource(Protocol):
    """A source of texts; each call of `read` starts from the beginning."""

    def read(self, first: int = 0) -> Iterator[Passage]:
        """The passages, starting with file number `first`."""
        ...

    def identity(self) -> dict[str, Any]:
        """What determines the texts, in values that JSON can hold."""
        ...

    def expected_bytes(self) -> int | None:
        """The approximate size of the texts, if known without reading them."""
        ...

    def check(self) -> None:
        """Raise if the source is known to be missing, without reading it."""
        ...


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The texts of files, folders and globs: plain, .jsonl or .parquet, compressed or not.

    `text_column` is the column of rows with the text; `separator` separates the documents of a
    plain file, such as a blank line; `errors="replace"` replaces invalid UTF-8 by question marks.
    """

    paths: sources.Paths
    text_column: str = "text"
    separator: str | None = None
    format: Format = "as named"
    errors: Errors = "strict"

    def __post_init__(self) -> None:
        if self.separator is not None and not 0 < len(self.separator) < PASSAGE:
            raise InputError(
                f"separator={self.separator!r} is empty or too long", r"use '\n\n', or None"
            )

    def read(self, first: int = 0) -> Iterator[Passage]:
        for number, file in enumerate(self.files()):
            if number >= first:
                for text, ends in self._texts(file):
                    yield Passage(text, ends, number)

    def check(self) -> None:
        self.files()

    def files(self) -> list[Path]:
        return sources.find_files(self.paths, KNOWN, any_suffix=self.format != "as named")

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "files",
            "field": self.text_column,
            "separator": self.separator,
            "format": self.format,
            "errors": self.errors,
            "passage": PASSAGE,
            "files": [[str(file), sources.fingerprint(file)] for file in self.files()],
        }

    def expected_bytes(self) -> int | None:
        files = self.files()
        if any(file.suffix.lower() in {*sources.COMPRESSED, ".parquet"} for file in files):
            return None
        return sum(file.stat().st_size for file in files)

    def _texts(self, file: Path) -> Iterator[tuple[str, bool]]:
        suffix = sources.suffix_of(file) if self.format == "as named" else f".{self.format}"
        if suffix in ROW_FORMATS:
            return _of_rows(ROW_FORMATS[suffix](file), self.text_column)
        return _cut(_decoded(file, self.errors), self.separator)


@dataclass(frozen=True, slots=True)
class RowTexts:
    """One column of the rows of a source, as in `RowTexts(HubRows("org/name"))`."""

    rows: FileRows | HubRows
    text_column: str = "text"

    def read(self, first: int = 0) -> Iterator[Passage]:  # noqa: ARG002
        for text, ends in _of_rows(iter(self.rows), self.text_column):
            yield Passage(text, ends)

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "rows",
            "field": self.text_column,
            "passage": PASSAGE,
            "rows": repr(self.rows),
        }

    def expected_bytes(self) -> int | None:
        return None

    def check(self) -> None:
        self.rows.check()


@dataclass(frozen=True, slots=True)
class InMemoryTexts:
    """Texts in memory, one per document.

    >>> [passage.text for passage in InMemoryTexts(("one", " ", "two")).read()]
    ['one', 'two']
    """

    texts: tuple[str, ...]

    def read(self, first: int = 0) -> Iterator[Passage]:  # noqa: ARG002
        for text in self.texts:
            for passage, ends in _cut([text], None):
                yield Passage(passage, ends)

    def identity(self) -> dict[str, Any]:
        checksum = 0
        for text in self.texts:
            checksum = zlib.crc32(f"{text}\0".encode(errors="surrogatepass"), checksum)
        return {"kind": "given", "documents": len(self.texts), "checksum": checksum}

    def expected_bytes(self) -> int | None:
        return sum(len(text.encode(errors="surrogatepass")) for text in self.texts)

    def check(self) -> None:
        """Nothing can be missing."""


def _of_rows(rows: Iterable[Row], text_column: str) -> Iterator[tuple[str, bool]]:
    for row in rows:
        yield from _cut([row.text(text_column)], None)


def _decoded(path: Path, errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    before = 0
    with sources.open_file(path) as file:
        while True:
            read = file.read(READ)
            # Bytes of a character whose first bytes were in the previous block.
            begun = len(decoder.getstate()[0])
            try:
                yield decoder.decode(read, final=not read)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} is not UTF-8: {error.reason} at byte {before - begun + error.start}",
                    'convert it, or read it with errors = "replace"',
                ) from None
            if not read:
                return
            before += len(read)


def _cut(chunks: Iterable[str], separator: str | None) -> Iterator[tuple[str, bool]]:
    """The passages of the concatenated chunks, each with whether it ends a document.

    >>> list(_cut(["a;", "b", "c", ";;d"], ";"))
    [('a', True), ('bc', True), ('d', True)]
    """
    waiting, begun = "", False
    for chunk in chunks:
        waiting += chunk
        if separator is not None:
            *whole, waiting = waiting.split(separator)
            for text in whole:
                yield from _document(text, begun)
                begun = False
        # A separator that is only partly read is at the very end, and is not cut.
        start = 0
        while len(waiting) - start > 2 * PASSAGE:
            stop = _end(waiting, start)
            yield waiting[start:stop], False
            start, begun = stop, True
        waiting = waiting[start:]
    yield from _document(waiting, begun)


def _document(text: str, begun: bool) -> Iterator[tuple[str, bool]]:
    if not begun and not text.strip():
        return
    start = 0
    while len(text) - start > PASSAGE:
        stop = _end(text, start)
        yield text[start:stop], False
        start = stop
    yield text[start:], True


def _end(text: str, start: int) -> int:
    """The end of the passage from `start`: after a line, or before a space, or anywhere."""
    limit = start + PASSAGE
    line, word = text.rfind("\n", start, limit) + 1, text.rfind(" ", start, limit)
    return line if line > start else word if word > start else limit


def text_source(
    paths: Sequence[str],
    *,
    text_column: str = "text",
    separator: str | None = None,
    format: Format = "as named",
    errors: Errors = "strict",
) -> TextSource:
    """The texts of files, or of the column `text_column` of one dataset of the Hugging Face hub.

    >>> text_source(["hub:org/name?split=test"], text_column="body").rows
    HubRows(name='org/name', subset=None, split='test', revision=None)
    """
    hub = hub_rows(paths)
    if hub is not None:
        return RowTexts(hub, text_column)
    return TextFiles(
        tuple(paths), text_column=text_column, separator=separator, format=format, errors=errors
    )
