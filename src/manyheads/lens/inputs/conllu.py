"""Treebanks in CoNLL-U, and the pairs of words in their relations.

The format of Universal Dependencies: ten columns per word, a blank line after each sentence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from manyheads.errors import InputError
from manyheads.lens.inputs.annotated import AnnotatedText, WordPair

COLUMNS = 10
TO_HEAD, TO_DEPENDENT = "dependent to head", "head to dependent"
# The root has no head, and punctuation is attached by convention.
IGNORED_RELATIONS = ("root", "punct")


@dataclass(frozen=True, slots=True)
class ParsedWord:
    """A word, the number of its head (from 1; 0 is the root), and its relation to the head."""

    form: str
    head: int
    relation: str


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """A text, its words, and their spans; a word without characters of its own has an empty span.

    The words of a multiword token, such as French "du", divide its characters if they spell it;
    otherwise the first word has them all.
    """

    text: str
    words: tuple[ParsedWord, ...]
    spans: tuple[tuple[int, int], ...]


def read_conllu(path: Path | str) -> Iterator[ParsedSentence]:
    """Read the sentences of a file; errors give the number of the line.

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
        raise InputError(f"{path} does not exist", "pass a CoNLL-U file")
    count = 0
    try:
        with path.open(encoding="utf-8") as file:
            for blank, lines in groupby(enumerate(file, 1), lambda line: not line[1].strip()):
                if not blank:
                    count += 1
                    yield _sentence(path, list(lines))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason})", "convert it") from None
    if not count:
        raise InputError(f"{path} has no sentences", "pass a file with ten columns per word")


def syntax_texts(sentences: Sequence[ParsedSentence]) -> Iterator[AnnotatedText]:
    """Pair each word with its head, and each head with its dependents of a relation."""
    for sentence in sentences:
        pairs = []
        dependents: dict[tuple[int, str], list[int]] = {}
        for number, word in enumerate(sentence.words):
            if word.head == 0 or word.relation in IGNORED_RELATIONS:
                continue
            task = f"{word.relation}, {TO_HEAD}"
            pairs.append(WordPair(task=task, source=number, targets=(word.head - 1,)))
            dependents.setdefault((word.head - 1, word.relation), []).append(number)
        for (head, relation), words in dependents.items():
            task = f"{relation}, {TO_DEPENDENT}"
            pairs.append(WordPair(task=task, source=head, targets=tuple(words)))
        yield AnnotatedText(sentence.text, sentence.spans, tuple(pairs))


@dataclass(frozen=True, slots=True)
class _ConlluRow:
    """One line of a sentence: a word, or a multiword token of words `first` to `last`."""

    where: str
    first: int
    last: int
    form: str
    columns: tuple[str, ...]

    @property
    def multiword(self) -> bool:
        return "-" in self.columns[0]

    @property
    def space_after(self) -> bool:
        return "SpaceAfter=No" not in self.columns[9].split("|")


def _sentence(path: Path, lines: Sequence[tuple[int, str]]) -> ParsedSentence:
    parsed = (
        _row(f"{path}:{number}", line.rstrip("\r\n"))
        for number, line in lines
        if not line.startswith("#")
    )
    rows = [row for row in parsed if row is not None]
    words = [row for row in rows if not row.multiword]
    if not words:
        raise InputError(f"{path}:{lines[0][0]} begins a sentence without words", "remove it")
    for number, row in enumerate(words, 1):
        if row.first != number:
            raise InputError(
                f"{row.where} has id {row.first}, expected {number}", "number words from 1"
            )
    text, spans = _layout(rows, len(words))
    return ParsedSentence(text, tuple(_word(row, len(words)) for row in words), spans)


def _row(where: str, line: str) -> _ConlluRow | None:
    columns = tuple(line.split("\t"))
    if len(columns) != COLUMNS:
        raise InputError(
            f"{where} has {len(columns)} columns", f"write {COLUMNS}, separated by tabs"
        )
    if any(not column for column in columns):
        raise InputError(f"{where} has an empty column", "write _ for an unknown value")
    first, _, last = columns[0].partition("-")
    if "." in columns[0]:
        # An empty node is not part of the text.
        return None
    if not first.isdecimal() or (last and not last.isdecimal()) or ("-" in columns[0]) > bool(last):
        raise InputError(f"{where} has id {columns[0]!r}", "use 1, 2, ..., 3-4 or 5.1")
    return _ConlluRow(where, int(first), int(last or first), columns[1], columns)


def _word(row: _ConlluRow, count: int) -> ParsedWord:
    head, relation = row.columns[6], row.columns[7]
    if not head.isdecimal() or int(head) > count:
        raise InputError(
            f"{row.where} has head {head!r}", f"use 0 to {count}, a word of the sentence"
        )
    if int(head) == row.first:
        raise InputError(f"{row.where} is its own head", "use another word, or 0 for the root")
    if relation == "_":
        raise InputError(f"{row.where} has no relation", "write one in the eighth column")
    return ParsedWord(row.form, int(head), relation)


def _layout(rows: Sequence[_ConlluRow], count: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of a sentence, and the span of each word."""
    text, covered = "", 0
    spans: list[tuple[int, int]] = [(0, 0)] * count
    forms = {row.first: row.form for row in rows if not row.multiword}
    for row in rows:
        if row.multiword:
            if not covered < row.first < row.last <= count:
                raise InputError(
                    f"{row.where} joins words {row.first} to {row.last}",
                    f"join words 1 to {count} of the sentence, each at most once",
                )
            covered = row.last
            start = len(text)
            parts = [forms[number] for number in range(row.first, row.last + 1)]
            if "".join(parts) != row.form:
                parts = [row.form, *("" for _ in parts[1:])]
            for number, part in zip(range(row.first, row.last + 1), parts, strict=True):
                spans[number - 1] = (start, start + len(part))
                start += len(part)
        elif row.first > covered:
            spans[row.first - 1] = (len(text), len(text) + len(row.form))
        else:
            continue
        text += row.form + (" " if row.space_after else "")
    return text.rstrip(" "), tuple(spans)
