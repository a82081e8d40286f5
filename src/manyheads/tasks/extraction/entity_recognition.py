"""Entities in texts of any length, from a model that classifies tokens."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.argument_checks import checked
from manyheads.data import tag_schemes
from manyheads.encoding import classify, text_reader, word_reader
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.models import build, readout
from manyheads.tokenizers import Span, join_words

# Scripts that write no spaces, whose characters are words of their own.
IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
SYMBOLS = (
    r"!-/:-@\[-`{-~¡-©«-±´¶-¸»¿\u2010-\u205e\u2190-\u2bff\u3000-\u303f\uff00-\uff0f"
    r"\U0001f000-\U0001faff"
)
LETTERS = rf"[^\s{SYMBOLS}{IDEOGRAPHS}]+"
CLITIC = r"(?:s|re|ve|ll|m|d)\b"
WORD = re.compile(
    r"(?:https?://|www\.)\S*[^\s.,;:!?)\]\"'’”]"
    rf"|[@#]?{LETTERS}(?:(?:['’](?!{CLITIC})|[-‐.&/_:@]){LETTERS})*"
    rf"|['’]{CLITIC}"
    rf"|[{IDEOGRAPHS}]"
    # The same mark several times is one word, such as "...".
    rf"|([{SYMBOLS}])\1*",
    re.IGNORECASE,
)
# Keeps words that the model could not read outside of entities where nothing else decides.
PREFER_OUTSIDE = 1e-3


class Entity(NamedTuple):
    """A part of a text, from character `start` to before `end`, and its type.

    `score` is the mean over its words of the probability of the type, by whichever tag.
    """

    type: str
    text: str
    start: int
    end: int
    score: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the score with four digits."""
        return {**self._asdict(), "score": round(self.score, 4)}


@checked
def entities(
    model: build.Model,
    texts: str | Sequence[Any],
    *,
    constrained: bool = True,
    min_score: float = 0.0,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    progress: bool = True,
) -> list[list[Entity]]:
    """The entities of each text, in order; a single string is a list of one.

    A text may also be a list of words; its entities are then those of the words with a space
    between them. The classes of the model are tags of IOB2, BILOU or IO, found from their names.
    Of all consistent sequences of tags the most likely one is taken, or with `constrained=False`
    the most likely tag of each word, where a tag that continues nothing starts an entity. Texts of
    more than `max_length` tokens are read in windows that overlap, so that nothing is left out.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.checkpoints.folder import load
    >>> model = with_classes(load("house-bert"), ("O", "B-person", "I-person"), of="tokens")
    >>> text = "Anna met Boris in Riga."
    >>> all(text[e.start : e.end] == e.text for e in entities(model, text)[0])
    True
    """
    if not 0 <= min_score <= 1:
        raise InputError(f"min_score must be in [0, 1], got {min_score}")
    text_reader.check_texts(texts)
    spanned = []
    for index, text in enumerate([texts] if isinstance(texts, str) else texts):
        if isinstance(text, str):
            spanned.append(word_reader.SpannedText(text, split_words(text)))
        elif isinstance(text, list | tuple) and all(isinstance(word, str) for word in text):
            spanned.append(word_reader.SpannedText(*join_words(text)))
        else:
            raise InputError(
                f"text {index} is {kind_of(text)}", "give a string, or a list of words"
            )
    options = word_reader.WordOptions(
        batch_tokens=batch_tokens,
        max_length=max_length,
        windows=True,
        progress=progress,
        doing="finding entities",
    )
    shares = word_reader.read_words(model, spanned, options)
    names = tag_names(model)
    transitions = tag_schemes.allowed_transitions(names) if constrained else None
    results = []
    for text, probabilities in zip(spanned, shares, strict=True):
        rows = probabilities.double().numpy()
        spans = tag_schemes.spans_of_tags(decode_tags(rows, names, transitions))
        listed = [_entity(text, span, rows, names) for span in spans]
        results.append([entity for entity in listed if entity.score >= min_score])
    return results


def split_words(text: str) -> list[Span]:
    """The words of a text as taggers count them: punctuation and 's are words of their own.

    >>> text = "It's O'Brien, at www.a.org..."
    >>> [text[start:end] for start, end in split_words(text)]
    ['It', "'s", "O'Brien", ',', 'at', 'www.a.org', '...']
    """
    return [match.span() for match in WORD.finditer(text)]


def tag_names(model: build.Model) -> tuple[str, ...]:
    """The tags that a model gives to words."""
    head = model.config.readout
    assert isinstance(head, readout.TokenHead)
    names = classify.class_names_of(model, head)
    if tag_schemes.OUTSIDE not in names:
        raise InputError(
            f"the model has no class {tag_schemes.OUTSIDE!r} for words outside of entities, but "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}",
            "train one on IOB2 or BILOU tags, or use manyheads.tag",
        )
    return names


def decode_tags(
    shares: NDArray[np.float64], names: Sequence[str], transitions: tag_schemes.Transitions | None
) -> list[str]:
    """The most likely tags of the words of a text, by Viterbi's algorithm with transitions.

    Rows of NaN are words that were not read, which may have any tag.
    """
    if not len(shares):
        return []
    unread = np.isnan(shares[:, 0])
    with np.errstate(divide="ignore"):
        scores = np.log(np.where(unread[:, None], 1.0, shares))
    scores = np.maximum(scores, -1e3)
    scores[unread, names.index(tag_schemes.OUTSIDE)] += PREFER_OUTSIDE
    if transitions is None:
        return [names[index] for index in scores.argmax(1)]
    moves = np.where(transitions.following, 0.0, -np.inf)
    total = scores[0] + np.where(transitions.first, 0.0, -np.inf)
    before = np.zeros(scores.shape, dtype=np.int64)
    for word in range(1, len(scores)):
        reached = total[:, None] + moves
        before[word] = reached.argmax(0)
        total = reached.max(0) + scores[word]
    best = int((total + np.where(transitions.last, 0.0, -np.inf)).argmax())
    path = [best]
    for word in range(len(scores) - 1, 0, -1):
        path.append(int(before[word, path[-1]]))
    return [names[index] for index in reversed(path)]


def _entity(
    spanned: word_reader.SpannedText,
    span: tag_schemes.TagSpan,
    shares: NDArray[np.float64],
    names: Sequence[str],
) -> Entity:
    start, end = spanned.spans[span.start][0], spanned.spans[span.end - 1][1]
    of_type = [
        index for index, name in enumerate(names) if tag_schemes.parse_tag(name)[1] == span.type
    ]
    words = shares[span.start : span.end, of_type].sum(1)
    scores = words[~np.isnan(words)]
    score = min(float(scores.mean()), 1.0) if scores.size else 0.0
    return Entity(span.type, spanned.text[start:end], start, end, score)


@checked
def entities_of_tags(words: Sequence[str], tags: Sequence[str]) -> list[Entity]:
    """The entities of tagged words, with offsets in the words with a space between them.

    >>> entities_of_tags(["in", "New", "York"], ["O", "B-place", "I-place"])
    [Entity(type='place', text='New York', start=3, end=11, score=1.0)]
    """
    if len(words) != len(tags):
        raise InputError(f"there are {len(words)} words and {len(tags)} tags", "give one per word")
    text, spans = join_words(words)
    results = []
    for kind, first, last in tag_schemes.spans_of_tags(tags):
        start, end = spans[first][0], spans[last - 1][1]
        results.append(Entity(kind, text[start:end], start, end))
    return results
