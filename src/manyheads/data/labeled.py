"""Labeled texts, pairs of texts and tagged words: read from rows, tokenized and kept in memory.

reviews = labeled_examples(LabeledTexts(FileRows("train.jsonl")), tokenizer, max_length=512)
test = labeled_examples(..., tokenizer, max_length=512, names=reviews.names)
Stream(reviews, batch_tokens=16_384, seed=0)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data import stream, tag_schemes
from manyheads.data.batch import IGNORE_INDEX, Batch
from manyheads.data.sources.rows import Row, RowSource
from manyheads.data.store import array_checksum
from manyheads.errors import InputError, short_repr
from manyheads.formatting import kind_of
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizers import first_tokens, join_words, truncating_copy

# A class number, or the name of a class.
Label = int | str


class LabeledText(NamedTuple):
    text: str
    label: Label | tuple[Label, ...]
    location: str


class TextPair(NamedTuple):
    first: str
    second: str
    location: str
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


class TaggedText(NamedTuple):
    words: tuple[str, ...]
    tags: tuple[Label, ...]
    location: str


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """One text and one label per row, as in `LabeledTexts(FileRows("reviews.jsonl"))`.

    A list of labels is for texts that may have any number of them.
    """

    rows: RowSource
    text: str = "text"
    label: str = "label"

    def __iter__(self) -> Iterator[LabeledText]:
        for row in self.rows:
            value = row.get(self.label)
            several = isinstance(value, list)
            items = value if several else [value]
            labels = tuple(_label(item, row, self.label) for item in items)
            yield LabeledText(row.text(self.text), labels if several else labels[0], row.location)


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Two texts per row: a sentence and its translation, a question and its answer.

    `negatives` are fields with further texts, wrong answers: one text or a list of them each.
    `scores` is a list of numbers: a teacher's for the second text, then for each negative.
    """

    rows: RowSource
    first: str = "first"
    second: str = "second"
    negatives: tuple[str, ...] = ()
    scores: str = ""

    def __iter__(self) -> Iterator[TextPair]:
        for row in self.rows:
            negatives = tuple(text for name in self.negatives for text in _texts(row, name))
            scores = _scores(row, self.scores, len(negatives)) if self.scores else ()
            yield TextPair(
                row.text(self.first), row.text(self.second), row.location, negatives, scores
            )


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """A list of words and a list of as many tags per row, as they are or in another scheme."""

    rows: RowSource
    words: str = "tokens"
    tags: str = "tags"
    scheme: tag_schemes.Scheme | Literal["as written"] = "as written"

    def __iter__(self) -> Iterator[TaggedText]:
        for row in self.rows:
            words = _list(row, self.words)
            tags = _list(row, self.tags)
            if len(words) != len(tags):
                raise InputError(
                    f"{row.location} has {len(words)} {self.words} and {len(tags)} {self.tags}",
                    "give one tag per word",
                )
            if not all(isinstance(word, str) for word in words):
                raise InputError(
                    f"{row.location}: {self.words} are no words", "give a list of texts"
                )
            labels = tuple(_label(tag, row, self.tags) for tag in tags)
            if self.scheme != "as written":
                if not all(isinstance(label, str) for label in labels):
                    raise InputError(
                        f"{row.location}: {self.tags} are numbers, which have no scheme",
                        "use tags such as B-person, or leave scheme out",
                    )
                labels = tuple(tag_schemes.convert_tags(tags, self.scheme))
            yield TaggedText(tuple(words), labels, row.location)


def _texts(row: Row, field: str) -> list[str]:
    """A text, or a list of texts."""
    value = row.get(field)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{row.location}: field {field!r} is {short_repr(value)}", "give texts, or a text"
        )
    return [row._replace(fields={field: text}).text(field) for text in texts]


def _scores(row: Row, field: str, negatives: int) -> tuple[float, ...]:
    scores = _list(row, field)
    if not negatives or len(scores) != negatives + 1:
        raise InputError(
            f"{row.location} has {len(scores)} {field} and {negatives} negatives",
            "give at least one negative, and a score for the second text and for each of them",
        )
    for score in scores:
        number = isinstance(score, int | float) and not isinstance(score, bool)
        if not number or not math.isfinite(score):
            raise InputError(f"{row.location}: field {field!r} has {score!r}", "use finite numbers")
    return tuple(map(float, scores))


