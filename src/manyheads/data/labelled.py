"""Texts with what is known of them: a label, a second text, or a tag for each word."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import UNLABELLED, Batch
from manyheads.data.permutation import shuffled
from manyheads.data.sources.rows import Row, Rows
from manyheads.errors import InputError
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizing import cutting_copy

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


AT_A_TIME = 1024

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """Sequences of numbers end to end."""

    values: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> "_Flat":
        arrays = [np.array(sequence, dtype=np.int32) for sequence in sequences]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *arrays]), offsets)

    @property
    def sizes(self) -> NDArray[np.int32]:
        return np.diff(self.offsets).astype(np.int32)

    def take(self, numbers: Sequence[int]) -> Int[Tensor, " n"]:
        chosen = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in numbers]
        return torch.from_numpy(np.concatenate(chosen).astype(np.int64))

    def rows(self, numbers: Sequence[int]) -> "_Flat":
        return _Flat.of(
            self.values[self.offsets[i] : self.offsets[i + 1]].tolist() for i in numbers
        )

    def ragged(self, numbers: Sequence[int]) -> Ragged:
        each = (self.offsets[i + 1] - self.offsets[i] for i in numbers)
        return Ragged(self.take(numbers), Lengths.of([int(size) for size in each]))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Examples:
    """Texts that are not cut further, with `others`, `labels` or `tags`; `names` are of classes."""

    texts: _Flat
    others: _Flat | None = None
    labels: NDArray[np.int64] | None = None
    tags: _Flat | None = None
    names: tuple[str, ...] = ()

    @property
    def sizes(self) -> NDArray[np.int32]:
        return self.texts.sizes if self.others is None else self.texts.sizes + self.others.sizes

    def __len__(self) -> int:
        return len(self.texts.offsets) - 1

    def split(self, share: float) -> "tuple[Examples, Examples]":
        """All but a share of the rows, and that share: by chance, since rows are often sorted."""
        total = len(self)
        held = round(total * share)
        if not 0 < held < total:
            raise InputError(
                f"{share:g} of {total} rows cannot be held out", "give more rows, or another share"
            )
        drawn = shuffled(np.arange(total), total, seed=0, epoch=0).tolist()
        return self._rows(sorted(drawn[held:])), self._rows(sorted(drawn[:held]))

    def _rows(self, numbers: list[int]) -> "Examples":
        return Examples(
            texts=self.texts.rows(numbers),
            others=None if self.others is None else self.others.rows(numbers),
            labels=None if self.labels is None else self.labels[numbers],
            tags=None if self.tags is None else self.tags.rows(numbers),
            names=self.names,
        )

    def batch(self, numbers: Sequence[int]) -> Batch:
        labels = None
        if self.labels is not None:
            labels = torch.from_numpy(self.labels[list(numbers)])
        elif self.tags is not None:
            labels = self.tags.take(numbers)
        return Batch(
            texts=self.texts.ragged(numbers),
            others=None if self.others is None else self.others.ragged(numbers),
            labels=labels,
        )


def labelled_examples(
    source: Iterable[LabelledText],
    tokenizer: Any,
    *,
    longest: int | None = None,
    names: Sequence[str] = (),
) -> Examples:
    """Texts with one label each; names of classes are numbered in `names`, else alphabetically."""
    rows = _some(source)
    found, kept = numbered([row.label for row in rows], [row.place for row in rows], names)
    ids = _encoded([row.text for row in rows], [row.place for row in rows], tokenizer, longest)
    return Examples(
        texts=_Flat.of(one.ids for one in ids),
        labels=np.array(found, dtype=np.int64),
        names=kept,
    )


def paired_examples(
    source: Iterable[Pair],
    tokenizer: Any,
    *,
    longest: int | None = None,
    end: int | None = None,
) -> Examples:
    """Two texts each, tokenised apart; `end` is put behind each of them."""
    rows = _some(source)
    places = [row.place for row in rows]
    behind = [] if end is None else [end]
    room = None if longest is None else longest - len(behind)
    first = _encoded([row.first for row in rows], places, tokenizer, room)
    second = _encoded([row.second for row in rows], places, tokenizer, room)
    return Examples(
        texts=_Flat.of([*one.ids, *behind] for one in first),
        others=_Flat.of([*one.ids, *behind] for one in second),
    )


def tagged_examples(
    source: Iterable[TaggedText],
    tokenizer: Any,
    *,
    longest: int | None = None,
    names: Sequence[str] = (),
) -> Examples:
    """Words with a tag each: the first token of a word carries it, all others are `UNLABELLED`."""
    rows = _some(source)
    places = [row.place for row in rows for _ in row.tags]
    found, kept = numbered([tag for row in rows for tag in row.tags], places, names)
    encoded = _encoded(
        [list(row.words) for row in rows], [row.place for row in rows], tokenizer, longest
    )
    numbers = iter(found)
    tags = [
        _spread(one.word_ids, list(islice(numbers, len(row.tags))))
        for one, row in zip(encoded, rows, strict=True)
    ]
    return Examples(texts=_Flat.of(one.ids for one in encoded), tags=_Flat.of(tags), names=kept)


def _spread(words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """
    >>> _spread([None, 0, 0, 1, None], [5, 7])
    [-100, 5, -100, 7, -100]
    """
    before = [None, *words]
    return [
        UNLABELLED if word is None or word == last else tags[word]
        for last, word in zip(before, words, strict=False)
    ]


def _some(source: Iterable[Given]) -> list[Given]:
    rows = list(source)
    if not rows:
        raise InputError("the source holds no example", "give one at least")
    return rows


def numbered(
    labels: Sequence[Label], places: Sequence[str], names: Sequence[str]
) -> tuple[list[int], tuple[str, ...]]:
    """Labels as numbers, and the names of the numbers if labels are names."""
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise InputError("some labels are names and some are numbers", "use one of both")
    if kinds == {str} and not names:
        names = sorted({str(label) for label in labels})
    known = {name: number for number, name in enumerate(names)}
    found = []
    for label, place in zip(labels, places, strict=True):
        number = known.get(label) if isinstance(label, str) else label
        if number is None or (names and number >= len(names)):
            raise InputError(
                f"{place}: the label {label!r} is unknown", f"use one of: {', '.join(names)}"
            )
        found.append(number)
    return found, tuple(names)


def _encoded(
    texts: Sequence[str] | Sequence[list[str]],
    places: Sequence[str],
    tokenizer: Any,
    longest: int | None,
) -> list[Any]:
    """With the special tokens that the tokenizer adds; cut to `longest` tokens, these included."""
    copy = cutting_copy(tokenizer, longest)
    found: list[Any] = []
    for some in _sliced(texts):
        words = isinstance(some[0], list)
        # A tag goes to the first token of its word, so places are needed there.
        encode = copy.encode_batch if words else copy.encode_batch_fast
        found += encode(some, is_pretokenized=words)
    for encoding, place in zip(found, places, strict=True):
        if not encoding.ids:
            raise InputError(f"{place} has a text without a token", "leave empty texts out")
    return found


def _sliced(texts: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(texts), AT_A_TIME):
        yield texts[start : start + AT_A_TIME]
