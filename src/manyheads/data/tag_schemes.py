"""Tags of words as entity spans and back: IOB2, BILOU and IO.

A tag is "O" outside of entities, else a prefix and a type, as in "B-person". IOB2 marks the first
word of an entity by B and the others by I; BILOU marks the last word by L and an entity of one word
by U, which some files write as E and S; IO has I alone, so that neighbors of one type are one
entity. Tags without a prefix are types, read as IO.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import InputError

Scheme = Literal["IOB2", "BILOU", "IO"]
OUTSIDE = "O"
PREFIXED = re.compile(r"([BILUES])-(.+)", re.DOTALL)
# Other letters for the same prefixes.
SAME_PREFIX = {"E": "L", "S": "U"}
PREFIXES: dict[Scheme, str] = {"IOB2": "BI", "BILOU": "BILU", "IO": "I"}


class TagSpan(NamedTuple):
    """An entity of the words from `start` to before `end`."""

    type: str
    start: int
    end: int


def parse_tag(tag: str) -> tuple[str, str]:
    """The prefix and the type of a tag.

    >>> parse_tag("B-person"), parse_tag("S-person"), parse_tag("person"), parse_tag("O")
    (('B', 'person'), ('U', 'person'), ('I', 'person'), ('O', ''))
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    parsed = PREFIXED.fullmatch(tag)
    if parsed is None:
        return "I", tag
    return SAME_PREFIX.get(parsed[1], parsed[1]), parsed[2]


def scheme_of(tags: Iterable[str]) -> Scheme:
    """The simplest scheme that has all these tags.

    >>> scheme_of(["O", "B-x", "I-x"]), scheme_of(["U-x"]), scheme_of(["O", "x"])
    ('IOB2', 'BILOU', 'IO')
    """
    prefixes = {parse_tag(tag)[0] for tag in tags}
    if prefixes & {"L", "U"}:
        return "BILOU"
    return "IOB2" if "B" in prefixes else "IO"


def spans_of_tags(tags: Sequence[str]) -> list[TagSpan]:
    """The entities of tags in any scheme.

    Inconsistent tags are read as conlleval does: a tag that continues nothing starts an entity, and
    an entity ends where its type does.

    >>> spans_of_tags(["B-x", "I-x", "I-y", "O", "I-x", "B-x"])[:2]
    [TagSpan(type='x', start=0, end=2), TagSpan(type='y', start=2, end=3)]
    """
    spans: list[TagSpan] = []
    open_type, start = "", 0
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = parse_tag(tag)
        if open_type and (kind != open_type or prefix in "BU"):
            spans.append(TagSpan(open_type, start, index))
            open_type = ""
        if kind and not open_type:
            open_type, start = kind, index
        if open_type and prefix in "LU":
            spans.append(TagSpan(open_type, start, index + 1))
            open_type = ""
    return spans


def tags_of_spans(spans: Iterable[TagSpan], count: int, scheme: Scheme) -> list[str]:
    """The tags of `count` words, of which some are entities.

    >>> tags_of_spans([TagSpan("x", 0, 2), TagSpan("y", 3, 4)], 4, "BILOU")
    ['B-x', 'L-x', 'O', 'U-y']
    """
    tags = [OUTSIDE] * count
    for kind, start, end in spans:
        if not 0 <= start < end <= count:
            raise InputError(f"{kind}: words {start} to {end} are not among {count} words")
        for index in range(start, end):
            prefix = "I"
            if scheme == "BILOU" and index == end - 1:
                prefix = "U" if index == start else "L"
            elif scheme != "IO" and index == start:
                prefix = "B"
            if tags[index] != OUTSIDE:
                raise InputError(f"two entities share word {index}", "give entities apart")
            tags[index] = f"{prefix}-{kind}"
    return tags


def convert_tags(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The same entities in another scheme.

    >>> convert_tags(["B-x", "I-x", "O", "B-y"], "BILOU")
    ['B-x', 'L-x', 'O', 'U-y']
    """
    return tags_of_spans(spans_of_tags(tags), len(tags), scheme)


def complete_names(tags: Iterable[str]) -> tuple[str, ...]:
    """All tags of the scheme for the types among these, sorted, also those that do not occur.

    So a file without any one tag, such as the I of a rare type, makes the same classes. Tags
    without prefixes stay as they are.

    >>> complete_names(["O", "B-x"]), complete_names(["VERB", "NOUN"])
    (('B-x', 'I-x', 'O'), ('NOUN', 'VERB'))
    """
    distinct = set(tags)
    prefixed = [match for tag in distinct if (match := PREFIXED.fullmatch(tag))]
    if not prefixed or len(prefixed) < len(distinct - {OUTSIDE}):
        return tuple(sorted(distinct))
    letters = PREFIXES[scheme_of(distinct)]
    if {match[1] for match in prefixed} & set(SAME_PREFIX):
        letters = "BIES"
    types = {match[2] for match in prefixed}
    return tuple(sorted({OUTSIDE} | {f"{prefix}-{kind}" for prefix in letters for kind in types}))


class Transitions(NamedTuple):
    """Which tags may begin a text, follow each other (row before column), and end it."""

    first: NDArray[np.bool_]
    following: NDArray[np.bool_]
    last: NDArray[np.bool_]


def allowed_transitions(names: Sequence[str]) -> Transitions:
    """The transitions of a scheme that give consistent tags.

    >>> allowed_transitions(["B-x", "I-x", "O"]).following.tolist()
    [[True, True, True], [True, True, True], [True, False, True]]
    """
    scheme, parsed = scheme_of(names), [parse_tag(name) for name in names]
    continues = np.array([scheme != "IO" and prefix in "IL" for prefix, _ in parsed])
    unfinished = np.array([scheme == "BILOU" and prefix in "BI" for prefix, _ in parsed])
    following = np.zeros((len(names), len(names)), dtype=bool)
    for row, (prefix, kind) in enumerate(parsed):
        for column, (_, next_kind) in enumerate(parsed):
            if continues[column]:
                following[row, column] = prefix in "BI" and kind == next_kind
            else:
                following[row, column] = not unfinished[row]
    return Transitions(~continues, following, ~unfinished)
