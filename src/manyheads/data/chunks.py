"""What is shuffled and packed: pieces of documents, or cuts of one long text."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import Batch
from manyheads.data.store import Store
from manyheads.errors import ConfigError
from manyheads.ragged import Lengths, Ragged


@runtime_checkable
class Pieces(Protocol):
    """Numbered things of known sizes, any of which can be laid into a batch."""

    @property
    def sizes(self) -> NDArray[np.int32] | int:
        """Tokens of each piece; one number where all are alike."""
        ...

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch: ...


class Documents:
    """Documents cut to pieces of at most `length` tokens; what is left over is a shorter piece.

    `opening` and `closing` are put around every piece and count for its length, as [CLS] and [SEP]
    do for BERT. A causal model needs neither: the store ends its documents itself.
    """

    def __init__(
        self, store: Store, *, length: int, opening: int | None = None, closing: int | None = None
    ) -> None:
        self.store, self.length = store, length
        self.opening, self.closing = opening, closing
        frame = (opening is not None) + (closing is not None)
        if length <= frame:
            raise ConfigError(
                f"length={length} leaves no room for text", f"use {frame + 1} or more"
            )
        self._starts, self._tokens = _cut(store.bounds, length - frame)
        self.sizes: NDArray[np.int32] = self._tokens + np.int32(frame)

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        lengths = Lengths.of(self.sizes[numbers].tolist())
        values = np.empty(lengths.total, dtype=np.int64)
        for number, place in zip(numbers, lengths.slices(), strict=True):
            start, stop = place.start, place.stop
            if self.opening is not None:
                values[start] = self.opening
                start += 1
            if self.closing is not None:
                stop -= 1
                values[stop] = self.closing
            source = self._starts[number]
            values[start:stop] = self.store.tokens[source : source + stop - start]
        return Batch(texts=Ragged(torch.from_numpy(values), lengths))


class Fixed:
    """All documents end to end, a piece of `length` tokens every `stride`; 0 means side by side.

    A smaller stride makes pieces overlap: an epoch is then several passes over the text, each cut
    elsewhere. What is left at the end is not used.
    """

    def __init__(self, store: Store, *, length: int, stride: int = 0) -> None:
        if length < 1:
            raise ConfigError(f"length={length} holds no token", "use 1 or more")
        if not 0 <= stride <= length:
            raise ConfigError(f"stride={stride} leaves tokens out", f"use 1 to length={length}")
        if store.size < length:
            raise ConfigError(
                f"{store.size} tokens are fewer than length={length}",
                "give more text, or a smaller length",
            )
        self.store, self.length, self.stride = store, length, stride or length

    @property
    def sizes(self) -> int:
        return self.length

    def __len__(self) -> int:
        return (self.store.size - self.length) // self.stride + 1

    def batch(self, numbers: Sequence[int]) -> Batch:
        values = np.empty((len(numbers), self.length), dtype=np.int64)
        for row, number in zip(values, numbers, strict=True):
            start = self.store.start + number * self.stride
            row[:] = self.store.tokens[start : start + self.length]
        return Batch(texts=Ragged.from_padded(torch.from_numpy(values)))


def _cut(bounds: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Where each piece starts and how many tokens it has.

    >>> starts, sizes = _cut(np.array([0, 7, 7, 9]), 3)
    >>> starts.tolist(), sizes.tolist()
    ([0, 3, 6, 7], [3, 3, 1, 2])
    """
    counts = -(-np.diff(bounds) // most)
    firsts = np.cumsum(counts) - counts
    place = np.arange(counts.sum()) - np.repeat(firsts, counts)
    starts = np.repeat(bounds[:-1], counts) + place * most
    stops = np.minimum(starts + most, np.repeat(bounds[1:], counts))
    return starts, (stops - starts).astype(np.int32)
