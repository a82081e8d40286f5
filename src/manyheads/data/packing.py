"""Greedy best fit: pieces in their order, and for the last gap of a batch those that fill it."""

from collections import deque
from collections.abc import Iterable, Iterator

# Pieces looked at together: more find a better fit, fewer keep closer to the shuffled order.
WAITING = 1024


def pack(
    pieces: Iterable[tuple[int, int]], budget: int, *, waiting: int = WAITING
) -> Iterator[list[int]]:
    """Numbers of (number, size) pieces in batches of at most `budget`, each piece once and whole.

    Every batch begins with the piece that has waited longest, so none waits for ever.

    >>> list(pack([(0, 5), (1, 4), (2, 3), (3, 3), (4, 1)], budget=8))
    [[0, 2], [1, 3, 4]]
    """
    buffer = _Buffer(iter(pieces), waiting)
    while len(buffer):
        numbers: list[int] = []
        room = budget
        # The last two are chosen, not taken as they come: some two of them close the gap.
        while len(buffer) and buffer.oldest <= room and (not numbers or buffer.mean * 2.5 < room):
            room -= buffer.oldest
            numbers.append(buffer.take_oldest())
        while sizes := buffer.closest(room):
            for size in sizes:
                numbers.append(buffer.take(size))
                room -= size
        yield numbers


class _Buffer:
    """Pieces that wait, by age and by size, filled up from the source after each that leaves."""

    def __init__(self, source: Iterator[tuple[int, int]], most: int) -> None:
        self._source = source
        self._by_age: deque[tuple[int, int]] = deque()
        self._by_size: dict[int, deque[int]] = {}
        self._gone: set[int] = set()
        # Bit s is set where a piece of size s waits: the best fit is then the highest bit.
        self._sizes = 0
        self._total = 0
        for _ in range(most):
            self._refill()

    def __len__(self) -> int:
        return len(self._by_age) - len(self._gone)

    def _refill(self) -> None:
        piece = next(self._source, None)
        if piece is None:
            return
        number, size = piece
        self._by_age.append(piece)
        of_size = self._by_size.get(size)
        if of_size is None:
            of_size = self._by_size[size] = deque()
        of_size.append(number)
        self._sizes |= 1 << size
        self._total += size

    @property
    def oldest(self) -> int:
        """The size of the piece that has waited longest."""
        while self._by_age[0][0] in self._gone:
            self._gone.remove(self._by_age.popleft()[0])
        return self._by_age[0][1]

    @property
    def mean(self) -> float:
        return self._total / len(self)

    def take_oldest(self) -> int:
        # The oldest of all is the oldest of its size.
        return self.take(self.oldest)

    def take(self, size: int) -> int:
        """The piece of this size that has waited longest."""
        of_size = self._by_size[size]
        number = of_size.popleft()
        if not of_size:
            self._sizes ^= 1 << size
        self._gone.add(number)
        self._total -= size
        self._refill()
        return number

    def closest(self, room: int) -> tuple[int, ...]:
        """The one size or two that together come closest to `room` from below."""
        first = self._best(room)
        best: tuple[int, ...] = (first,) if first else ()
        most = first
        while 2 * first > most < room:
            second = self._best(min(room - first, first))
            if second == first and len(self._by_size[first]) < 2:
                second = self._best(first - 1)
            if second and first + second > most:
                best, most = (first, second), first + second
            first = self._best(first - 1)
        return best

    def _best(self, room: int) -> int:
        """The largest waiting size of at most `room`, 0 where there is none."""
        return max(0, (self._sizes & ((2 << room) - 1)).bit_length() - 1)
