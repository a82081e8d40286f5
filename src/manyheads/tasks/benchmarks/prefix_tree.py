"""Texts that begin alike as a tree of segments, and the passes that read every segment once.

A benchmark asks for several continuations of one context, and puts the same examples before all of
its questions. Sorted texts with a common prefix are neighbors, so the tree is read off them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Ids = tuple[int, ...]

# A shorter prefix is not worth a pass of its own.
MIN_SHARED = 8
# Texts whose trees are built together, and keys that are in memory at once, in batches of tokens.
BLOCK_BATCHES = 8
CACHE_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens whose log-probability after a context is measured; both have at least one."""

    context: Ids
    tokens: Ids

    @property
    def text(self) -> Ids:
        """What a model reads: all but the last token."""
        return self.context + self.tokens[:-1]


@dataclass(frozen=True, slots=True)
class Read:
    """A row of a pass whose logits say how likely `target` is, the next token of a `request`."""

    row: int
    target: int
    request: int


@dataclass(slots=True, eq=False)
class Segment:
    """The tokens of `texts` from `start` on, as far as all of them agree."""

    ids: Ids
    start: int
    texts: Sequence[Ids]
    children: list["Segment"] = field(default_factory=list)
    # Rows count from the first of these tokens.
    reads: list[Read] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def longest(self) -> int:
        """The tokens of the longest text."""
        return max(map(len, self.texts))

    def walk(self) -> Iterator["Segment"]:
        """The segment and all that continue it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def add_reads(self, continuation: Continuation, request: int) -> None:
        """The reads of a continuation that fall into this segment."""
        before = len(continuation.context) - 1
        for place in range(max(before, self.start), self.end):
            target = continuation.tokens[place - before]
            self.reads.append(Read(place - self.start, target, request))


@dataclass(slots=True, eq=False)
class Pass:
    """Segments that run side by side; `parents` are their sequences in the pass before."""

    segments: list[Segment]
    parents: list[int]
    children: list["Pass"] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def longest(self) -> int:
        """The tokens of the longest text."""
        return max(segment.longest for segment in self.segments)

    def reads(self) -> Iterator[Read]:
        """All reads, with rows of the packed batch."""
        start = 0
        for segment in self.segments:
            for read in segment.reads:
                yield Read(start + read.row, read.target, read.request)
            start += len(segment.ids)

    def walk(self) -> Iterator["Pass"]:
        """The pass and all that follow it, in the order in which they run."""
        yield self
        for child in self.children:
            yield from child.walk()


def common_length(first: Ids, second: Ids, start: int = 0) -> int:
    """How many tokens two texts have in common from the beginning, `start` at least.

    >>> common_length((5, 6, 7, 8), (5, 6, 9))
    2
    """
    low, high = start, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def segment_tree(texts: Sequence[Ids], start: int = 0) -> list[Segment]:
    """The trees of sorted, different texts that agree up to `start`.

    >>> [root] = segment_tree([tuple(range(9)), (*range(9), 1, 2), (*range(9), 3)])
    >>> root.end, [child.ids for child in root.children]
    (9, [(1, 2), (3,)])
    """
    segments, first = [], 0
    while first < len(texts):
        end, stop = len(texts[first]), first + 1
        while stop < len(texts):
            common = common_length(texts[stop - 1], texts[stop], start)
            if common < start + MIN_SHARED:
                break
            end, stop = min(end, common), stop + 1
        own = texts[first:stop]
        children = segment_tree([text for text in own if len(text) > end], end)
        segments.append(Segment(own[0][start:end], start, own, children))
        first = stop
    return segments


def plan_passes(
    continuations: Sequence[Continuation], batch_tokens: int, *, shared: bool = True
) -> Iterator[list[Pass]]:
    """The passes that read all continuations, in blocks that have nothing in common.

    Without `shared` every text runs whole; equal texts still run once.
    """
    by_text: dict[Ids, list[int]] = {}
    for request, continuation in enumerate(continuations):
        by_text.setdefault(continuation.text, []).append(request)
    for texts in _blocks(sorted(by_text), BLOCK_BATCHES * batch_tokens):
        trees = segment_tree(texts) if shared else [Segment(text, 0, [text]) for text in texts]
        for segment in (segment for tree in trees for segment in tree.walk()):
            for request in (request for text in segment.texts for request in by_text[text]):
                segment.add_reads(continuations[request], request)
        yield _passes(trees, list(range(len(trees))), batch_tokens)


def _blocks(texts: Sequence[Ids], max_tokens: int) -> Iterator[list[Ids]]:
    """Neighbors with so many tokens that the text before does not have; at least one text."""
    block: list[Ids] = []
    tokens = 0
    for text in texts:
        new = len(text) - (common_length(block[-1], text) if block else 0)
        if block and tokens + new > max_tokens:
            yield block
            block, tokens, new = [], 0, len(text)
        block.append(text)
        tokens += new
    if block:
        yield block


def _passes(segments: Sequence[Segment], parents: Sequence[int], batch_tokens: int) -> list[Pass]:
    """Segments of texts of similar length together, each group followed by what continues it."""
    lengths = [segment.longest for segment in segments]
    order = sorted(range(len(segments)), key=lambda index: (lengths[index], parents[index]))
    passes: list[Pass] = []
    tokens = 0
    for index in order:
        segment = segments[index]
        tokens += len(segment.ids)
        held = (len(passes[-1].segments) + 1) * lengths[index] if passes else 0
        if not passes or tokens > batch_tokens or held > CACHE_BATCHES * batch_tokens:
            passes.append(Pass([], []))
            tokens = len(segment.ids)
        passes[-1].segments.append(segment)
        passes[-1].parents.append(parents[index])
    for group in passes:
        pairs = [(child, row) for row, own in enumerate(group.segments) for child in own.children]
        group.children = _passes(
            [child for child, _ in pairs], [row for _, row in pairs], batch_tokens
        )
    return passes
