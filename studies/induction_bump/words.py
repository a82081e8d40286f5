"""Frequent words as tokens, and the bytes of all others: texts that repeat tokens, not letters."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from studies.byte_texts import BYTES, HELD_OUT, ByteTexts, read_bytes

# A word with the space before it, or a single byte.
PIECE = re.compile(rb" ?[A-Za-z]+|[\x00-\xff]", re.DOTALL)


@cache
def read_words(source: str, limit: int | None, vocabulary: int) -> tuple[Tensor, tuple[bytes, ...]]:
    """The ids of a text, and what each id stands for: all bytes first, then the frequent words."""
    text = read_bytes(source, limit)
    pieces = PIECE.findall(text)
    counts = Counter(piece for piece in pieces if len(piece) > 1)
    words = [word for word, _ in counts.most_common(vocabulary - BYTES)]
    ids = {word: BYTES + place for place, word in enumerate(words)}

    def encode() -> Iterator[int]:
        for piece in pieces:
            if piece in ids:
                yield ids[piece]
            else:
                yield from piece

    table = (*(bytes([byte]) for byte in range(BYTES)), *words)
    return torch.from_numpy(np.fromiter(encode(), np.int32)), table


class WordTexts(ByteTexts):
    """Passages of words and bytes; the last 5 % are held out."""

    def __init__(self, source: str, device: str, limit: int | None, vocabulary: int) -> None:
        ids, self.table = read_words(source, limit, vocabulary)
        cut = int(len(ids) * (1 - HELD_OUT))
        self.device, self.start = device, False
        self.parts = {"train": ids[:cut].to(device), "held out": ids[cut:].to(device)}


def repeated_blocks(count: int, size: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Random words [b 2 size], none twice in a block; each block comes twice."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.rand(count, vocabulary - BYTES, generator=generator).argsort(1)[:, :size]
    return (BYTES + words).repeat(1, 2)
