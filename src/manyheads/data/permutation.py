"""A pseudo-random permutation whose entries are computed one by one and never stored."""

import numpy as np
from numpy.typing import NDArray

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 6
# With fewer bits per half a Feistel round has too few functions to choose from.
FEWEST_BITS = 2


def permute(
    indices: NDArray[np.int64], count: int, *, seed: int, epoch: int = 0
) -> NDArray[np.int64]:
    """The entries at `indices` of a permutation of 0 to `count` - 1.

    A Feistel network on the next power of four, iterated until the value is below `count`.

    >>> order = permute(np.arange(6), 6, seed=1)
    >>> order.tolist(), sorted(order.tolist())
    ([4, 0, 3, 5, 1, 2], [0, 1, 2, 3, 4, 5])
    """
    bits = np.uint64(max(FEWEST_BITS, ((count - 1).bit_length() + 1) // 2))
    first = mix_seed(mix_seed(seed) + epoch)
    keys = [np.uint64(mix_seed(first + turn)) for turn in range(ROUNDS)]
    values = indices.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= np.uint64(count)]
    return values.astype(np.int64)


def mix_seed(number: int) -> int:
    """A 64-bit hash of a number (splitmix64), to derive seeds from seeds."""
    number = (number * GOLDEN + GOLDEN) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31


def _feistel(
    numbers: NDArray[np.uint64], bits: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    low = (np.uint64(1) << bits) - np.uint64(1)
    left, right = numbers >> bits, numbers & low
    for key in keys:
        left, right = right, left ^ _mix_each(right ^ key) & low
    return left << bits | right


def _mix_each(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
