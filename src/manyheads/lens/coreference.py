"""A mention and its pronouns in brackets, and how heads choose among mentions.

One text a line, as in WinoBias (arXiv 1804.06876), perhaps with a number in front:
"[The mover] thanked the cook because [she] had lost [her] key."
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.errors import InputError
from manyheads.lens.marked import Pair, Written

__all__ = ["Reference", "coreference_texts", "read_references"]

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
