"""Grouped-query attention: which query heads share which head of keys and values."""

from itertools import chain, repeat
from typing import Literal

from manyheads.annotations import PositiveInt
from manyheads.errors import ConfigError

# Their number, if each serves the same number of query heads, or how many each of them serves.
KeyHeads = PositiveInt | tuple[int, ...] | Literal["each"]


def normalize_kv_heads(heads: int, kv_heads: KeyHeads) -> KeyHeads:
    """Check `kv_heads`, and replace groups of one size by their number.

    >>> normalize_kv_heads(6, (3, 3)), normalize_kv_heads(7, (4, 3))
    (2, (4, 3))
    >>> normalize_kv_heads(7, (4, 4))
    Traceback (most recent call last):
    manyheads.errors.ConfigError: kv_heads must sum to heads=7, got (4, 4).
    """
    if kv_heads == "each":
        return kv_heads
    if isinstance(kv_heads, int):
        if heads % kv_heads:
            fitting = divisors(heads)
            raise ConfigError(
                f"kv_heads must divide heads={heads} ({listed(fitting)}), got {kv_heads}"
            )
        return kv_heads
    if not kv_heads or min(kv_heads) < 1:
        raise ConfigError(f"each of kv_heads must be at least 1, got {kv_heads}")
    if sum(kv_heads) != heads:
        raise ConfigError(f"kv_heads must sum to heads={heads}, got {kv_heads}")
    return len(kv_heads) if len(set(kv_heads)) == 1 else kv_heads


def groups_of(heads: int, kv_heads: KeyHeads) -> tuple[int, ...]:
    """How many query heads each key head serves.

    >>> groups_of(6, 2), groups_of(3, "each"), groups_of(7, (4, 3))
    ((3, 3), (1, 1, 1), (4, 3))
    """
    if isinstance(kv_heads, tuple):
        return kv_heads
    count = heads if kv_heads == "each" else kv_heads
    return (heads // count,) * count


def key_head_of_query(groups: tuple[int, ...]) -> tuple[int, ...]:
    """For each query head, the key head that it reads.

    >>> key_head_of_query((2, 3))
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


def divisors(number: int) -> list[int]:
    """The divisors up to 1,000, and the number itself: enough to choose from.

    >>> divisors(12), divisors(2**40)[-3:]
    ([1, 2, 3, 4, 6, 12], [256, 512, 1099511627776])
    """
    small = [divisor for divisor in range(1, min(number, 1001)) if number % divisor == 0]
    return [*small, number]


def nearest(choices: list[int], target: int) -> list[int]:
    """The four choices nearest to `target`.

    >>> nearest([1, 2, 4, 8, 16, 32], target=5)
    [1, 2, 4, 8]
    """
    return sorted(sorted(choices, key=lambda choice: abs(choice - target))[:4])
