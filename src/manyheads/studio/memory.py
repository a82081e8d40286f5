"""Runs that were made for a page, kept while there is room: most questions are about the last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from manyheads.studio.reading import Reading

__all__ = ["Memory"]


class Memory:
    """Readings by what they were made of; the longest unused go first.

    One thread makes them, while others may look.

    >>> Memory(most_bytes=10).used
    0
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, Reading] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Reading]) -> Reading:
        """The reading of this key, made where there is none; the newest always stays."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = make()
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > 1 and self.used > self.most_bytes:
                self._kept.popitem(last=False)
        return found

    @property
    def used(self) -> int:
        return sum(reading.bytes for reading in self._kept.values())
