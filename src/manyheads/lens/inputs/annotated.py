"""Texts annotated with pairs of words, one of which should attend to the other."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.errors import InputError
from manyheads.tokenizers import plain_tokenizer, surrogates_refused


@dataclass(frozen=True, slots=True, kw_only=True)
class WordPair:
    """A source word and its targets: the source should attend most to one of them.

    It chooses among `candidates`, by default all other words. `rivals` are words that resemble the
    targets. Pairs of the same `task` are counted together.
    """

    task: str
    source: int
    targets: tuple[int, ...]
    candidates: tuple[int, ...] = ()
    rivals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnnotatedText:
    """A text, its words as spans of characters, and its pairs of words.

    Texts of the same `group` (a half of a treebank, or a draw of synthetic texts) are also counted
    on their own.
    """

    text: str
    words: tuple[tuple[int, int], ...]
    pairs: tuple[WordPair, ...]
    group: int = 0

    @classmethod
    def from_words(cls, words: Sequence[str], pairs: Sequence[WordPair]) -> "AnnotatedText":
        """Join words by spaces, except around line ends, which are words too.

        >>> AnnotatedText.from_words(["1", "pear", "\\n", "2"], []).words
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
class AlignedText:
    """Token ids, the positions of each word's tokens among them, and the pairs of words."""

    ids: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    pairs: tuple[WordPair, ...]
    group: int = 0


def align_texts(
    tokenizer: Any,
    texts: Iterable[AnnotatedText],
    max_length: int | None = None,
    bos: tuple[int, ...] = (),
) -> list[AlignedText]:
    """Tokenize texts, each after `bos`, and find the tokens of every word.

    Pairs with a word without tokens are dropped, and so are texts without pairs and texts longer
    than `max_length`.
    """
    tokenizer = plain_tokenizer(tokenizer)
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    aligned = []
    for each in texts:
        with surrogates_refused([each.text]):
            encoded = tokenizer.encode(each.text)
        ids = (*bos, *encoded.ids)
        if max_length is not None and len(ids) > max_length:
            continue
        by_word = []
        for places in align_words(encoded, each.text, each.words):
            tokens = tuple(len(bos) + place for place in places)
            # The first token is an attention sink, not part of a word; nor are unknown tokens.
            is_word = unknown not in {ids[place] for place in tokens}
            by_word.append(tokens[0 in tokens :] if is_word else ())
        words = tuple(by_word)
        pairs = [left for pair in each.pairs if (left := _drop_missing(pair, words)) is not None]
        if pairs:
            aligned.append(AlignedText(ids, words, tuple(pairs), each.group))
    return aligned


