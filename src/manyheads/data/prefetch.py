"""Batches read ahead by a thread, in memory that a GPU can copy from by itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyheads.data.batch import Batch
from manyheads.data.stream import Step
from manyheads.errors import ConfigError
from manyheads.ragged import Ragged

__all__ = ["pinned", "prefetched", "send"]

Item = TypeVar("Item")
# How long a thread that cannot go on waits before it looks whether it should.
GLANCE = 0.05


def prefetched(items: Iterator[Item], *, ahead: int = 2, pin: bool | None = None) -> Iterator[Item]:
    """The same steps or batches, up to `ahead` of them ready before they are asked for.

    Memory of steps and batches is pinned where there is CUDA, unless `pin` says otherwise. An error
    of the source comes out here, in its turn. The thread ends with the iteration: at its end, on
    `close()`, or when nobody holds it any more.
    """
    if ahead < 1:
        raise ConfigError(f"ahead={ahead} reads nothing ahead", "use 1 or more")
    pinning = torch.cuda.is_available() if pin is None else pin
    return _prefetched(items, ahead, pinning)


def _prefetched(items: Iterator[Item], ahead: int, pinning: bool) -> Iterator[Item]:
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
        _drain(ready)
        reader.join()


def send(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on a device; pinned memory is copied while the host goes on."""
    return _changed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _read(items: Iterator[Item], ready: Queue[Any], stopped: Event, pinning: bool) -> None:
    try:
        for item in items:
            if not _put((_pinned_item(item) if pinning else item, None), ready, stopped):
                return
        _put((None, None), ready, stopped)
    except BaseException as error:
        _put((None, error), ready, stopped)


def _put(what: Any, ready: Queue[Any], stopped: Event) -> bool:
    """Whether it was wanted."""
    while not stopped.is_set():
        try:
            ready.put(what, timeout=GLANCE)
            return True
        except Full:
            continue
    return False


def _drain(ready: Queue[Any]) -> None:
    try:
        while True:
            ready.get_nowait()
    except Empty:
        return


def pinned(batch: Batch) -> Batch:
    """The batch in memory that a GPU copies from by itself."""
    return _changed(batch, Tensor.pin_memory)


def _pinned_item(item: Any) -> Any:
    if isinstance(item, Step):
        return replace(item, batches=tuple(pinned(batch) for batch in item.batches))
    return pinned(item) if isinstance(item, Batch) else item


def _changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return replace(
        batch,
        texts=None if batch.texts is None else _changed_ragged(batch.texts, change),
        others=None if batch.others is None else _changed_ragged(batch.others, change),
        images=tuple(change(image) for image in batch.images),
        labels=None if batch.labels is None else change(batch.labels),
    )


def _changed_ragged(ragged: Ragged, change: Callable[[Tensor], Tensor]) -> Ragged:
    lengths = replace(
        ragged.lengths,
        offsets=change(ragged.lengths.offsets),
        positions=change(ragged.lengths.positions),
        sequence_of_token=change(ragged.lengths.sequence_of_token),
    )
    return Ragged(change(ragged.values), lengths)
