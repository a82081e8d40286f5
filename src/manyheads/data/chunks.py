"""Chunks of a token store: documents cut to a length, or one long text cut at fixed steps."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import Batch
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError
from manyheads.ragged import Lengths, Ragged


@runtime_checkable
class Chunks(Protocol):
    """Numbered sequences of known sizes, which `batch` collates."""

    @property
    def sizes(self) -> NDArray[np.int32] | int:
        """Tokens of each chunk; one number if all are equal."""
        ...

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch: ...


class DocumentChunks:
    """Documents cut into chunks of at most `length` tokens; the last one may be shorter.

    `opening` and `closing` are the tokens around every chunk, such as [CLS] and [SEP] for BERT, and
    count towards its length. A causal model needs neither: the store has end-of-sequence tokens.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        length: int,
        opening: int | None = None,
        closing: int | None = None,
    ) -> None:
        self.store, self.length = store, length
        self.opening, self.closing = opening, closing
        frame = (opening is not None) + (closing is not None)
        if length <= frame:
            raise ConfigError(
                f"length={length} leaves no space for text", f"use {frame + 1} or more"
            )
        self._starts, self._tokens = _cut(store.bounds, length - frame)
        self.sizes: NDArray[np.int32] = self._tokens + np.int32(frame)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def checksum(self) -> int:
        return self.store.checksum

    def batch(self, numbers: Sequence[int]) -> Batch:
        lengths = Lengths.of(self.sizes[numbers].tolist())
        values = np.empty(lengths.total, dtype=np.int64)
        for number, span in zip(numbers, lengths.slices(), strict=True):
            start, stop = span.start, span.stop
            if self.opening is not None:
                values[start] = self.opening
                start += 1
            if self.closing is not None:
                stop -= 1
                values[stop] = self.closing
            source = int(self._starts[number])
            values[start:stop] = self.store.read(source, source + stop - start)
        return Batch(texts=Ragged(torch.from_numpy(values), lengths))


class FixedChunks:
    """All documents concatenated, and a chunk of `length` tokens every `stride` tokens.

    A stride of 0 is `length`; with a smaller one chunks overlap, and an epoch is several passes
    over the text. An incomplete chunk at the end is not used.
    """

    def __init__(self, store: TokenStore, *, length: int, stride: int = 0) -> None:
        if length < 1:
            raise ConfigError(f"length must be at least 1, got {length}", "use 1 or more")
        if not 0 <= stride <= length:
            raise ConfigError(f"stride={stride} would skip tokens", f"use 1 to length={length}")
        if store.size < length:
            raise ConfigError(
                f"{store.size} tokens are fewer than length={length}",
                "use more text, or a smaller length",
            )
        self.store, self.length, self.stride = store, length, stride or length

    @property
    def sizes(self) -> int:
        return self.length

    def __len__(self) -> int:
        return (self.store.size - self.length) // self.stride + 1

    @property
    def checksum(self) -> int:
        return self.store.checksum

    def batch(self, numbers: Sequence[int]) -> Batch:
        values = np.empty((len(numbers), self.length), dtype=np.int64)
        for row, number in zip(values, numbers, strict=True):
            start = self.store.start + number * self.stride
            row[:] = self.store.read(start, start + self.length)
        return Batch(texts=Ragged.from_padded(torch.from_numpy(values)))


def _cut(bounds: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The start of each chunk and its number of tokens.

    >>> starts, sizes = _cut(np.array([0, 7, 7, 9]), 3)
    >>> starts.tolist(), sizes.tolist()
    ([0, 3, 6, 7], [3, 3, 1, 2])
    """
    counts = -(-np.diff(bounds) // most)
    firsts = np.cumsum(counts) - counts
    index = np.arange(counts.sum()) - np.repeat(firsts, counts)
    starts = np.repeat(bounds[:-1], counts) + index * most
    stops = np.minimum(starts + most, np.repeat(bounds[1:], counts))
    return starts, (stops - starts).astype(np.int32)
