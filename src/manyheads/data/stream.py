"""The order of training data: shuffled by seed, packed by tokens, addressed by step.

    store = write_store(TextFiles(["corpus/"]), tokenizer, "corpus.store")   # once; resumes
    training, validation = store.split(0.05)                                 # views, nothing copied

    stream = Stream(
        Documents(training, length=1024),   # pieces kept apart; BERT: opening=cls, closing=sep
        batch_tokens=65_536,                # at most so many tokens a micro-batch
        micro_batches=8,                    # micro-batches a step, over all processes together
        seed=0,
    )
    for step in stream.steps(rank=rank, world=world):     # endless, epoch after epoch
        for batch, place in zip(step.batches, step.places):
            ...         # batch.texts is a Ragged; place counts micro-batches over all processes
        save(asdict(step.after))

    stream.steps(Position(**saved))         # goes on exactly where that step ended
    Stream(Documents(validation, length=1024), batch_tokens=65_536).once()   # one epoch of batches

What is streamed is a value chosen by type: `Documents(store, length=)` (sequences of at most
`length`), `Fixed(store, length=)` (each exactly `length`, cut from all documents end to end), or
the examples of data/examples.py and data/images.py (labelled texts, pairs, tags, images).

- A step is `micro_batches` micro-batches whoever computes them: process r of W takes number r,
  r + W, ... of each step, so the order is the same for any W. A function of the step number grows
  the batch; runs have theirs from `BatchGrowth`.
- `step.tokens` and `step.sequences` count the whole step, all processes together.
- An epoch holds every piece once. Pieces of different sizes: its last micro-batch may be short, and
  the step goes on into the next epoch, so that all steps are full. Pieces of one size: a batch may
  hold the last pieces of one epoch and the first of the next, so that all batches have one shape.
- `Position` is all there is to restore. To go on, only lengths are replayed, from the start of the
  epoch; nothing is read.
- `prefetched(stream.steps(...))` of data/prefetch.py reads ahead in a thread and pins memory.
- Bits a byte: nats a token / log(2) / `validation.bytes_per_token`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.data.batch import Batch
from manyheads.data.chunks import Pieces
from manyheads.data.packing import pack
from manyheads.data.permutation import shuffled
from manyheads.errors import ConfigError

# Places of the order worked out at a time.
BLOCK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """So many steps are done, and the next batch is number `batch` of this epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


BEGINNING = Position()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """What one process computes of a step, and how much the step is in all.

    `places` say which of the step's micro-batches the batches are, counted over all processes: the
    same text has the same place whatever the number of processes, as seeds of masking need.
    """

    number: int
    batches: tuple[Batch, ...]
    places: tuple[int, ...]
    tokens: int
    sequences: int
    after: Position

    def pinned(self) -> "Step":
        return replace(self, batches=tuple(batch.pinned() for batch in self.batches))


class _Planned(NamedTuple):
    """The pieces of one micro-batch, and where the next one is found."""

    numbers: Sequence[int]
    epoch: int
    batch: int


