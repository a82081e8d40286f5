"""Tokenizers without padding, and with no truncation or one of our own."""

import codecs
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from manyheads.errors import InputError

# The characters of a word or a token in a text, from the first to before the last.
Span = tuple[int, int]


def disable_padding_and_truncation(tokenizer: Any) -> Any:
    """The same tokenizer, which from now on neither pads nor truncates."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@contextmanager
def unreadable_refused(problem: str, remedy: str) -> Iterator[None]:
    """Refuse a tokenizer.json that the package cannot read.

    It raises no narrower class than Exception, and panics with one that is not even that.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first = str(error).partition("\n")[0][:200]
        raise InputError(f"{problem} ({first})", remedy) from None


def plain_copy(tokenizer: Any) -> Any:
    """A copy that neither pads nor truncates."""
    with unreadable_refused("the tokenizer contradicts itself", "use a complete tokenizer.json"):
        copy = type(tokenizer).from_str(tokenizer.to_str())
    return disable_padding_and_truncation(copy)


def plain_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself if it neither pads nor truncates, else a copy that does not.

    Copying one of a large vocabulary takes a third of a second. The result must not be changed.
    """
    if tokenizer.padding is None and tokenizer.truncation is None:
        return tokenizer
    return plain_copy(tokenizer)


def truncating_copy(tokenizer: Any, max_length: int | None) -> Any:
    """A copy that does not pad and truncates texts to `max_length` tokens, special tokens included.

    It truncates on the same side as the tokenizer, by default at the end.
    """
    copy = plain_copy(tokenizer)
    if max_length is None:
        return copy
    added = copy.num_special_tokens_to_add(False)
    if max_length <= added:
        raise InputError(
            f"max_length must be above the {added} special tokens, got {max_length}",
            f"use {added + 1} or more",
        )
    side = (tokenizer.truncation or {}).get("direction", "right")
    copy.enable_truncation(max_length, direction=side)
    return copy


@contextmanager
def surrogates_refused(texts: Sequence[Any], first: int = 0) -> Iterator[None]:
    """Name the text, counted from `first`, that a tokenizer refuses because it is not Unicode."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        for index, text in enumerate(texts, start=first):
            try:
                (text if isinstance(text, str) else " ".join(map(str, text))).encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"text {index} has a lone surrogate at character {error.start}",
                    "decode it again, for example with errors='replace'",
                ) from None
        raise


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token, with bytes for parts of a letter: <0xD0>; its name if it has no text."""
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    name = str(tokenizer.id_to_token(token) or f"token {token}")
    if REPLACEMENT_CHARACTER in text and set(name) <= BYTE_LEVEL.keys():
        coded = bytes(BYTE_LEVEL[character] for character in name)
        return coded.decode("utf-8", "manyheads.spell_bytes")
    return name if REPLACEMENT_CHARACTER in text or not text else text


def token_texts(tokenizer: Any, text: str, ids: list[int]) -> list[tuple[str, str | None]]:
    """For each token its text and the letters of `text` that begin in it.

    The letters of all tokens together are the text. A token inside a letter has none, "", and one
    that stands for no part of the text, such as [CLS], has None.
    """
    with surrogates_refused([text]):
        encoding = tokenizer.encode(text)
    if list(encoding.ids[: len(ids)]) != ids:
        return [(token_text(tokenizer, token), None) for token in ids]
    spans = [*encoding.offsets[: len(ids)], (len(text), len(text))]
    parts: list[tuple[str, str | None]] = []
    end = 0
    for token, (start, stop), following in zip(ids, spans, spans[1:], strict=False):
        if start == stop:
            parts.append((token_text(tokenizer, token), None))
            continue
        # Tokens within one letter share its span.
        shared = start < end or following[0] < min(stop, following[1])
        whole = token_text(tokenizer, token) if shared else text[start:stop]
        parts.append((whole, text[max(start, end) : stop]))
        end = max(end, stop)
    return parts


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """Words as a text with a space between them, and the span of each.

    >>> join_words(["It", "'s", "late"])
    ("It 's late", [(0, 2), (3, 5), (6, 10)])
    """
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), spans


def first_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int | None]:
    """For each word the first token with characters of it, None if there is none.

    >>> first_tokens([(0, 0), (0, 2), (2, 6), (6, 12)], [(0, 6), (7, 12), (13, 15)])
    [1, 3, None]
    """
    positions: list[int | None] = []
    token, count = 0, len(offsets)
    for start, end in spans:
        while token < count and offsets[token][1] <= max(start, offsets[token][0]):
            token += 1
        positions.append(token if token < count and offsets[token][0] < end else None)
    return positions


def _byte_level() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones are themselves, others follow U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _spell_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    broken = error.object[error.start : error.end]
    return "".join(f"<0x{byte:02X}>" for byte in broken), error.end


REPLACEMENT_CHARACTER = "\ufffd"
BYTE_LEVEL = _byte_level()
codecs.register_error("manyheads.spell_bytes", _spell_bytes)
