"""A shuffled order that is computed, not kept: any place of it is known without the others."""

import numpy as np
from numpy.typing import NDArray

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 6
# Below this many bits a half, a round has too few functions to choose from.
FEWEST_BITS = 2


def shuffled(
    places: NDArray[np.int64], count: int, *, seed: int, epoch: int = 0
) -> NDArray[np.int64]:
    """The numbers that stand at these places of a permutation of 0 to `count` - 1.

    A Feistel network on the next power of four, walked until it falls below `count`.

    >>> order = shuffled(np.arange(6), 6, seed=1)
    >>> order.tolist(), sorted(order.tolist())
    ([4, 0, 3, 5, 1, 2], [0, 1, 2, 3, 4, 5])
    """
    bits = np.uint64(max(FEWEST_BITS, ((count - 1).bit_length() + 1) // 2))
    first = mixed(mixed(seed) + epoch)
    keys = [np.uint64(mixed(first + turn)) for turn in range(ROUNDS)]
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _encrypted(found[outside], bits, keys)
        outside = outside[found[outside] >= np.uint64(count)]
    return found.astype(np.int64)


def mixed(number: int) -> int:
    """64 bits that look random, for seeds that depend on seeds."""
    number = (number * GOLDEN + GOLDEN) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31


def _encrypted(
    numbers: NDArray[np.uint64], bits: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    low = (np.uint64(1) << bits) - np.uint64(1)
    left, right = numbers >> bits, numbers & low
    for key in keys:
        left, right = right, left ^ _mixed_each(right ^ key) & low
    return left << bits | right


def _mixed_each(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
