"""The text of generated tokens, complete or piece by piece, up to a stop string."""

from collections.abc import Sequence
from typing import Any

# A tokenizer may decode a token differently at the beginning of a text, so the first new token is
# decoded after the last tokens of the prompt.
CONTEXT_TOKENS = 6
# Stands for bytes that are not a complete character, or not yet.
REPLACEMENT_CHARACTER = "\ufffd"


def decoding_context(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt; none if they end inside a character."""
    context = list(prompt[-CONTEXT_TOKENS:])
    return [] if _decode(tokenizer, context).endswith(REPLACEMENT_CHARACTER) else context


def decode_after(tokenizer: Any, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of new tokens that follow a context."""
    before, both = _decode(tokenizer, context), _decode(tokenizer, [*context, *ids])
    return both[len(before) :] if both.startswith(before) else _decode(tokenizer, ids)


class StreamDecoder:
    """Receives the tokens of one text one by one and returns complete characters.

    Characters that may turn out to be part of a stop string are held back until that is known.
    """

    def __init__(
        self, tokenizer: Any, context: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.stopped = False
        self._window = list(context)
        self._decoded_tokens = len(self._window)
        self._decoded_text = _decode(tokenizer, self._window)
        self._held_back = ""

    def push(self, token: int) -> str:
        """The characters that are certain after one more token."""
        self._window.append(token)
        text = _decode(self.tokenizer, self._window)
        if len(text) <= len(self._decoded_text) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """The characters held back, once there are no more tokens."""
        if self.stopped:
            return ""
        piece = self._advance(_decode(self.tokenizer, self._window))
        piece, self._held_back = piece + self._held_back, ""
        return piece

    def _advance(self, text: str) -> str:
        text = self._held_back + text[len(self._decoded_text) :]
        # Only the last tokens matter for how the next one is decoded.
        self._window = self._window[self._decoded_tokens :]
        self._decoded_tokens = len(self._window)
        self._decoded_text = _decode(self.tokenizer, self._window)
        stop = find_stop(text, self.stop_strings)
        if stop is not None:
            self.stopped, self._held_back = True, ""
            return text[:stop]
        certain = len(text) - partial_stop(text, self.stop_strings)
        self._held_back = text[certain:]
        return text[:certain]


def find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """The index at which the earliest stop string begins.

    >>> find_stop("one. two\\n", ("\\n", ". "))
    3
    """
    return min((index for stop in stop_strings if (index := text.find(stop)) >= 0), default=None)


def partial_stop(text: str, stop_strings: Sequence[str]) -> int:
    """How many of the last characters could be the beginning of a stop string.

    >>> partial_stop("so it EN", ("END", "N!"))
    2
    """
    lengths = (
        length
        for stop in stop_strings
        for length in range(min(len(stop) - 1, len(text)), 0, -1)
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text