def align_words(
    encoded: Any, text: str, words: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word; a token belongs to the word of its first character.

    Special tokens and spaces between words belong to none.
    """
    owner: dict[int, int] = {}
    for word, (start, stop) in enumerate(words):
        if not 0 <= start <= stop <= len(text):
            raise InputError(
                f"word {word} spans characters {start} to {stop} of {len(text)}",
                "pass spans within the text",
            )
        owner |= dict.fromkeys(range(start, stop), word)
    tokens: list[list[int]] = [[] for _ in words]
    special = encoded.special_tokens_mask
    for position, (start, stop) in enumerate(encoded.offsets):
        if special[position]:
            continue
        # Byte-level tokens begin with the space before a word; a line end is a word of its own.
        first = next((at for at in range(start, stop) if at in owner), None)
        if first is not None:
            tokens[owner[first]].append(position)
    return tuple(tuple(words) for words in tokens)


def _drop_missing(pair: WordPair, words: tuple[tuple[int, ...], ...]) -> WordPair | None:
    """The pair without words that have no token; None if it cannot be scored without them."""
    targets = tuple(word for word in pair.targets if words[word])
    candidates = tuple(word for word in pair.candidates if words[word])
    lost = bool(pair.candidates) and len(candidates) < len(pair.candidates)
    if not words[pair.source] or not targets or lost:
        return None
    rivals = tuple(word for word in pair.rivals if words[word])
    return replace(pair, targets=targets, candidates=candidates, rivals=rivals)


# The fraction of texts that must have a counterpart; published files differ in a few words.
MIN_MATCHED = 0.9
COREFERENCE_TASK = "pronoun to its mention"
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
    """A text without its brackets, and the spans of the mention and of its pronouns."""

    text: str
    mention: Span
    pronouns: tuple[Span, ...]

    @property
    def mention_text(self) -> str:
        """The mention in lower case."""
        return self.text[slice(*self.mention)].lower()


def read_references(path: Path | str) -> list[Reference]:
    """Read a file with one text per line, a mention and its pronouns in brackets.

    The mention is the bracket without a pronoun, or the first if all are pronouns; of two mentions
    the second refers to the first.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist", "pass a file of texts with brackets")
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason})", "convert it") from None
    references = [
        _reference(f"{path}:{number}", line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not references:
        raise InputError(f"{path} has no texts", "write one per line, with two brackets each")
    return references


def check_counterbalanced(
    paths: Sequence[Path | str], parts: Sequence[Sequence[Reference]]
) -> None:
    """Raise unless there is one part, or two with the same texts but for the pronouns."""
    if not 1 <= len(parts) <= 2:
        raise InputError(
            f"{len(parts)} files of coreference are given",
            "pass two, such as the pro- and the anti-stereotyped half of WinoBias",
        )
    if len(parts) == 1:
        return
    one, two = ({_without_pronouns(text): text.text for text in part} for part in parts)
    matched = sum(text in two and two[text] != one[text] for text in one)
    if matched < MIN_MATCHED * max(len(one), len(two)):
        raise InputError(
            f"{matched} of the {max(len(one), len(two))} texts of {paths[0]} and {paths[1]} occur "
            "in both with different pronouns",
            "pass two files with the same texts, the pronouns exchanged",
        )


def _without_pronouns(reference: Reference) -> tuple[str, ...]:
    """The text between its pronouns, and its mention."""
    ends = [0, *(end for span in reference.pronouns for end in span), len(reference.text)]
    between = [
        reference.text[start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)
    ]
    return (*between, reference.mention_text)


def coreference_texts(references: Sequence[Reference]) -> Iterator[AnnotatedText]:
    """Pair each pronoun with its mention, among all mentions in the text.

    Mentions are the words in brackets anywhere in the file, in upper or lower case: if one line has
    [the cook] and another [the mover], a text with both has two candidates.
    """
    known = {reference.mention_text for reference in references} - PRONOUNS
    # Longer mentions first, so that "the head cook" is not matched as "the head".
    longest_first = sorted(known, key=len, reverse=True)
    pattern = re.compile(
        "|".join(rf"\b{re.escape(mention)}\b" for mention in longest_first), flags=re.IGNORECASE
    )
    for reference in references:
        bracketed = reference.mention, *reference.pronouns
        matches = [match.span() for match in pattern.finditer(reference.text)]
        others = [
            (start, end)
            for start, end in matches
            if not any(start < stop and first < end for first, stop in bracketed)
        ]
        words = tuple(sorted([*bracketed, *others]))
        mentions = [word for word, span in enumerate(words) if span not in reference.pronouns]
        targets = [
            word
            for word in mentions
            if reference.text[slice(*words[word])].lower() == reference.mention_text
        ]
        pairs = tuple(
            WordPair(
                task=COREFERENCE_TASK,
                source=words.index(pronoun),
                targets=tuple(targets),
                candidates=tuple(mentions),
            )
            for pronoun in reference.pronouns
        )
        yield AnnotatedText(reference.text, words, pairs)


def _reference(where: str, line: str) -> Reference:
    number = NUMBER.match(line)
    line = line[number.end() :] if number else line
    pieces = list(BRACKETS.finditer(line))
    if len(pieces) < 2 or not line.count("[") == line.count("]") == len(pieces):
        raise InputError(
            f"{where} has {len(pieces)} brackets",
            "mark two, as in [The cook] knew that [he] was late",
        )
    spans = []
    for before, piece in enumerate(pieces):
        # Each removed bracket shifts the rest of the line.
        start = piece.start(1) - 2 * before - 1
        spans.append((start, start + len(piece[1])))
    text = BRACKETS.sub(r"\1", line)
    contents = [text[slice(*span)].strip().lower() for span in spans]
    if not all(contents):
        raise InputError(f"{where} has an empty bracket", "put a mention in it")
    mentions = [
        span for span, content in zip(spans, contents, strict=True) if content not in PRONOUNS
    ]
    if len(mentions) > 1 and len(spans) > 2:
        raise InputError(
            f"{where} has {len(mentions)} mentions in brackets", "mark one mention and its pronouns"
        )
    mention = mentions[0] if mentions else spans[0]
    return Reference(text, mention, tuple(span for span in spans if span != mention))
