"""A learned vector a position."""

from dataclasses import dataclass

from manyheads.errors import ConfigError

__all__ = ["Learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A table of `count` vectors; the first token takes number `offset` (2 in RoBERTa)."""

    count: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.offset < self.count:
            raise ConfigError(
                f"offset={self.offset} leaves no place in a table of {self.count}",
                f"use an offset of 0 to {self.count - 1}",
            )

    @property
    def longest(self) -> int:
        """The longest sequence that has a vector for every token."""
        return self.count - self.offset
