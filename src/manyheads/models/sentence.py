"""How a model's tokens become one vector for the whole text."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Pooling", "Sentence"]

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """What a folder says of the vectors its model was trained to give.

    `longest` is where texts are cut, in tokens with the special ones.
    """

    pooling: Pooling = "mean"
    normalise: bool = False
    longest: int | None = None
