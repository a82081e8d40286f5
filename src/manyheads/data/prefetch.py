"""Batches read ahead by a thread, in memory that a GPU can copy from by itself."""

from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, TypeVar

from manyheads.errors import ConfigError


class Pinnable(Protocol):
    """A batch, a step, or whatever else is made of tensors on the host."""

    def pinned(self) -> Any:
        """The same in memory that a GPU copies from by itself."""
        ...


Item = TypeVar("Item", bound=Pinnable)
# How long a thread that cannot go on waits before it looks whether it should.
GLANCE = 0.05


def prefetched(items: Iterator[Item], *, ahead: int = 2, pin: bool = False) -> Iterator[Item]:
    """The same items, up to `ahead` of them ready before they are asked for.

    `pin` them where they go to a GPU. An error of the source comes out here, in its turn. The
    thread ends with the iteration: at its end, on `close()`, or when nobody holds it any more.
    """
    if ahead < 1:
        raise ConfigError(f"ahead={ahead} reads nothing ahead", "use 1 or more")
    return _prefetched(items, ahead, pin)


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


def _read(items: Iterator[Item], ready: Queue[Any], stopped: Event, pinning: bool) -> None:
    try:
        for item in items:
            if not _put((item.pinned() if pinning else item, None), ready, stopped):
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
