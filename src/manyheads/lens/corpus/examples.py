"""Which texts of a corpus are shown for a head: those where it is sharpest, and some of each tenth.

How sharp a head is on a text is its activation: the largest weight that any query but the first
gives to any key but the first, which most heads use as a sink.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, Float, Int

DECILES = 10
# Activations are sampled by their logit, since those of many heads are close to 1.
LOWEST_LOGIT, HIGHEST_LOGIT, BINS = -7.0, 14.0, 64
# Of a histogram from 0 to 1.
LINEAR_BINS = 50


@dataclass(frozen=True, slots=True, eq=False)
class HeadExample:
    """A head on one text: the query with its largest weight, and the queries around it.

    `rows` are the queries; `counts` says how many keys each has in `keys` and `weights`, which list
    them one query after the other, the largest weight first.
    """

    text: int
    query: int
    activation: float
    rows: range
    counts: Int[np.ndarray, " t"]
    keys: Int[np.ndarray, " entries"]
    weights: Float[np.ndarray, " entries"]

    def links(self) -> Iterator[tuple[int, int, float]]:
        """Every (query, key, weight)."""
        queries = np.repeat(np.arange(self.rows.start, self.rows.stop), self.counts)
        for query, key, weight in zip(queries, self.keys, self.weights, strict=True):
            yield int(query), int(key), float(weight)


@lru_cache(maxsize=65536)
def priority_of(text: int, seed: int) -> float:
    """A number from 0 to 1 that seems random and depends on nothing but the text and the seed."""
    digest = blake2b(f"{seed} {text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def bin_of(activation: Float[np.ndarray, " h"]) -> Int[np.ndarray, " h"]:
    """The bin of each activation, by its logit.

    >>> bin_of(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 21, 63]
    """
    clipped = np.clip(activation.astype(np.float64), 1e-9, 1 - 1e-9)
    logits = np.log(clipped / (1 - clipped))
    step = (HIGHEST_LOGIT - LOWEST_LOGIT) / BINS
    return np.clip((logits - LOWEST_LOGIT) // step, 0, BINS - 1).astype(np.int64)


@dataclass(slots=True, eq=False)
class ExampleBook:
    """Chooses examples for the heads of one attention while texts go by in any order.

    It keeps the `top` texts by activation (of equal ones the earlier), and of each bin of
    activations the `per_bin` texts with the lowest priority, so that the choice does not depend on
    the order of texts, on batches, or on a pause between them.
    """

    heads: int
    top: int
    per_bin: int
    seed: int
    histogram: Int[np.ndarray, "h bins"] = field(init=False)
    linear: Int[np.ndarray, "h linear"] = field(init=False)
    activation_sums: Float[np.ndarray, " h"] = field(init=False)
    # The examples of each head by the number of their text.
    stored: list[dict[int, HeadExample]] = field(init=False)
    # What a text must exceed to be among the sharpest, and stay below to be drawn for a bin.
    _least: Float[np.ndarray, " h"] = field(init=False)
    _ceilings: Float[np.ndarray, "h bins"] = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = np.zeros((self.heads, BINS), dtype=np.int64)
        self.linear = np.zeros((self.heads, LINEAR_BINS), dtype=np.int64)
        self.activation_sums = np.zeros(self.heads)
        self.stored = [{} for _ in range(self.heads)]
        self._least = np.full(self.heads, -np.inf)
        self._ceilings = np.full((self.heads, BINS), np.inf)

    def choose(self, text: int, activation: Float[np.ndarray, " h"]) -> Bool[np.ndarray, " h"]:
        """Count the activations of a text, and say which heads may want it as an example."""
        bins, every = bin_of(activation), np.arange(self.heads)
        self.histogram[every, bins] += 1
        linear = np.clip((activation * LINEAR_BINS).astype(np.int64), 0, LINEAR_BINS - 1)
        self.linear[every, linear] += 1
        self.activation_sums += activation
        drawn = priority_of(text, self.seed) < self._ceilings[every, bins]
        return (activation >= self._least) | drawn

    def keep(self, head: int, example: HeadExample) -> None:
        """Keep an example, and forget those that it replaces."""
        self.stored[head][example.text] = example
        self._refresh(head)

    def refresh(self) -> None:
        """Find out anew what a text must exceed, after `stored` was restored."""
        for head in range(self.heads):
            self._refresh(head)

    def _refresh(self, head: int) -> None:
        stored, sharpest = self.stored[head], self.sharpest(head)
        needed = {example.text for example in sharpest}
        for place, drawn in self._drawn(head).items():
            needed |= {example.text for example in drawn}
            if len(drawn) == self.per_bin:
                self._ceilings[head, place] = max(map(self._priority, drawn))
        self.stored[head] = {text: example for text, example in stored.items() if text in needed}
        if len(sharpest) == self.top:
            self._least[head] = sharpest[-1].activation

    def sharpest(self, head: int) -> list[HeadExample]:
        """The examples with the largest activation."""
        return sorted(self.stored[head].values(), key=_by_sharpness)[: self.top]

    def by_decile(self, head: int, count: int) -> dict[int, list[HeadExample]]:
        """Some examples of each tenth of all texts, from 1 (least sharp) to 10."""
        counts = self.histogram[head]
        before, total = np.cumsum(counts) - counts, int(counts.sum())
        sampled: dict[int, list[HeadExample]] = {}
        for place, drawn in self._drawn(head).items():
            # Those of one bin stand for equal parts of it.
            for order, example in enumerate(sorted(drawn, key=_by_sharpness, reverse=True)):
                rank = before[place] + (order + 0.5) / len(drawn) * counts[place]
                decile = min(DECILES, 1 + int(DECILES * rank / total))
                sampled.setdefault(decile, []).append(example)
        return {
            decile: sorted(sorted(examples, key=self._priority)[:count], key=_by_sharpness)
            for decile, examples in sorted(sampled.items())
        }

    def _drawn(self, head: int) -> dict[int, list[HeadExample]]:
        """The examples of each bin that were drawn."""
        by_bin: dict[int, list[HeadExample]] = {}
        for example in sorted(self.stored[head].values(), key=self._priority):
            drawn = by_bin.setdefault(_bin(example), [])
            if len(drawn) < self.per_bin:
                drawn.append(example)
        return by_bin

    def _priority(self, example: HeadExample) -> float:
        return priority_of(example.text, self.seed)


def _by_sharpness(example: HeadExample) -> tuple[float, int]:
    return -example.activation, example.text


def _bin(example: HeadExample) -> int:
    return int(bin_of(np.array([example.activation]))[0])