def _list(row: Row, field: str) -> list[Any]:
    value = row.get(field)
    if not isinstance(value, list):
        raise InputError(f"{row.location}: field {field!r} is {kind_of(value)}", "give a list")
    return value


def _label(value: Any, row: Row, field: str) -> Label:
    if isinstance(value, str) or (isinstance(value, int) and value >= 0):
        return value if isinstance(value, str) else int(value)
    raise InputError(
        f"{row.location}: field {field!r} is {value!r}", "use a name, or a number of 0 or more"
    )


AT_A_TIME = 1024

Example = TypeVar("Example")


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """Sequences of numbers, concatenated."""

    values: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | NDArray[np.int32]]) -> "_Sequences":
        arrays = [np.array(sequence, dtype=np.int32) for sequence in sequences]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *arrays]), offsets)

    @property
    def sizes(self) -> NDArray[np.int32]:
        return np.diff(self.offsets).astype(np.int32)

    def take(self, numbers: Sequence[int]) -> Int[Tensor, " n"]:
        chosen = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in numbers]
        # A row may have no negatives.
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *chosen]).astype(np.int64))

    def rows(self, numbers: Sequence[int]) -> "_Sequences":
        return _Sequences.of(self.values[self.offsets[i] : self.offsets[i + 1]] for i in numbers)

    def ragged(self, numbers: Sequence[int]) -> Ragged:
        sizes = [int(self.offsets[i + 1] - self.offsets[i]) for i in numbers]
        return Ragged(self.take(numbers), Lengths.of(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """The negatives of each row, with the scores of a teacher for its pair and for them."""

    texts: _Sequences
    counts: NDArray[np.int64]
    scores: NDArray[np.float32] | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts) - self.counts

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Tokens per row."""
        ends = self.texts.offsets[np.cumsum(self.counts)]
        return (ends - self.texts.offsets[self.starts]).astype(np.int32)

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """The texts of these rows."""
        starts = self.starts
        return [n for row in rows for n in range(starts[row], starts[row] + self.counts[row])]

    def scores_of(self, rows: Sequence[int]) -> NDArray[np.float32] | None:
        if self.scores is None:
            return None
        # A row has one score more than it has negatives.
        starts = self.starts + np.arange(len(self.counts))
        chosen = [self.scores[starts[row] : starts[row] + self.counts[row] + 1] for row in rows]
        return np.concatenate(chosen)

    def rows(self, rows: Sequence[int]) -> "_Candidates":
        return _Candidates(
            self.texts.rows(self.numbers(rows)), self.counts[list(rows)], self.scores_of(rows)
        )

    @property
    def checksum(self) -> int:
        checksum = array_checksum(self.counts, array_checksum(self.texts.values, 0))
        return checksum if self.scores is None else array_checksum(self.scores, checksum)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Examples:
    """Texts that are not cut further, with `others`, `labels` or `tags`; `names` are of classes.

    Pairs may have `negatives`.
    """

    texts: _Sequences
    others: _Sequences | None = None
    negatives: _Candidates | None = None
    labels: NDArray[np.int64] | None = None
    tags: _Sequences | None = None
    names: tuple[str, ...] = ()

    @property
    def sizes(self) -> NDArray[np.int32]:
        sizes = self.texts.sizes
        for part in (self.others, self.negatives):
            sizes = sizes if part is None else sizes + part.sizes
        return sizes

    def __len__(self) -> int:
        return len(self.texts.offsets) - 1

    def split(self, fraction: float) -> "tuple[Examples, Examples]":
        """A random split: all but a fraction of the rows, and that fraction."""
        total = len(self)
        held = round(total * fraction)
        if not 0 < held < total:
            raise InputError(
                f"cannot split off {fraction:g} of {total} rows",
                "use more rows, or another fraction",
            )
        drawn = stream.permute(np.arange(total), total, seed=0, epoch=0).tolist()
        return self._rows(sorted(drawn[held:])), self._rows(sorted(drawn[:held]))

    def _rows(self, numbers: list[int]) -> "Examples":
        parts = {name: getattr(self, name) for name in ("texts", "others", "negatives", "tags")}
        chosen = {name: part.rows(numbers) for name, part in parts.items() if part is not None}
        return replace(self, **chosen, labels=None if self.labels is None else self.labels[numbers])

    @property
    def checksum(self) -> int:
        """Of all texts, labels and tags."""
        checksum = 0
        for part in (self.texts, self.others, self.tags):
            if part is not None:
                checksum = array_checksum(part.offsets, array_checksum(part.values, checksum))
        if self.negatives is not None:
            checksum ^= self.negatives.checksum
        return checksum if self.labels is None else array_checksum(self.labels, checksum)

    def batch(self, numbers: Sequence[int]) -> Batch:
        labels = None
        if self.labels is not None:
            labels = torch.from_numpy(self.labels[list(numbers)])
        elif self.tags is not None:
            labels = self.tags.take(numbers)
        batch = Batch(
            texts=self.texts.ragged(numbers),
            others=None if self.others is None else self.others.ragged(numbers),
            labels=labels,
        )
        if self.negatives is None:
            return batch
        scores = self.negatives.scores_of(numbers)
        return replace(
            batch,
            negatives=self.negatives.texts.ragged(self.negatives.numbers(numbers)),
            negative_counts=tuple(self.negatives.counts[list(numbers)].tolist()),
            scores=None if scores is None else torch.from_numpy(scores),
        )


def labeled_examples(
    source: Iterable[LabeledText],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    names: Sequence[str] = (),
) -> Examples:
    """Texts with one label each; class names are numbered by `names`, or alphabetically.

    If any text has a list of labels, there is a row of zeros and ones per text instead.
    """
    rows = _non_empty(source)
    labels, class_names = label_array(rows, names)
    locations = [row.location for row in rows]
    encoded = _encoded([row.text for row in rows], locations, tokenizer, max_length)
    texts = _Sequences.of(encoding.ids for encoding in encoded)
    return Examples(texts=texts, labels=labels, names=class_names)


def label_array(
    rows: Sequence[LabeledText], names: Sequence[str]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The number of each text's class, or zeros and ones per class, and the class names."""
    sets = [row.label if isinstance(row.label, tuple) else (row.label,) for row in rows]
    flat = [label for labels in sets for label in labels]
    locations = [row.location for row, labels in zip(rows, sets, strict=True) for _ in labels]
    numbers, class_names = label_ids(flat, locations, names)
    if not any(isinstance(row.label, tuple) for row in rows):
        return np.array(numbers, dtype=np.int64), class_names
    width = len(class_names) or max(numbers, default=0) + 1
    hot = np.zeros((len(rows), width), dtype=np.int64)
    owners = [index for index, labels in enumerate(sets) for _ in labels]
    hot[owners, numbers] = 1
    return hot, class_names


def paired_examples(
    source: Iterable[TextPair],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    first_length: int | None = None,
    end: int | None = None,
) -> Examples:
    """Pairs of texts with their negatives, tokenized one by one; `end` is appended to each.

    Texts are truncated to `max_length` tokens, the first of a pair to `first_length` if it is set.
    """
    rows = _non_empty(source)
    locations = [row.location for row in rows]
    suffix = [] if end is None else [end]
    text_length = None if max_length is None else max_length - len(suffix)
    length = text_length if first_length is None else first_length - len(suffix)
    first = _encoded([row.first for row in rows], locations, tokenizer, length)
    second = _encoded([row.second for row in rows], locations, tokenizer, text_length)
    negatives = None
    if any(row.negatives for row in rows):
        wrong = [text for row in rows for text in row.negatives]
        of = [row.location for row in rows for _ in row.negatives]
        scores = np.array([score for row in rows for score in row.scores], dtype=np.float32)
        if len(scores) not in (0, len(wrong) + len(rows)):
            raise InputError(
                f"{len(rows)} pairs with {len(wrong)} negatives have {len(scores)} scores",
                "give no scores, or one for each second text and each negative",
            )
        negatives = _Candidates(
            _Sequences.of(
                [*encoding.ids, *suffix] for encoding in _encoded(wrong, of, tokenizer, text_length)
            ),
            np.array([len(row.negatives) for row in rows], dtype=np.int64),
            scores if len(scores) else None,
        )
    return Examples(
        texts=_Sequences.of([*encoding.ids, *suffix] for encoding in first),
        others=_Sequences.of([*encoding.ids, *suffix] for encoding in second),
        negatives=negatives,
    )


def tagged_examples(
    source: Iterable[TaggedText],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    names: Sequence[str] = (),
) -> Examples:
    """Words with a tag each: the label of the first token; other tokens get `IGNORE_INDEX`.

    Words are read with a space between them, as `tag` and `tasks.entities` read them.
    """
    rows = _non_empty(source)
    locations = [row.location for row in rows for _ in row.tags]
    tags_of_all = [tag for row in rows for tag in row.tags]
    tag_numbers, class_names = label_ids(tags_of_all, locations, names or tag_names(tags_of_all))
    texts, spans = zip(*(join_words(row.words) for row in rows), strict=True)
    locations = [row.location for row in rows]
    encoded = _encoded(texts, locations, tokenizer, max_length, offsets=True)
    numbers, tags = iter(tag_numbers), []
    for encoding, row, words in zip(encoded, rows, spans, strict=True):
        own = list(islice(numbers, len(row.tags)))
        tags.append(_spread(first_tokens(encoding.offsets, words), own, len(encoding)))
    ids = _Sequences.of(encoding.ids for encoding in encoded)
    return Examples(texts=ids, tags=_Sequences.of(tags), names=class_names)


def tag_names(tags: Iterable[Label]) -> tuple[str, ...]:
    """The names of the classes of tags: all tags of their scheme; none if tags are numbers."""
    distinct = set(tags)
    if not all(isinstance(tag, str) for tag in distinct):
        return ()
    return tag_schemes.complete_names(str(tag) for tag in distinct)


def _spread(firsts: Sequence[int | None], tags: Sequence[int], count: int) -> list[int]:
    """
    >>> _spread([1, 3, None], [5, 7, 9], 5)
    [-100, 5, -100, 7, -100]
    """
    labels = [IGNORE_INDEX] * count
    for first, tag in zip(firsts, tags, strict=True):
        if first is not None and labels[first] == IGNORE_INDEX:
            labels[first] = tag
    return labels


def _non_empty(source: Iterable[Example]) -> list[Example]:
    rows = list(source)
    if not rows:
        raise InputError("the source has no examples", "give at least one")
    return rows


def label_ids(
    labels: Sequence[Label], locations: Sequence[str], names: Sequence[str]
) -> tuple[list[int], tuple[str, ...]]:
    """Labels as class numbers, and the class names if labels are names."""
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise InputError(
            "some labels are names and some are numbers", "use only names or only numbers"
        )
    if kinds == {str} and not names:
        names = sorted({str(label) for label in labels})
    number_of = {name: number for number, name in enumerate(names)}
    numbers = []
    for label, location in zip(labels, locations, strict=True):
        number = number_of.get(label) if isinstance(label, str) else label
        if number is None or (names and number >= len(names)):
            raise InputError(
                f"{location}: the label {label!r} is unknown", f"use one of: {', '.join(names)}"
            )
        numbers.append(number)
    return numbers, tuple(names)


def _encoded(
    texts: Sequence[str],
    locations: Sequence[str],
    tokenizer: Any,
    max_length: int | None,
    *,
    offsets: bool = False,
) -> list[Any]:
    """Encodings with the tokenizer's special tokens, truncated to `max_length` tokens."""
    copy = truncating_copy(tokenizer, max_length)
    encodings: list[Any] = []
    # Tags need offsets, which the fast version leaves out.
    encode = copy.encode_batch if offsets else copy.encode_batch_fast
    for start in range(0, len(texts), AT_A_TIME):
        encodings += encode(texts[start : start + AT_A_TIME])
    for encoding, location in zip(encodings, locations, strict=True):
        if not encoding.ids:
            raise InputError(f"{location} has a text without tokens", "remove empty texts")
    return encodings
