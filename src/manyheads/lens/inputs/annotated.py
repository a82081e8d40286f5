"""Texts in which some words should look at others: brackets, numbers, syntax, coreference."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.errors import InputError
from manyheads.tokenizers import plain_copy


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


TASK = "pronoun to its mention"
PRONOUNS = frozenset(
    (
        *("he", "him", "his", "himself", "she", "her", "hers", "herself", "it", "its", "itself"),
        *("they", "them", "their", "theirs", "themselves", "who", "whom", "whose"),
    )
)
NUMBER = re.compile(r"\d+\s+")
BRACKETS = re.compile(r"\[([^\[\]]*)\]")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reference:
    """A text without its brackets, and where the mention and its pronouns stand in it."""

    text: str
    mention: Span
    pronouns: tuple[Span, ...]

    @property
    def mentioned(self) -> str:
        """Who is meant, in small letters."""
        return self.text[slice(*self.mention)].lower()


def read_references(path: Path | str) -> list[Reference]:
    """The lines of a file; one without a mention and a pronoun in brackets is refused.

    The mention is the piece that is no pronoun, or the first if all are; of two mentions the second
    is taken to point at the first.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no {path}", "name a file of texts with brackets")
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason})", "convert it") from None
    found = [
        _reference(f"{path}:{number}", line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"{path} has no text", "give one a line, with two pieces in brackets")
    return found


def coreference_texts(references: Sequence[Reference]) -> Iterator[Written]:
    """Each pronoun asked for its mention, among all mentions in the text.

    A mention is what stands in brackets anywhere in the file, in any case of letters: where one
    line has [the cook] and another the mover, a text with both has two candidates.
    """
    known = {reference.mentioned for reference in references} - PRONOUNS
    # Longer ones first, so that "the head cook" is not taken for "the head".
    longest_first = sorted(known, key=len, reverse=True)
    pattern = re.compile(
        "|".join(rf"\b{re.escape(each)}\b" for each in longest_first), flags=re.IGNORECASE
    )
    for reference in references:
        marked = reference.mention, *reference.pronouns
        others = [match.span() for match in pattern.finditer(reference.text)]
        apart = [span for span in others if not any(_meet(span, each) for each in marked)]
        words = tuple(sorted([*marked, *apart]))
        mentions = [word for word, span in enumerate(words) if span not in reference.pronouns]
        right = [
            word
            for word in mentions
            if reference.text[slice(*words[word])].lower() == reference.mentioned
        ]
        pairs = tuple(
            Pair(
                task=TASK,
                source=words.index(pronoun),
                targets=tuple(right),
                candidates=tuple(mentions),
            )
            for pronoun in reference.pronouns
        )
        yield Written(reference.text, words, pairs)


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _reference(place: str, line: str) -> Reference:
    number = NUMBER.match(line)
    line = line[number.end() :] if number else line
    pieces = list(BRACKETS.finditer(line))
    if len(pieces) < 2 or not line.count("[") == line.count("]") == len(pieces):
        raise InputError(
            f"{place} has {len(pieces)} pieces in brackets",
            "mark two, as in [The cook] knew that [he] was late",
        )
    spans = []
    for before, piece in enumerate(pieces):
        # Each bracket that is left out moves what follows it.
        start = piece.start(1) - 2 * before - 1
        spans.append((start, start + len(piece[1])))
    text = BRACKETS.sub(r"\1", line)
    said = [text[slice(*span)].strip().lower() for span in spans]
    if not all(said):
        raise InputError(f"{place} has nothing between brackets", "put a mention there")
    mentions = [span for span, each in zip(spans, said, strict=True) if each not in PRONOUNS]
    if len(mentions) > 1 and len(spans) > 2:
        raise InputError(
            f"{place} has {len(mentions)} mentions in brackets", "mark one, and its pronouns"
        )
    mention = mentions[0] if mentions else spans[0]
    return Reference(text, mention, tuple(span for span in spans if span != mention))
