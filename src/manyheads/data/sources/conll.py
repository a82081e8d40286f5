"""CoNLL files: one word per line, its tag in the last column, a blank line between sentences."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from manyheads.data.sources import files, rows
from manyheads.errors import InputError

CONLL_SUFFIXES = (".conll", ".bio", ".iob", ".iob2", ".tsv")
COMMENT = re.compile(r"#\s+(id|sent_id|text|newdoc|newpar)\b")
DOCUMENT_START = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class ConllRows(rows.FileRows):
    """The sentences of CoNLL files as rows of `tokens` and `tags`, compressed or not.

    Columns are separated by tabs, or else by spaces: the word first, its tag last, others between
    are not read.
    """

    def __iter__(self) -> Iterator[rows.Row]:
        for file in self._files():
            yield from _sentences(file)

    def _files(self) -> list[Path]:
        return files.find_files(self.paths, CONLL_SUFFIXES)


def tagged_rows(paths: Sequence[str]) -> rows.RowSource:
    """The rows of tagged texts: of CoNLL files, .jsonl, .parquet, or a dataset of the hub."""
    conll = [path for path in paths if files.suffix_of(Path(path)) in CONLL_SUFFIXES]
    if not conll or any(path.startswith(rows.HUB) for path in paths):
        return rows.row_source(paths)
    if len(conll) < len(paths):
        raise InputError(
            f"{', '.join(paths)} mix CoNLL files with others", "give files of one format"
        )
    return ConllRows(tuple(paths))


def _sentences(file: Path) -> Iterator[rows.Row]:
    words: list[str] = []
    tags: list[str] = []
    first = columns = 0
    with files.open_file(file) as opened:
        for number, raw in enumerate(chain(opened, [b"\n"]), 1):
            line = _decoded(raw, file, number)
            # Some files write a tab where the line should be blank.
            if not line.strip():
                if words:
                    yield rows.Row({"tokens": words, "tags": tags}, str(file), first)
                words, tags = [], []
                continue
            parts = line.split("\t") if "\t" in line else line.split()
            # A line that starts with "# " may be a word "#" with its columns.
            comment = line.startswith("# ") and (len(parts) != columns or COMMENT.match(line))
            if parts[0] == DOCUMENT_START or comment:
                continue
            if len(parts) < 2 or not parts[0].strip() or not parts[-1].strip():
                raise InputError(
                    f"{file}, line {number} has no word and tag: {line.strip()[:80]!r}",
                    "write the word first and its tag last, separated by a tab",
                )
            columns = columns or len(parts)
            first = first if words else number
            words.append(parts[0].strip())
            tags.append(parts[-1].strip())


def _decoded(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}, line {number} is not UTF-8 ({error.reason})", "convert it"
        ) from None
