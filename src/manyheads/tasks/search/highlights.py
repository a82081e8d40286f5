"""Which words of a passage a query names, and the part of the passage with most of them."""

import re
from collections.abc import Sequence

WORD = re.compile(r"\w+")
# Words that say nothing about the subject, unless a query has no others.
FUNCTION_WORDS = frozenset(
    WORD.findall(
        "a an and are as at be been but by can did do does for from had has have how i if in into "
        "is it its me my no not of on or so such than that the their them then there these they "
        "this to us was we were what when where which who why will with you your"
    )
)
# Two words of which one begins with the other are the same from this length on: wing, wings.
SHORTEST_STEM = 4
# How much longer the longer one may be: heat, heating.
LONGEST_ENDING = 3

Span = tuple[int, int]


def content_words(text: str) -> set[str]:
    """The words of a text that say something about its subject."""
    return {word.casefold() for word in WORD.findall(text)} - FUNCTION_WORDS


def highlight(query: str, text: str) -> list[Span]:
    """The first and the last character (exclusive) of each word that the query names.

    >>> text = "Heated wings in a flow"
    >>> [text[start:end] for start, end in highlight("a heated wing", text)]
    ['Heated', 'wings']
    """
    named = content_words(query) or {word.casefold() for word in WORD.findall(query)}
    return [
        match.span()
        for match in WORD.finditer(text)
        if any(_same(match.group().casefold(), word) for word in named)
    ]


def _same(first: str, second: str) -> bool:
    short, long = sorted((first, second), key=len)
    if short == long:
        return True
    ending = len(long) - len(short)
    return len(short) >= SHORTEST_STEM and ending <= LONGEST_ENDING and long.startswith(short)


def best_excerpt(text: str, spans: Sequence[Span], length: int) -> Span:
    """The part of at most `length` characters with the most highlighted characters.

    It begins and ends between words, near the beginning of the text if nothing is highlighted.

    >>> text = "many words come first, and then a wing in a slipstream"
    >>> start, end = best_excerpt(text, highlight("wing slipstream", text), 24)
    >>> text[start:end]
    'a wing in a slipstream'
    """
    if len(text) <= length:
        return 0, len(text)
    best = 0
    most = -1
    for start, _ in spans:
        inside = sum(
            last - first for first, last in spans if start <= first < last <= start + length
        )
        if inside > most:
            best, most = start, inside
    last = max((last for _, last in spans if last <= best + length), default=0)
    # The highlighted words stand in the middle of the rest.
    begin = max(0, min(best - max(0, length - (last - best)) // 2, len(text) - length))
    end = begin + length
    if begin:
        gap = re.search(r"\s", text[begin - 1 : best + 1])
        begin = begin - 1 + gap.end() if gap else begin
    if end < len(text):
        gap = re.search(r"\s\S*$", text[max(begin, last) : end + 1])
        end = max(begin, last) + gap.start() if gap else end
    return begin, end
