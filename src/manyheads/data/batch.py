"""One micro-batch of training data, and batches prepared ahead in a thread."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.ragged import Lengths, Ragged

# Targets with this label do not count, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Texts or images that are trained on together, with their labels.

    `others` are the second texts of pairs: the target of a `Seq2Seq`, or the text that a sentence
    embedding should be close to. There is one label per sequence, per token, or per image; texts
    with any number of labels have a row of zeros and ones each, one per class.
    `negatives` are texts that an embedding should be far from, `negative_counts` of them per text,
    and `scores` those of a teacher: for each text of its other text, then of its negatives.
    """

    texts: Ragged | None = None
    others: Ragged | None = None
    negatives: Ragged | None = None
    negative_counts: tuple[int, ...] = ()
    scores: Float[Tensor, " s"] | None = None
    images: tuple[Tensor, ...] = ()
    labels: Int[Tensor, " b"] | Int[Tensor, " n"] | Int[Tensor, "b classes"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all texts, for rates and budgets."""
        parts = (self.texts, self.others, self.negatives)
        return sum(part.lengths.total for part in parts if part is not None)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """A copy on a device; from pinned memory `non_blocking` copies do not stop the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            texts=None if self.texts is None else map_ragged(self.texts, function),
            others=None if self.others is None else map_ragged(self.others, function),
            negatives=None if self.negatives is None else map_ragged(self.negatives, function),
            scores=None if self.scores is None else function(self.scores),
            images=tuple(function(image) for image in self.images),
            labels=None if self.labels is None else function(self.labels),
        )


def map_ragged(ragged: Ragged, function: Callable[[Tensor], Tensor]) -> Ragged:
    """The same sequences with a function applied to every tensor, such as a copy to a device."""
    return Ragged(function(ragged.values), map_lengths(ragged.lengths, function))


def map_lengths(lengths: Lengths, function: Callable[[Tensor], Tensor]) -> Lengths:
    return replace(
        lengths,
        offsets=function(lengths.offsets),
        positions=function(lengths.positions),
        sequence_of_token=function(lengths.sequence_of_token),
    )


@runtime_checkable
class Pinnable(Protocol):
    """A batch, a step, or another collection of tensors on the host."""

    def pin_memory(self) -> Any:
        """A copy in pinned memory."""
        ...


Item = TypeVar("Item", bound=Pinnable)
# Seconds between two checks of a blocked thread whether it should end.
POLL = 0.05


def prefetch(items: Iterator[Item], *, ahead: int = 2, pin: bool = False) -> Iterator[Item]:
    """The same items, up to `ahead` of them prepared in advance.

    `pin` copies them to pinned memory for a GPU. An error of the source is raised here in its turn.
    The thread ends with the iteration: at its end, on `close()`, or when it is garbage-collected.
    """
    if ahead < 1:
        raise ConfigError(f"ahead must be at least 1, got {ahead}", "use 1 or more")
    return _prefetch(items, ahead, pin)


def _prefetch(items: Iterator[Item], ahead: int, pinning: bool) -> Iterator[Item]:
    ready: Queue[Any] = Queue(maxsize=ahead)
    stopped = Event()
    reader = Thread(
        target=_read, args=(items, ready, stopped, pinning), name="prefetch", daemon=True
    )
    reader.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        with suppress(Empty):
            while True:
                ready.get_nowait()
        reader.join()


def _read(items: Iterator[Item], ready: Queue[Any], stopped: Event, pinning: bool) -> None:
    try:
        for item in items:
            if not _put((item.pin_memory() if pinning else item, None), ready, stopped):
                return
        _put((None, None), ready, stopped)
    except BaseException as error:
        _put((None, error), ready, stopped)


def _put(what: Any, ready: Queue[Any], stopped: Event) -> bool:
    """Whether the item was taken before the consumer stopped."""
    while not stopped.is_set():
        with suppress(Full):
            ready.put(what, timeout=POLL)
            return True
    return False
