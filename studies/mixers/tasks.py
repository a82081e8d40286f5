"""What the models learn: bytes of an encyclopaedia with needles in it, and associative recall.

A needle is a mark, a key and a value anywhere in a text; at its end the mark and the key stand
again, and the value must follow. Each text with needles has several, so that a key must be found,
not only a mark. Associative recall (MQAR, arXiv 2312.04927) has nothing but keys and values: pairs
first, then every key again in another order.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BYTES, SYMBOLS, NEEDLES = 256, 32, 4
MARK, KEYS, VALUES = BYTES, BYTES + 1, BYTES + 1 + SYMBOLS
VOCABULARY = BYTES + 1 + 2 * SYMBOLS
HELD_OUT = 0.05


class Batch(NamedTuple):
    """Tokens, what follows each, and its weight in the loss: 0 where nothing is asked."""

    ids: Tensor
    targets: Tensor
    weights: Tensor


class Encyclopaedia:
    """Passages of enwik8 as bytes; the last 5 % are held out."""

    def __init__(self, file: Path, device: str) -> None:
        data = np.fromfile(file, dtype=np.uint8)
        cut = int(len(data) * (1 - HELD_OUT))
        self.device = device
        self.parts = {"train": data[:cut], "held out": data[cut:]}

    def passages(self, part: str, count: int, length: int, draw: np.random.Generator) -> np.ndarray:
        data = self.parts[part]
        starts = draw.integers(0, len(data) - length, count)
        return np.stack([data[start : start + length] for start in starts]).astype(np.int64)

    def batches(self, count: int, length: int, seed: int) -> Iterator[Batch]:
        """For training without end: half of the texts have needles.

        Their answers together weigh as much as all the text.
        """
        draw = np.random.default_rng(seed)
        while True:
            ids = self.passages("train", count, length + 1, draw)
            with_needles(ids[: count // 2], draw)
            weights = np.full((count, length), 1 / (count * length), np.float32)
            weights[: count // 2, answers(length)] += 1 / (count // 2 * NEEDLES)
            yield self._batch(ids, weights)

    def plain(self, count: int, length: int, seed: int) -> Batch:
        draw = np.random.default_rng(seed)
        weights = np.full((count, length), 1 / (count * length), np.float32)
        return self._batch(self.passages("held out", count, length + 1, draw), weights)

    def needles(self, count: int, length: int, seed: int) -> Batch:
        """Only the values at the end are asked for."""
        draw = np.random.default_rng(seed)
        ids = self.passages("held out", count, length + 1, draw)
        with_needles(ids, draw)
        weights = np.zeros((count, length), np.float32)
        weights[:, answers(length)] = 1 / (count * NEEDLES)
        return self._batch(ids, weights)

    def said_twice(self, count: int, length: int, seed: int) -> Batch:
        """Passages of half the length, twice: the loss is that of the second minus the first."""
        half = length // 2
        once = self.passages("held out", count, half, np.random.default_rng(seed))
        ids = np.concatenate([once, once, once[:, :1]], axis=1)
        weights = np.zeros((count, 2 * half), np.float32)
        # The first byte of a passage follows from nothing.
        weights[:, : half - 1] = -1 / (count * (half - 1))
        weights[:, half:-1] = 1 / (count * (half - 1))
        return self._batch(ids, weights)

    def _batch(self, ids: np.ndarray, weights: np.ndarray) -> Batch:
        both = torch.from_numpy(ids).to(self.device)
        return Batch(both[:, :-1], both[:, 1:], torch.from_numpy(weights).to(self.device))


def answers(length: int) -> np.ndarray:
    """Where a text of so many tokens is asked for its needles."""
    return length - 1 - 3 * np.arange(NEEDLES)


def with_needles(ids: np.ndarray, draw: np.random.Generator) -> None:
    """Write needles into the texts, and what asks for them at their ends."""
    end = ids.shape[1] - 3 * NEEDLES
    for text in ids:
        keys = KEYS + draw.permutation(SYMBOLS)[:NEEDLES]
        values = VALUES + draw.integers(0, SYMBOLS, NEEDLES)
        places = 3 * draw.permutation(end // 3)[:NEEDLES]
        for place, key, value in zip(places, keys, values, strict=True):
            text[place : place + 3] = MARK, key, value
        for index, which in enumerate(draw.permutation(NEEDLES)):
            start = end + 3 * index
            text[start : start + 3] = MARK, keys[which], values[which]


def recall_batches(
    count: int, choices: Sequence[int], symbols: int, seed: int, device: str
) -> Iterator[Batch]:
    """Associative recall: pairs of keys and values, then all keys again; values are asked.

    Each batch has one of several numbers of pairs, so that few can be learned before many.
    """
    draw = torch.Generator().manual_seed(seed)
    while True:
        pairs = choices[int(torch.randint(len(choices), (1,), generator=draw))]
        keys = torch.rand(count, symbols, generator=draw).argsort(1)[:, :pairs]
        values = symbols + torch.randint(0, symbols, (count, pairs), generator=draw)
        order = torch.rand(count, pairs, generator=draw).argsort(1)
        first = torch.stack([keys, values], dim=2).flatten(1)
        again = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
        whole = torch.cat([first, again], dim=1)
        targets, weights = whole.roll(-1, 1), torch.zeros(whole.shape)
        weights[:, 2 * pairs :: 2] = 1 / (count * pairs)
        yield Batch(whole.to(device), targets.to(device), weights.to(device))
