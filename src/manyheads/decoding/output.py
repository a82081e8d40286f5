"""What `generate` returns for each prompt."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "eos", "stop string"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The new tokens of one prompt, without the prompt itself.

    `ids` holds every generated token, including the end-of-text token or the tokens of a stop
    string, and `logprobs` has one number per token. `text` ends before the end-of-text token or the
    stop string; it is None where the model has no tokenizer.

    >>> print(Generation(ids=(5, 6), text=" and so on", finish_reason="length"))
     and so on
    """

    ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.ids)) if self.text is None else self.text
