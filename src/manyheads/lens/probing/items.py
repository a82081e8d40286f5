"""What a probe reads a label off: tokens, words or whole texts, and where their tokens stand."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from manyheads.encoding.text_reader import find_longest, reads_texts
from manyheads.errors import InputError
from manyheads.lens.inputs.annotated import Written, align
from manyheads.lens.inputs.cached_run import Part
from manyheads.lens.inputs.texts import Given, read
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ragged import Ragged
from manyheads.tokenizers import plain_copy

Level = Literal["token", "word", "text"]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing with a label: the text it is in, the places of its tokens, and its type.

    Two tokens of the same id are of one type, and so are two words of the same letters.
    """

    text: int
    places: tuple[int, ...]
    type: Hashable
    label: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """All that has a label, and the texts it is found in."""

    given: Given
    level: Level
    each: tuple[Item, ...]


def find_items(part: Part, texts: Any, labels: Sequence[Any]) -> Items:
    """Labels by text, by token, or by word where texts are lists of words; None labels nothing."""
    labels = [each.tolist() if hasattr(each, "tolist") else each for each in labels]
    if _are_words(texts) and not isinstance(part.model, Seq2Seq):
        return _words(part.model, texts, labels)
    given = read(part.model, texts)
    if len(labels) != len(given):
        raise InputError(f"there are {len(labels)} labels for {len(given)} texts", "give one each")
    if all(each is None or isinstance(each, str | int) for each in labels):
        return Items(given, "text", _texts(part, given, labels))
    return Items(given, "token", _tokens(part, given, labels))


def split_words(
    model: Model, sentences: Sequence[Sequence[str]]
) -> tuple[Given, list[tuple[tuple[int, ...], ...]]]:
    """Sentences as token ids, and for each the places of its words' tokens.

    Words are written with spaces between them. A word without a token of its own has no place.
    """
    reader = reads_texts(model)
    if reader.tokenizer is None:
        raise InputError(
            "this model has no tokenizer to read words with", "set model.tokenizer, or give ids"
        )
    longest = find_longest(reader, None)
    tokenizer = plain_copy(reader.tokenizer)
    rows, places = [], []
    for number, words in enumerate(sentences):
        written = Written.spaced(words, ())
        encoded = tokenizer.encode(written.text)
        if longest is not None and len(encoded.ids) > longest:
            raise InputError(
                f"sentence {number} has {len(encoded.ids)} tokens, more than {longest}",
                "leave it out or split it",
            )
        rows.append(encoded.ids)
        places.append(align(encoded, written.text, written.words))
    return read(model, rows), places


def _are_words(texts: Any) -> bool:
    if isinstance(texts, str | Ragged | Given) or not isinstance(texts, Sequence) or not texts:
        return False
    first = texts[0]
    return isinstance(first, list | tuple) and bool(first) and isinstance(first[0], str)


def _words(model: Model, texts: Sequence[Sequence[str]], labels: Sequence[Any]) -> Items:
    given, places = split_words(model, texts)
    found = []
    if len(labels) != len(texts):
        raise InputError(f"there are {len(labels)} labels for {len(texts)} texts", "give one each")
    for text, (words, mine) in enumerate(zip(texts, labels, strict=True)):
        _check_count(text, "words", len(words), mine)
        for word, where, label in zip(words, places[text], mine, strict=True):
            if where and label is not None:
                found.append(Item(text, where, word, label))
    return Items(given, "word", tuple(found))


def _tokens(part: Part, given: Given, labels: Sequence[Any]) -> tuple[Item, ...]:
    found = []
    for text, (length, mine) in enumerate(zip(_lengths(part, given), labels, strict=True)):
        _check_count(text, "tokens", length, mine)
        ids = _ids(part, given, text)
        for place, label in enumerate(mine):
            if label is not None:
                kind = (text, place) if ids is None else ids[place]
                found.append(Item(text, (place,), kind, label))
    return tuple(found)


def _texts(part: Part, given: Given, labels: Sequence[Any]) -> tuple[Item, ...]:
    found = []
    for text, (length, label) in enumerate(zip(_lengths(part, given), labels, strict=True)):
        if label is not None:
            ids = _ids(part, given, text)
            kind = text if ids is None else tuple(ids)
            found.append(Item(text, tuple(range(length)), kind, label))
    return tuple(found)


def _check_count(text: int, what: str, count: int, labels: Any) -> None:
    if isinstance(labels, str | int) or labels is None or len(labels) != count:
        got = 1 if isinstance(labels, str | int) or labels is None else len(labels)
        raise InputError(
            f"text {text} has {count} {what} and {got} labels",
            "give one each, None where there is none",
        )


def _lengths(part: Part, given: Given) -> tuple[int, ...]:
    if part.stack_name == "encoder" and given.source is not None:
        return given.source.lengths.each
    return given.lengths(part.model).each


def _ids(part: Part, given: Given, text: int) -> list[int] | None:
    ids = given.source if part.stack_name == "encoder" else given.ids
    return None if ids is None else ids.of(text).tolist()
