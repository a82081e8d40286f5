"""Treebanks in CoNLL-U, and the pairs of words that their relations ask heads for.

The format is that of Universal Dependencies: ten columns a word, a blank line after each sentence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.errors import InputError
from manyheads.lens.inputs.annotated import Pair, Written

COLUMNS = 10
TO_HEAD, TO_DEPENDENT = "dependent to head", "head to dependent"
# The root looks at nothing, and marks hang where the guidelines put them.
LEFT_OUT = ("root", "punct")


@dataclass(frozen=True, slots=True)
class Word:
    """A word, its head by number (0 is none, the first word is 1), and its relation to it."""

    form: str
    head: int
    relation: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text, its words, and where each stands in the text; an empty span where it has no letters.

    Words that are written as one, such as French "du", share its letters where they spell it and
    leave them to the first of them where they do not.
    """

    text: str
    words: tuple[Word, ...]
    spans: tuple[tuple[int, int], ...]


def read_conllu(path: Path | str) -> Iterator[Sentence]:
    """The sentences of a file, one after another; a line that cannot be is refused by its number.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "two.conllu")
    ...     rows = ["1 Dogs _ _ _ _ 2 nsubj _ _", "2 bark _ _ _ _ 0 root _ SpaceAfter=No"]
    ...     _ = file.write_text("\\n".join(row.replace(" ", "\\t") for row in rows) + "\\n\\n")
    ...     [(sentence.text, sentence.spans) for sentence in read_conllu(file)]
    [('Dogs bark', ((0, 4), (5, 9)))]
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no {path}", "name a CoNLL-U file")
    lines: list[tuple[int, str]] = []
    found = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                line = line.rstrip("\r\n")
                if line.strip():
                    lines.append((number, line))
                elif lines:
                    found += 1
                    yield _sentence(path, lines)
                    lines = []
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason})", "convert it") from None
    if lines:
        found += 1
        yield _sentence(path, lines)
    if not found:
        raise InputError(f"{path} has no sentence", "give one with ten columns a word")


def syntactic_texts(sentences: Sequence[Sentence]) -> Iterator[Written]:
    """Each word asked for its head, and each head for its dependents of a relation."""
    for sentence in sentences:
        pairs = []
        below: dict[tuple[int, str], list[int]] = {}
        for place, word in enumerate(sentence.words):
            if word.head == 0 or word.relation in LEFT_OUT:
                continue
            task = f"{word.relation}, {TO_HEAD}"
            pairs.append(Pair(task=task, source=place, targets=(word.head - 1,)))
            below.setdefault((word.head - 1, word.relation), []).append(place)
        for (head, relation), dependents in below.items():
            task = f"{relation}, {TO_DEPENDENT}"
            pairs.append(Pair(task=task, source=head, targets=tuple(dependents)))
        yield Written(sentence.text, sentence.spans, tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a sentence: a word, or some that are written as one, from `first` to `last`."""

    place: str
    first: int
    last: int
    form: str
    columns: tuple[str, ...]

    @property
    def joins(self) -> bool:
        return "-" in self.columns[0]

    @property
    def spaced(self) -> bool:
        return "SpaceAfter=No" not in self.columns[9].split("|")


def _sentence(path: Path, lines: Sequence[tuple[int, str]]) -> Sentence:
    rows = []
    for number, line in lines:
        if not line.startswith("#"):
            row = _row(f"{path}:{number}", line)
            if row is not None:
                rows.append(row)
    place = f"{path}:{lines[0][0]}"
    words = [row for row in rows if not row.joins]
    if not words:
        raise InputError(f"{place} begins a sentence without words", "take it out")
    for number, row in enumerate(words, 1):
        if row.first != number:
            raise InputError(f"{row.place} has id {row.first} where {number} follows", "number on")
    read = tuple(_word(row, len(words)) for row in words)
    text, spans = _laid_out(rows, len(words))
    return Sentence(text, read, spans)


def _row(place: str, line: str) -> _Row | None:
    columns = tuple(line.split("\t"))
    if len(columns) != COLUMNS:
        raise InputError(
            f"{place} has {len(columns)} columns", f"give {COLUMNS}, with tabs between them"
        )
    if any(not each for each in columns):
        raise InputError(f"{place} has an empty column", "write _ for what is not known")
    first, _, last = columns[0].partition("-")
    if "." in columns[0]:
        # A word that is not said has no place in the text.
        return None
    if not first.isdecimal() or (last and not last.isdecimal()) or ("-" in columns[0]) > bool(last):
        raise InputError(f"{place} has id {columns[0]!r}", "use 1, 2, ..., 3-4 or 5.1")
    return _Row(place, int(first), int(last or first), columns[1], columns)


def _word(row: _Row, count: int) -> Word:
    head, relation = row.columns[6], row.columns[7]
    if not head.isdecimal() or int(head) > count:
        raise InputError(
            f"{row.place} has head {head!r}", f"use 0 to {count}, words of its sentence"
        )
    if int(head) == row.first:
        raise InputError(f"{row.place} is its own head", "use another word, or 0 for the root")
    if relation == "_":
        raise InputError(f"{row.place} has no relation", "name one in the eighth column")
    return Word(row.form, int(head), relation)


def _laid_out(rows: Sequence[_Row], count: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text as it was written, and the letters of each word."""
    text, inside = "", 0
    spans: list[tuple[int, int]] = [(0, 0)] * count
    forms = {row.first: row.form for row in rows if not row.joins}
    for row in rows:
        if row.joins:
            if not inside < row.first < row.last <= count:
                raise InputError(
                    f"{row.place} joins words {row.first} to {row.last}",
                    f"join words of the sentence, which has {count}, each once",
                )
            inside = row.last
            start = len(text)
            parts = [forms[number] for number in range(row.first, row.last + 1)]
            if "".join(parts) != row.form:
                parts = [row.form, *("" for _ in parts[1:])]
            for number, part in zip(range(row.first, row.last + 1), parts, strict=True):
                spans[number - 1] = (start, start + len(part))
                start += len(part)
        elif row.first > inside:
            spans[row.first - 1] = (len(text), len(text) + len(row.form))
        else:
            continue
        text += row.form + (" " if row.spaced else "")
    return text.rstrip(" "), tuple(spans)
