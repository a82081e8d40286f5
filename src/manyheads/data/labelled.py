"""Texts with what is known of them: a label, a second text, or a tag for each word."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyheads.data.rows import Row, Rows
from manyheads.errors import InputError

__all__ = ["Label", "LabelledText", "LabelledTexts", "Pair", "Pairs", "TaggedText", "TaggedTexts"]

# A number, or a name that gets one.
Label = int | str


class LabelledText(NamedTuple):
    text: str
    label: Label
    place: str


class Pair(NamedTuple):
    first: str
    second: str
    place: str


class TaggedText(NamedTuple):
    words: tuple[str, ...]
    tags: tuple[Label, ...]
    place: str


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """One text and one label a row, as in `LabelledTexts(FileRows("reviews.jsonl"))`."""

    rows: Rows
    text: str = "text"
    label: str = "label"

    def __iter__(self) -> Iterator[LabelledText]:
        for row in self.rows:
            label = _label(row.get(self.label), row, self.label)
            yield LabelledText(row.text(self.text), label, row.place)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two texts a row: a sentence and its translation, a question and its answer."""

    rows: Rows
    first: str = "first"
    second: str = "second"

    def __iter__(self) -> Iterator[Pair]:
        for row in self.rows:
            yield Pair(row.text(self.first), row.text(self.second), row.place)


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """A list of words and a list of as many tags a row."""

    rows: Rows
    words: str = "tokens"
    tags: str = "tags"

    def __iter__(self) -> Iterator[TaggedText]:
        for row in self.rows:
            words = _list(row, self.words)
            tags = _list(row, self.tags)
            if len(words) != len(tags):
                raise InputError(
                    f"{row.place} has {len(words)} {self.words} and {len(tags)} {self.tags}",
                    "give one tag a word",
                )
            if not all(isinstance(word, str) for word in words):
                raise InputError(f"{row.place}: {self.words} are no words", "give a list of texts")
            labels = tuple(_label(tag, row, self.tags) for tag in tags)
            yield TaggedText(tuple(words), labels, row.place)


def _list(row: Row, field: str) -> list[Any]:
    value = row.get(field)
    if not isinstance(value, list):
        raise InputError(f"{row.place}: field {field!r} is a {type(value).__name__}", "give a list")
    return value


def _label(value: Any, row: Row, field: str) -> Label:
    if isinstance(value, str) or (isinstance(value, int) and value >= 0):
        return value if isinstance(value, str) else int(value)
    raise InputError(
        f"{row.place}: field {field!r} is {value!r}", "give a name, or a number of 0 or more"
    )
