"""No position at all: the model sees a set of tokens."""

from dataclasses import dataclass

__all__ = ["NoPosition"]


@dataclass(frozen=True, slots=True)
class NoPosition:
    """Nothing is added, turned or biased."""
