"""Batches prepared ahead in a thread, optionally in pinned memory."""

from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, TypeVar

from manyheads.errors import ConfigError


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
        _drain(ready)
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
        try:
            ready.put(what, timeout=POLL)
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
