"""Greedy best-fit packing: chunks in order, and the best fit for the last gap of a batch."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

# Chunks considered at once: more give a better fit, fewer stay closer to the shuffled order.
LOOKAHEAD = 1024


def pack(
    chunks: Iterable[tuple[int, int]], budget: int, *, lookahead: int = LOOKAHEAD
) -> Iterator[list[int]]:
    """Batches of at most `budget` tokens from (number, size) chunks, which are never cut.

    Every batch starts with the chunk that has waited longest, so that none waits forever.

    >>> list(pack([(0, 5), (1, 4), (2, 3), (3, 3), (4, 1)], budget=8))
    [[0, 2], [1, 3, 4]]
    """
    buffer = _Buffer(iter(chunks), lookahead)
    while len(buffer):
        numbers: list[int] = []
        space = budget
        # The last two are chosen by size, to close the gap.
        while len(buffer) and buffer.oldest <= space and (not numbers or buffer.mean * 2.5 < space):
            space -= buffer.oldest
            # The oldest of all is the oldest of its size.
            numbers.append(buffer.take(buffer.oldest))
        while sizes := buffer.closest(space):
            for size in sizes:
                numbers.append(buffer.take(size))
                space -= size
        yield numbers


class _Buffer:
    """Waiting chunks by age and by size, refilled from the source.

    They are distinguished by when they came: in a mixture the same chunk may wait twice.
    """

    def __init__(self, source: Iterator[tuple[int, int]], lookahead: int) -> None:
        self._source = source
        self._by_age: deque[tuple[int, int]] = deque()
        self._by_size: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._came = 0
        self._gone: set[int] = set()
        # Bit s is set if a chunk of size s waits: the best fit is then the highest bit.
        self._sizes = 0
        self._total = 0
        for _ in range(lookahead):
            self._refill()

    def __len__(self) -> int:
        return len(self._by_age) - len(self._gone)

    def _refill(self) -> None:
        chunk = next(self._source, None)
        if chunk is None:
            return
        number, size = chunk
        self._came += 1
        self._by_age.append((self._came, size))
        self._by_size[size].append((self._came, number))
        self._sizes |= 1 << size
        self._total += size

    @property
    def oldest(self) -> int:
        """The size of the chunk that has waited longest."""
        while self._by_age[0][0] in self._gone:
            self._gone.remove(self._by_age.popleft()[0])
        return self._by_age[0][1]

    @property
    def mean(self) -> float:
        return self._total / len(self)

    def take(self, size: int) -> int:
        """The chunk of this size that has waited longest."""
        of_size = self._by_size[size]
        came, number = of_size.popleft()
        if not of_size:
            self._sizes ^= 1 << size
        self._gone.add(came)
        self._total -= size
        self._refill()
        return number

    def closest(self, space: int) -> tuple[int, ...]:
        """The one size or two that together come closest to `space` from below."""
        first = self._best(space)
        best: tuple[int, ...] = (first,) if first else ()
        total = first
        while 2 * first > total < space:
            second = self._best(min(space - first, first))
            if second == first and len(self._by_size[first]) < 2:
                second = self._best(first - 1)
            if second and first + second > total:
                best, total = (first, second), first + second
            first = self._best(first - 1)
        return best

    def _best(self, space: int) -> int:
        """The largest waiting size of at most `space`, 0 where there is none."""
        return max(0, (self._sizes & ((2 << space) - 1)).bit_length() - 1)
