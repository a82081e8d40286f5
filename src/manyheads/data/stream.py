"""The order of training data: shuffled by seed, packed by tokens, addressed by step.

    store = write_store(TextFiles(["corpus/"]), tokenizer, "corpus.store")   # once; resumes
    training, validation = store.split(0.05)                                 # views, nothing copied

    stream = Stream(
        DocumentChunks(training, length=1024),  # for BERT: opening=cls, closing=sep
        batch_tokens=65_536,                    # at most this many tokens per micro-batch
        micro_batches=8,                        # micro-batches per step, over all processes
        seed=0,
    )
    for step in stream.steps(rank=rank, world_size=world_size):     # endless, epoch after epoch
        for batch, index in zip(step.batches, step.indices):
            ...         # batch.texts is a Ragged; index counts micro-batches over all processes
        save(asdict(step.after))

    stream.steps(StreamPosition(**saved))       # continues exactly after that step
    Stream(DocumentChunks(validation, length=1024), batch_tokens=65_536).single_epoch()

A stream reads `DocumentChunks(store, length=)` (sequences of at most `length` tokens),
`FixedChunks(store, length=)` (exactly `length`, cut from all documents concatenated), or the
examples of labeled.py and images.py (labeled texts, pairs, tags, images).

- A step has `micro_batches` micro-batches for any number of processes: process r of W takes number
  r, r + W, ... of each step, so the order is the same for any W. `micro_batches` may be a function
  of the step number, for a growing batch.
- `step.tokens` and `step.sequences` count the whole step, all processes together.
- An epoch has every chunk once. With chunks of different sizes its last micro-batch may be short,
  and the step continues into the next epoch, so that all steps are full. With chunks of one size a
  batch may have the last chunks of one epoch and the first of the next, so that all batches have
  the same shape.
- `StreamPosition` is the whole state. To resume, only lengths are replayed, from the start of the
  epoch; no tokens are read.
- `prefetch(stream.steps(...))` of batch.py reads ahead in a thread and pins memory.
- `MixedChunks` of several sources are drawn by weight; `step.shares` are the shares of a step.
- Bits per byte: nats per token / log(2) / `validation.bytes_per_token`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyheads.data.batch import Batch, Pinnable
from manyheads.data.chunks import Chunks, MixedChunks
from manyheads.data.packing import pack
from manyheads.errors import ConfigError

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 6
# With fewer bits per half a Feistel round has too few functions to choose from.
FEWEST_BITS = 2


def permute(
    indices: NDArray[np.int64], count: int, *, seed: int, epoch: int | NDArray[np.int64] = 0
) -> NDArray[np.int64]:
    """The entries at `indices` of a permutation of 0 to `count` - 1, another one in each epoch.

    A Feistel network on the next power of four, iterated until the value is below `count`. Where
    every index has its own epoch, `epoch` has as many entries as `indices`.

    >>> order = permute(np.arange(6), 6, seed=1)
    >>> order.tolist(), sorted(order.tolist())
    ([4, 0, 3, 5, 1, 2], [0, 1, 2, 3, 4, 5])
    """
    bits = np.uint64(max(FEWEST_BITS, ((count - 1).bit_length() + 1) // 2))
    if isinstance(epoch, int):
        keys = _round_keys(seed, epoch)
    else:
        epochs, places = np.unique(epoch, return_inverse=True)
        table = np.stack([_round_keys(seed, number) for number in epochs.tolist()], axis=1)
        keys = table[:, places]
    values = indices.astype(np.uint64)
    low = (np.uint64(1) << bits) - np.uint64(1)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> bits, values[outside] & low
        for key in keys if keys.ndim == 1 else keys[:, outside]:
            mixed = right ^ key
            mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (mixed ^ mixed >> np.uint64(31)) & low
        values[outside] = left << bits | right
        outside = outside[values[outside] >= np.uint64(count)]
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    first = mix_seed(mix_seed(seed) + epoch)
    return np.array([mix_seed(first + turn) for turn in range(ROUNDS)], dtype=np.uint64)


def mix_seed(number: int) -> int:
    """A 64-bit hash of a number (splitmix64), to derive seeds from seeds."""
    number = (number * GOLDEN + GOLDEN) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31


# Entries of the permutation computed at a time.
BLOCK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The number of finished steps, and the next batch: number `batch` of `epoch`."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


START = StreamPosition()


AnyBatch = TypeVar("AnyBatch", bound=Pinnable)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamStep(Generic[AnyBatch]):
    """The batches of a step for one process, and the size of the whole step.

    `indices` say which of the step's micro-batches the batches are, counted over all processes: the
    same text has the same index whatever the number of processes, as seeds of masking need.
    """

    number: int
    batches: tuple[AnyBatch, ...]
    indices: tuple[int, ...]
    tokens: int
    sequences: int
    after: StreamPosition
    # Of a mixture: the fraction of the step's tokens from each source.
    shares: Mapping[str, float] = field(default_factory=dict)

    def pin_memory(self) -> "StreamStep[AnyBatch]":
        return replace(self, batches=tuple(batch.pin_memory() for batch in self.batches))


class _Planned(NamedTuple):
    """The chunks of one micro-batch, and where the next one is found."""

    numbers: Sequence[int]
    epoch: int
    batch: int


class Stream:
    """Micro-batches in an order that depends only on the seed."""

    def __init__(
        self,
        chunks: Chunks,
        *,
        batch_tokens: int,
        micro_batches: int | Callable[[int], int] = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.chunks, self.batch_tokens, self.seed = chunks, batch_tokens, seed
        self.micro_batches, self.shuffle = micro_batches, shuffle
        if not len(chunks):
            raise ConfigError("there is nothing to stream", "use a source that has text")
        longest = int(np.max(chunks.sizes))
        if batch_tokens < longest:
            raise ConfigError(
                f"batch_tokens={batch_tokens} cannot hold a sequence of {longest} tokens",
                f"use {longest} or more",
            )

    def steps(
        self, start: StreamPosition = START, *, rank: int = 0, world_size: int = 1
    ) -> Iterator[StreamStep[Batch]]:
        """The steps from `start` on, without end, for process `rank` of `world_size`."""
        _check_rank(rank, world_size)
        plan = self._plan(start.epoch, start.batch)
        for number in count(start.step):
            planned = list(islice(plan, self._micro_batches(number, world_size)))
            mine = range(rank, len(planned), world_size)
            last = planned[-1]
            yield StreamStep(
                number=number,
                batches=tuple(self.chunks.batch(planned[index].numbers) for index in mine),
                indices=tuple(mine),
                tokens=sum(self._tokens(batch.numbers) for batch in planned),
                sequences=sum(len(batch.numbers) for batch in planned),
                after=StreamPosition(step=number + 1, epoch=last.epoch, batch=last.batch),
                shares=self._shares(planned),
            )

    def position(self, step: int) -> StreamPosition:
        """The position of a step: by arithmetic, or by replaying lengths from the beginning."""
        batches = sum(self._micro_batches(number, 1) for number in range(step))
        if isinstance(self.chunks.sizes, int):
            epoch, batch = self._after(batches)
        elif batches:
            _, epoch, batch = next(islice(self._plan(0, 0), batches - 1, None))
        else:
            epoch, batch = 0, 0
        return StreamPosition(step=step, epoch=epoch, batch=batch)

    def single_epoch(self, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """The micro-batches of the first epoch, every chunk once; the last may be short."""
        _check_rank(rank, world_size)
        for numbers in islice(self.epoch(0), rank, None, world_size):
            yield self.chunks.batch(numbers)

    def epoch(self, epoch: int) -> Iterator[Sequence[int]]:
        """The numbers of the chunks of each micro-batch of an epoch."""
        sizes = self.chunks.sizes
        if not isinstance(sizes, int):
            yield from pack(self._sized(epoch, sizes), self.batch_tokens)
            return
        per_batch = self.batch_tokens // sizes
        for start in range(0, self._total, per_batch):
            yield self._order(epoch, start, min(start + per_batch, self._total)).tolist()

    def _plan(self, epoch: int, batch: int) -> Iterator[_Planned]:
        """Batches from number `batch` of an epoch on, through all epochs that follow."""
        if not isinstance(self.chunks.sizes, int):
            for later in count(epoch):
                skipped = batch if later == epoch else 0
                for number, numbers in enumerate(islice(self.epoch(later), skipped, None), skipped):
                    yield _Planned(numbers, later, number + 1)
            return
        # With chunks of one size, counted through all epochs, a batch is found by arithmetic.
        assert isinstance(self.chunks.sizes, int)
        per_batch, total = self.batch_tokens // self.chunks.sizes, self._total
        for number in count(-(-epoch * total // per_batch) + batch):
            chosen: list[int] = []
            while len(chosen) < per_batch:
                inside, start = divmod(number * per_batch + len(chosen), total)
                stop = min(start + per_batch - len(chosen), total)
                chosen += self._order(inside, start, stop).tolist()
            yield _Planned(chosen, *self._after(number + 1))

    def _after(self, batches: int) -> tuple[int, int]:
        """The epoch and the number in it of what comes after so many batches of one size."""
        assert isinstance(self.chunks.sizes, int)
        per_batch, total = self.batch_tokens // self.chunks.sizes, self._total
        epoch = batches * per_batch // total
        return epoch, batches - -(-epoch * total // per_batch)

    def _order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        indices = np.arange(start, stop)
        if isinstance(self.chunks, MixedChunks):
            return self._drawn(self.chunks, indices, epoch)
        if not self.shuffle:
            return indices
        return permute(indices, len(self.chunks), seed=self.seed, epoch=epoch)

    @property
    def _total(self) -> int:
        """The number of chunks of an epoch."""
        return sum(self.chunks.draws) if isinstance(self.chunks, MixedChunks) else len(self.chunks)

    def _drawn(
        self, mixed: MixedChunks, indices: NDArray[np.int64], epoch: int
    ) -> NDArray[np.int64]:
        """The chunks of a mixture: which source is drawn, then its next chunk in its own order."""
        places = permute(indices, self._total, seed=self.seed, epoch=epoch)
        result, before = np.empty_like(places), 0
        for index, (draws, total) in enumerate(zip(mixed.draws, mixed.counts, strict=True)):
            mine = np.flatnonzero((places >= before) & (places < before + draws))
            rounds, inside = np.divmod(epoch * draws + places[mine] - before, total)
            seed = mix_seed(mix_seed(self.seed) + index + 1)
            if len(mine):
                order = permute(inside, total, seed=seed, epoch=rounds)
                result[mine] = mixed.firsts[index] + order
            before += draws
        return result

    def _shares(self, planned: Sequence[_Planned]) -> dict[str, float]:
        if not isinstance(self.chunks, MixedChunks):
            return {}
        return self.chunks.shares([number for batch in planned for number in batch.numbers])

    def _sized(self, epoch: int, sizes: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
        for start in range(0, self._total, BLOCK):
            numbers = self._order(epoch, start, min(start + BLOCK, self._total))
            yield from zip(numbers.tolist(), sizes[numbers].tolist(), strict=True)

    def _tokens(self, numbers: Sequence[int]) -> int:
        sizes = self.chunks.sizes
        return sizes * len(numbers) if isinstance(sizes, int) else int(sizes[list(numbers)].sum())

    def _micro_batches(self, step: int, world_size: int) -> int:
        count = self.micro_batches(step) if callable(self.micro_batches) else self.micro_batches
        if count < world_size:
            raise ConfigError(
                f"step {step} has micro_batches={count} for {world_size} processes",
                f"use {world_size} or more",
            )
        return count


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is out of range for world_size={world_size}", f"use 0 to {world_size - 1}"
        )
