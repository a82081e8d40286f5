"""From tokens to letters, whole or piece by piece as they come."""

from collections.abc import Sequence
from typing import Any

from manyheads.decoding.stopping import first_stop, may_begin_a_stop

__all__ = ["Reader", "context_of", "text_of"]

# A tokenizer may write a token differently at the beginning of a text, so the first new token is
# read after the last ones of the prompt.
CONTEXT = 6
# What stands for bytes that are no letter, or not yet.
BROKEN = "\ufffd"


def context_of(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The tokens before the first new one; none where they end within a letter."""
    context = list(prompt[-CONTEXT:])
    return [] if _decode(tokenizer, context).endswith(BROKEN) else context


def text_of(tokenizer: Any, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of new tokens that follow a context."""
    before, whole = _decode(tokenizer, context), _decode(tokenizer, [*context, *ids])
    return whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids)


class Reader:
    """Takes the tokens of one text as they come and gives whole letters back.

    Letters that may turn out to be part of a stop string are held back until that is known.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.stopped = False
        self._window = list(context)
        self._read = len(self._window)
        self._before = _decode(tokenizer, self._window)
        self._held = ""

    def push(self, token: int) -> str:
        """The letters that are certain after one more token."""
        self._window.append(token)
        text = _decode(self.tokenizer, self._window)
        if len(text) <= len(self._before) or text.endswith(BROKEN):
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        if self.stopped:
            return ""
        piece = self._settle(_decode(self.tokenizer, self._window))
        piece, self._held = piece + self._held, ""
        return piece

    def _settle(self, text: str) -> str:
        new = text[len(self._before) :]
        # Only the last tokens matter for how the next is written.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._before = _decode(self.tokenizer, self._window)
        return self._hand_out(self._held + new)

    def _hand_out(self, letters: str) -> str:
        place = first_stop(letters, self.stops)
        if place is not None:
            self.stopped, self._held = True, ""
            return letters[:place]
        certain = len(letters) - may_begin_a_stop(letters, self.stops)
        self._held = letters[certain:]
        return letters[:certain]


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text
