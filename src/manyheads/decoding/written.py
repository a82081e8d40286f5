"""What came of a prompt."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["StoppedBy", "Written"]

StoppedBy = Literal["length", "stop id", "stop string"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The new tokens, without the prompt.

    `ids` holds every token that was chosen, the stop id or the tokens of a stop string included,
    and `logprobs` has a number for each. `text` ends before whatever stopped it; it is None where
    the model has no tokenizer.

    >>> print(Written(ids=(5, 6), text=" and so on", stopped_by="length"))
     and so on
    """

    ids: tuple[int, ...]
    text: str | None
    stopped_by: StoppedBy
    logprobs: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.ids)) if self.text is None else self.text
