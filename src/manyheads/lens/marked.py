"""Texts in which some words should look at others: brackets, numbers, syntax, coreference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyheads.errors import InputError
from manyheads.tokenizing import plain_copy

__all__ = ["MarkedText", "Pair", "Written", "align", "mark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A word, and those of which one should be what it looks at most.

    It chooses among `candidates`, or among all other words where there are none. `rivals` are words
    like the right ones, to be told from them. Pairs of the same `task` are counted together.
    """

    task: str
    source: int
    targets: tuple[int, ...]
    candidates: tuple[int, ...] = ()
    rivals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """A text, its words as spans of characters, and which of them should look at which."""

    text: str
    words: tuple[tuple[int, int], ...]
    pairs: tuple[Pair, ...]

    @classmethod
    def spaced(cls, words: Sequence[str], pairs: Sequence[Pair]) -> "Written":
        """Words with spaces between them, but for line ends, which are words too.

        >>> Written.spaced(["1", "pear", "\\n", "2"], []).words
        ((0, 1), (2, 6), (6, 7), (7, 8))
        """
        text, spans = "", []
        for word in words:
            if text and word != "\n" and not text.endswith("\n"):
                text += " "
            spans.append((len(text), len(text) + len(word)))
            text += word
        return cls(text, tuple(spans), tuple(pairs))


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Token ids, the places of each word's tokens among them, and the pairs of words."""

    ids: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...]


def mark(
    tokenizer: Any,
    written: Iterable[Written],
    longest: int | None = None,
    begin: tuple[int, ...] = (),
) -> list[MarkedText]:
    """Texts with their words found among the tokens, after what they should `begin` with.

    Pairs with a word that has no token of its own are left out, and so are texts that have no pair
    left or are longer than the model reads.
    """
    tokenizer = plain_copy(tokenizer)
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    found = []
    for each in written:
        encoded = tokenizer.encode(each.text)
        ids = (*begin, *encoded.ids)
        if longest is not None and len(ids) > longest:
            continue
        words = tuple(
            tuple(place + len(begin) for place in places)
            for places in align(encoded, each.text, each.words)
        )
        # The first token takes what heads have left over: it can be no word. Nor can unknown ones.
        words = tuple(
            () if 0 in places or unknown in {ids[place] for place in places} else places
            for places in words
        )
        pairs = [kept for pair in each.pairs if (kept := _kept(pair, words)) is not None]
        if pairs:
            found.append(MarkedText(ids, words, tuple(pairs)))
    return found


def align(encoded: Any, text: str, words: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word; a token belongs to the word that its first letter lies in.

    Special tokens belong to no word, nor do spaces between words.
    """
    owner: dict[int, int] = {}
    for word, (start, stop) in enumerate(words):
        if not 0 <= start <= stop <= len(text):
            raise InputError(
                f"word {word} spans characters {start} to {stop} of {len(text)}",
                "give spans within the text",
            )
        owner |= dict.fromkeys(range(start, stop), word)
    places: list[list[int]] = [[] for _ in words]
    special = encoded.special_tokens_mask
    for place, (start, stop) in enumerate(encoded.offsets):
        if special[place]:
            continue
        # Byte-level tokens begin with the space before a word; a line end is a word of its own.
        first = next((at for at in range(start, stop) if at in owner), None)
        if first is not None:
            places[owner[first]].append(place)
    return tuple(tuple(each) for each in places)


def _kept(pair: Pair, words: tuple[tuple[int, ...], ...]) -> Pair | None:
    """The pair without what has no token, or None if too little is left of it."""
    targets = tuple(word for word in pair.targets if words[word])
    candidates = tuple(word for word in pair.candidates if words[word])
    lost = bool(pair.candidates) and len(candidates) < len(pair.candidates)
    if not words[pair.source] or not targets or lost:
        return None
    rivals = tuple(word for word in pair.rivals if words[word])
    return replace(pair, targets=targets, candidates=candidates, rivals=rivals)