class Stream:
    """Micro-batches in an order that depends on the seed alone."""

    def __init__(
        self,
        pieces: Pieces,
        *,
        batch_tokens: int,
        micro_batches: int | Callable[[int], int] = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.pieces, self.batch_tokens, self.seed = pieces, batch_tokens, seed
        self.micro_batches, self.shuffle = micro_batches, shuffle
        if not len(pieces):
            raise ConfigError("there is nothing to stream", "give a source with text in it")
        longest = int(np.max(pieces.sizes))
        if batch_tokens < longest:
            raise ConfigError(
                f"batch_tokens={batch_tokens} cannot hold a sequence of {longest} tokens",
                f"use {longest} or more",
            )

    def steps(
        self, since: Position = BEGINNING, *, rank: int = 0, world: int = 1
    ) -> Iterator[Step]:
        """The steps after `since`, without end, as process `rank` of `world` computes them."""
        _check_rank(rank, world)
        plan = self._plan(since.epoch, since.batch)
        for number in count(since.step):
            planned = list(islice(plan, self._micro_batches(number, world)))
            mine = range(rank, len(planned), world)
            last = planned[-1]
            yield Step(
                number=number,
                batches=tuple(self.pieces.batch(planned[place].numbers) for place in mine),
                places=tuple(mine),
                tokens=sum(self._tokens(each.numbers) for each in planned),
                sequences=sum(len(each.numbers) for each in planned),
                after=Position(step=number + 1, epoch=last.epoch, batch=last.batch),
            )

    def position(self, step: int) -> Position:
        """Where a step begins: by arithmetic, or by replaying lengths from the very beginning."""
        batches = sum(self._micro_batches(number, 1) for number in range(step))
        if isinstance(self.pieces.sizes, int):
            epoch, batch = self._after(batches)
        elif batches:
            _, epoch, batch = next(islice(self._plan(0, 0), batches - 1, None))
        else:
            epoch, batch = 0, 0
        return Position(step=step, epoch=epoch, batch=batch)

    def once(self, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The micro-batches of the first epoch, every piece once; the last may be short."""
        _check_rank(rank, world)
        for numbers in islice(self.epoch(0), rank, None, world):
            yield self.pieces.batch(numbers)

    def epoch(self, epoch: int) -> Iterator[Sequence[int]]:
        """The numbers of the pieces of each micro-batch of an epoch."""
        sizes = self.pieces.sizes
        if not isinstance(sizes, int):
            yield from pack(self._sized(epoch, sizes), self.batch_tokens)
            return
        each = self.batch_tokens // sizes
        for start in range(0, len(self.pieces), each):
            yield self._order(epoch, start, min(start + each, len(self.pieces))).tolist()

    def _plan(self, epoch: int, batch: int) -> Iterator[_Planned]:
        """Batches from number `batch` of an epoch on, through all epochs that follow."""
        if isinstance(self.pieces.sizes, int):
            yield from self._plan_of_one_size(epoch, batch)
            return
        for later in count(epoch):
            skipped = batch if later == epoch else 0
            for number, numbers in enumerate(islice(self.epoch(later), skipped, None), skipped):
                yield _Planned(numbers, later, number + 1)

    def _plan_of_one_size(self, epoch: int, batch: int) -> Iterator[_Planned]:
        """Any batch is found by arithmetic: pieces are counted through all epochs."""
        assert isinstance(self.pieces.sizes, int)
        each, total = self.batch_tokens // self.pieces.sizes, len(self.pieces)
        for number in count(_rounded_up(epoch * total, each) + batch):
            numbers: list[int] = []
            while len(numbers) < each:
                inside, start = divmod(number * each + len(numbers), total)
                stop = min(start + each - len(numbers), total)
                numbers += self._order(inside, start, stop).tolist()
            yield _Planned(numbers, *self._after(number + 1))

    def _after(self, batches: int) -> tuple[int, int]:
        """The epoch and the number in it of what comes after so many batches of one size."""
        assert isinstance(self.pieces.sizes, int)
        each, total = self.batch_tokens // self.pieces.sizes, len(self.pieces)
        epoch = batches * each // total
        return epoch, batches - _rounded_up(epoch * total, each)

    def _order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        places = np.arange(start, stop)
        if not self.shuffle:
            return places
        return shuffled(places, len(self.pieces), seed=self.seed, epoch=epoch)

    def _sized(self, epoch: int, sizes: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.pieces), BLOCK):
            numbers = self._order(epoch, start, min(start + BLOCK, len(self.pieces)))
            yield from zip(numbers.tolist(), sizes[numbers].tolist(), strict=True)

    def _tokens(self, numbers: Sequence[int]) -> int:
        sizes = self.pieces.sizes
        return sizes * len(numbers) if isinstance(sizes, int) else int(sizes[list(numbers)].sum())

    def _micro_batches(self, step: int, world: int) -> int:
        asked = self.micro_batches(step) if callable(self.micro_batches) else self.micro_batches
        if asked < world:
            raise ConfigError(
                f"micro_batches={asked} of step {step} leave a process of {world} without work",
                f"use {world} or more",
            )
        return asked


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ConfigError(f"there is no rank={rank} of world={world}", f"use 0 to {world - 1}")


def _rounded_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
