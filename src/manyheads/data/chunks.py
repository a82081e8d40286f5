"""Chunks of a token store: documents cut to a length, or one long text cut at fixed steps."""

import zlib
from collections.abc import Mapping, Sequence
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


# Draws of the rarest source in an epoch of a mixture, so that shares are exact to a thousandth.
LEAST_DRAWS = 1000


class MixedChunks:
    """Chunks of several sources by name, of which a stream draws tokens in the ratio of `weights`.

    An epoch has `draws` chunks of every source, shuffled together. Each source goes through its own
    chunks again and again, each time in another order: a small source with a large weight is
    repeated more often than a large one.
    """

    def __init__(self, sources: Mapping[str, Chunks], weights: Sequence[float]) -> None:
        if not sources or any(not len(chunks) for chunks in sources.values()):
            raise ConfigError("a source of the mixture has no text", "leave it out")
        self.sources, self.counts = dict(sources), [len(chunks) for chunks in sources.values()]
        self.firsts = np.cumsum([0, *self.counts])
        every = [chunks.sizes for chunks in sources.values()]
        means = np.array([float(np.mean(sizes)) for sizes in every])
        # Chunks by token of the mixture.
        rates = np.array(weights) / sum(weights) / means
        scale = max(float(means @ self.counts), LEAST_DRAWS / float(rates.min()))
        self.draws = [round(scale * rate) for rate in rates.tolist()]
        parts = zip(every, self.counts, strict=True)
        sizes = np.concatenate([np.broadcast_to(np.int32(size), count) for size, count in parts])
        alike = all(isinstance(size, int) and size == every[0] for size in every)
        self.sizes: NDArray[np.int32] | int = int(sizes[0]) if alike else sizes

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def checksum(self) -> int:
        """That of all sources."""
        checksums = [int(getattr(chunks, "checksum", 0)) for chunks in self.sources.values()]
        return zlib.crc32(repr(checksums).encode())

    def owners(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """For each chunk the index of its source."""
        return np.searchsorted(self.firsts, np.asarray(numbers), side="right") - 1

    def shares(self, numbers: Sequence[int]) -> dict[str, float]:
        """The fraction of the tokens of these chunks that comes from each source."""
        sizes = np.broadcast_to(self.sizes, len(self))[list(numbers)]
        tokens = np.bincount(self.owners(numbers), weights=sizes, minlength=len(self.sources))
        return dict(zip(self.sources, (tokens / max(tokens.sum(), 1)).tolist(), strict=True))

    def batch(self, numbers: Sequence[int]) -> Batch:
        owners, texts = self.owners(numbers), [torch.empty(0)] * len(numbers)
        for index, chunks in enumerate(self.sources.values()):
            places = np.flatnonzero(owners == index).tolist()
            if not places:
                continue
            inside = chunks.batch([int(numbers[at] - self.firsts[index]) for at in places]).texts
            assert inside is not None, "mixed chunks are texts"
            for at, text in zip(places, inside.to_list(), strict=True):
                texts[at] = text
        return Batch(texts=Ragged.from_list(texts))


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
