"""The tokens of a corpus in memory-mapped files.

A store is a folder:

    tokens.bin      every token, uint16 or uint32, document after document
    documents.bin   two int64 per document: tokens and UTF-8 bytes from the start to its end
    passages.bin    the same for each passage that was tokenised, so that bytes are known within
                    documents too
    index.json      counts, checksums, tokenizer, source; whether the store is complete
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import InputError

FORMAT = 1
INDEX = "index.json"
TABLES = {"documents.bin": "documents", "passages.bin": "passages"}
ROW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePart:
    """The counts and checksums of a finished part, and where to continue reading."""

    tokens: int
    documents: int
    passages: int
    checksums: tuple[int, int, int]
    next_file: int
    next_passage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """The contents of a store, the checksum of its tokenizer and the identity of its source."""

    format: int
    finished: bool
    dtype: str
    vocabulary: int
    end: int | None
    tokenizer: str
    source: dict[str, Any]
    parts: tuple[StorePart, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def passages(self) -> int:
        return sum(part.passages for part in self.parts)

    @property
    def sizes(self) -> dict[str, int]:
        """The expected size of each file in bytes."""
        tokens = self.tokens * np.dtype(self.dtype).itemsize
        tables = {name: getattr(self, counted) * ROW for name, counted in TABLES.items()}
        return {"tokens.bin": tokens, **tables}

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "StoreIndex":
        file = folder / INDEX
        if not file.is_file():
            raise InputError(f"{folder} is not a token store", f"give a folder with {INDEX}")
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["format"] != FORMAT:
                raise InputError(
                    f"{file} has format {known['format']}, and this version reads format {FORMAT}",
                    "tokenise the texts again",
                )
            parts = [
                StorePart(**{**p, "checksums": tuple(p["checksums"])}) for p in known.pop("parts")
            ]
            return cls(**known, parts=tuple(parts))
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{file} is damaged ({type(error).__name__}: {error})", "tokenise the texts again"
            ) from None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenStore:
    """The tokens of a store from `start` to `stop`; `split` gives views of the same files."""

    folder: Path
    index: StoreIndex
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    passages: NDArray[np.int64]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of tokens, including end-of-sequence tokens."""
        return self.stop - self.start

    @property
    def bounds(self) -> NDArray[np.int64]:
        """The boundaries of documents in `tokens`, within this view."""
        if not self.size:
            return np.array([self.start], dtype=np.int64)
        ends = self.documents[:, 0]
        first = np.searchsorted(ends, self.start, side="right")
        last = np.searchsorted(ends, self.stop, side="left")
        return np.concatenate(([self.start], ends[first:last], [self.stop])).astype(np.int64)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.bounds) - 1

    def document(self, number: int) -> NDArray[Any]:
        bounds = self.bounds
        if not 0 <= number < len(bounds) - 1:
            raise InputError(f"there is no document {number}", f"use 0 to {len(bounds) - 2}")
        return self.tokens[bounds[number] : bounds[number + 1]]

    @property
    def bytes(self) -> int:
        """The UTF-8 bytes of the text of these tokens."""
        return self._bytes_before(self.stop) - self._bytes_before(self.start)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.size

    def _bytes_before(self, position: int) -> int:
        row = int(np.searchsorted(self.passages[:, 0], position, side="right"))
        return int(self.passages[row - 1, 1]) if row else 0

    def split(
        self, fraction: float, *, by: Literal["tokens", "documents"] = "tokens"
    ) -> tuple["TokenStore", "TokenStore"]:
        """Everything but the last `fraction`, and the last `fraction`, of tokens or documents.

        By tokens the split is at the end of a document or, if none is near, of a passage, so that
        the number of bytes is known.
        """
        if not 0 < fraction < 1:
            raise InputError(
                f"fraction must be between 0 and 1, got {fraction}", "use a value such as 0.1"
            )
        bounds = self.bounds
        if by == "documents":
            kept = len(bounds) - 1 - max(1, round(fraction * (len(bounds) - 1)))
            position = int(bounds[max(kept, 0)])
        else:
            position = self._near(
                self.stop - fraction * self.size, fraction * self.size / 10, bounds
            )
        if not self.start < position < self.stop:
            raise InputError(
                f"cannot split off the last {fraction:.3g} of {len(bounds) - 1} documents and "
                f"{self.size} tokens",
                "use more text, another fraction, or a separator that gives more documents",
            )
        return replace(self, stop=position), replace(self, start=position)

    def _near(self, wanted: float, tolerance: float, bounds: NDArray[np.int64]) -> int:
        nearest = int(bounds[np.argmin(np.abs(bounds - wanted))])
        if abs(nearest - wanted) <= tolerance:
            return nearest
        ends = self.passages[:, 0]
        return int(ends[np.argmin(np.abs(ends - wanted))])

    def verify(self) -> None:
        """Read everything and compare it with the checksums."""
        for column, file in enumerate(self.index.sizes):
            width = np.dtype(self.index.dtype).itemsize if column == 0 else ROW
            with (self.folder / file).open("rb") as open_file:
                for number, part in enumerate(self.index.parts):
                    count = (part.tokens, part.documents, part.passages)[column]
                    if zlib.crc32(open_file.read(count * width)) != part.checksums[column]:
                        raise InputError(
                            f"{self.folder / file} is damaged in part {number}",
                            "tokenise the texts again",
                        )


def open_store(folder: str | Path, tokenizer: Any = None) -> TokenStore:
    """A complete store; with `tokenizer`, raise if it was made with another one."""
    folder = Path(folder)
    index = StoreIndex.read(folder)
    if not index.finished:
        raise InputError(
            f"{folder} is incomplete: it has {index.documents} documents so far",
            "call write_store again, which resumes",
        )
    if tokenizer is not None and tokenizer_checksum(tokenizer) != index.tokenizer:
        raise InputError(
            f"{folder} was made with another tokenizer", "use that one, or tokenise again"
        )
    for name, size in index.sizes.items():
        file = folder / name
        there = file.stat().st_size if file.is_file() else 0
        if there != size:
            raise InputError(
                f"{file} has {there} bytes, and {INDEX} says {size}", "tokenise the texts again"
            )
    store = TokenStore(
        folder=folder,
        index=index,
        tokens=_mapped(folder / "tokens.bin", np.dtype(index.dtype), (index.tokens,)),
        documents=_mapped(folder / "documents.bin", np.dtype("<i8"), (index.documents, 2)),
        passages=_mapped(folder / "passages.bin", np.dtype("<i8"), (index.passages, 2)),
        start=0,
        stop=index.tokens,
    )
    for table in (store.documents, store.passages):
        if len(table) and (table[-1, 0] != index.tokens or (np.diff(table[:, 0]) < 0).any()):
            raise InputError(f"{folder} has inconsistent documents", "tokenise the texts again")
    return store


def tokenizer_checksum(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's JSON without padding and truncation."""
    known = json.loads(tokenizer.to_str())
    known |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _mapped(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    if not shape[0]:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=shape)
