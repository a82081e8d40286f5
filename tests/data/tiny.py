"""Small stores and streams for the tests of data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.store import (
    BLOCK,
    FORMAT,
    StoreIndex,
    StorePart,
    TokenBlocks,
    TokenStore,
    array_checksum,
)
from manyheads.data.tokenizer_training import train_tokenizer

TEXTS = tuple(f"document {number}: " + "the cat sat on the mat, \n" * number for number in range(9))


def tokenizer(kind: Any = "bytes", size: int = 300) -> Any:
    return train_tokenizer(InMemoryTexts(TEXTS), size, kind, progress=False)


def store_of(lengths: Sequence[int]) -> TokenStore:
    """A store that was never a file: its tokens are 0, 1, 2, ..., so each tells its place."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    table: NDArray[np.int64] = np.stack((ends, 3 * ends), axis=1)
    tokens = np.arange(total, dtype=np.uint32)
    part = StorePart(
        tokens=total,
        documents=len(ends),
        passages=len(ends),
        blocks=tuple(array_checksum(tokens[i : i + BLOCK]) for i in range(0, total, BLOCK)),
        tables=(0, 0),
        next_file=0,
        next_passage=0,
    )
    index = StoreIndex(
        format=FORMAT,
        finished=True,
        dtype="<u4",
        vocabulary=total,
        end=None,
        tokenizer="",
        source={},
        parts=(part,),
    )
    return TokenStore(
        folder=Path("nowhere"),
        index=index,
        tokens=tokens,
        documents=table,
        passages=table,
        start=0,
        stop=total,
        blocks=TokenBlocks.of(index),
    )
