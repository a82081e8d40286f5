"""What a phase is fed with, and what every kind of data is checked for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manyheads.data.pieces import Pieces
from manyheads.data.sources import HUB
from manyheads.errors import ConfigError
from manyheads.train.amounts import Amount

__all__ = ["READING", "Fed", "check_room", "check_share", "peek", "token_of"]

READING = "reading the data"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fed:
    """What a phase trains on and is tested on; `bytes_a_token` is of the latter, 0 if unknown."""

    training: Pieces
    validation: Pieces | None
    bytes_a_token: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, where the data name them."""
        names: tuple[str, ...] = getattr(self.training, "names", ())
        return names


def peek(read: Iterable[Any], paths: tuple[str, ...]) -> None:
    """The first of it, which tells of a field that is not there; the hub is asked when needed."""
    if not paths[0].startswith(HUB):
        next(iter(read), None)


def check_share(validation: float | tuple[str, ...]) -> None:
    if isinstance(validation, float) and not 0 <= validation < 1:
        raise ConfigError(f"validation={validation:g} is no share", "use 0 <= share < 1")


def check_room(amount: Amount, tokens: int, what: str) -> None:
    if amount.room < tokens:
        key = "micro_batch" if amount.micro_batch else "batch"
        raise ConfigError(f"{key}={amount.room} cannot hold {what}", f"use {tokens} or more")


def token_of(tokenizer: Any, name: str, key: str) -> int | None:
    if not name:
        return None
    number: int | None = tokenizer.token_to_id(name)
    if number is None:
        raise ConfigError(
            f"{key}: the tokenizer has no token {name!r}", "name one that it has, or none"
        )
    return number
