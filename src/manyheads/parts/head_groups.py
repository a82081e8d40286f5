"""Which query heads share which head of keys and values: equally many each, or as many as said."""

from itertools import chain, repeat
from typing import Literal

from manyheads.errors import ConfigError

# How many there are, each serving equally many queries; or how many queries each of them serves.
KeyHeads = int | tuple[int, ...] | Literal["each"]


def settled(heads: int, kv_heads: KeyHeads) -> KeyHeads:
    """Checked, and where all groups are alike their number: one layer has one description.

    >>> settled(6, (3, 3)), settled(7, (4, 3)), settled(2, (1, 1))
    (2, (4, 3), 2)
    >>> settled(7, (4, 4))
    Traceback (most recent call last):
    manyheads.errors.ConfigError: kv_heads=(4, 4) serve 8 queries and heads=7: let them sum to 7.
    """
    if kv_heads == "each":
        return kv_heads
    if isinstance(kv_heads, int):
        if heads % kv_heads:
            fitting = [number for number in range(1, heads + 1) if heads % number == 0]
            raise ConfigError(
                f"heads={heads} cannot share kv_heads={kv_heads} evenly", f"use {listed(fitting)}"
            )
        return kv_heads
    if not kv_heads or min(kv_heads) < 1:
        raise ConfigError(
            f"kv_heads={kv_heads} has a key head that serves no query", "leave it out"
        )
    if sum(kv_heads) != heads:
        raise ConfigError(
            f"kv_heads={kv_heads} serve {sum(kv_heads)} queries and heads={heads}",
            f"let them sum to {heads}",
        )
    return len(kv_heads) if len(set(kv_heads)) == 1 else kv_heads


def groups_of(heads: int, kv_heads: KeyHeads) -> tuple[int, ...]:
    """How many query heads each head of keys serves.

    >>> groups_of(6, 2), groups_of(3, "each"), groups_of(7, (4, 3))
    ((3, 3), (1, 1, 1), (4, 3))
    """
    if isinstance(kv_heads, tuple):
        return kv_heads
    count = heads if kv_heads == "each" else kv_heads
    return (heads // count,) * count


def key_head_of_query_heads(groups: tuple[int, ...]) -> tuple[int, ...]:
    """For every query head the head of keys that it reads.

    >>> key_head_of_query_heads((2, 3))
    (0, 0, 1, 1, 1)
    """
    return tuple(chain.from_iterable(repeat(key, size) for key, size in enumerate(groups)))


def listed(numbers: list[int]) -> str:
    """
    >>> listed([1, 2, 3]), listed([7])
    ('1, 2 or 3', '7')
    """
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last


def nearest(choices: list[int], wanted: int) -> list[int]:
    """The four that come closest.

    >>> nearest([1, 2, 4, 8, 16, 32], wanted=5)
    [1, 2, 4, 8]
    """
    return sorted(sorted(choices, key=lambda choice: abs(choice - wanted))[:4])
