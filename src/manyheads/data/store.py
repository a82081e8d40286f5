"""Tokens of a corpus in files that are mapped into memory: opened in no time, read as needed.

A store is a folder:

    tokens.bin      every token, uint16 or uint32, document after document
    documents.bin   two int64 a document: tokens and bytes of UTF-8 from the start to its end
    passages.bin    the same for each passage that was tokenised, so that bytes are known within
                    documents too
    index.json      counts, checksums, tokenizer, source; whether all is written
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
class Part:
    """What one finished part added, its checksums, and where reading goes on after it."""

    tokens: int
    documents: int
    passages: int
    checksums: tuple[int, int, int]
    next_file: int
    next_passage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a store holds; `tokenizer` and `source` say what it was made with and from."""

    format: int
    finished: bool
    dtype: str
    vocabulary: int
    end: int | None
    tokenizer: str
    source: dict[str, Any]
    parts: tuple[Part, ...]

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
        """How many bytes each file must have."""
        tokens = self.tokens * np.dtype(self.dtype).itemsize
        tables = {name: getattr(self, counted) * ROW for name, counted in TABLES.items()}
        return {"tokens.bin": tokens, **tables}

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Index":
        file = folder / INDEX
        if not file.is_file():
            raise InputError(f"{folder} holds no store of tokens", f"name a folder with {INDEX}")
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["format"] != FORMAT:
                raise InputError(
                    f"{file} has format {known['format']}, and this version reads {FORMAT}",
                    "tokenise the texts again",
                )
            parts = [Part(**{**p, "checksums": tuple(p["checksums"])}) for p in known.pop("parts")]
            return cls(**known, parts=tuple(parts))
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{file} is damaged ({type(error).__name__}: {error})", "tokenise the texts again"
            ) from None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Store:
    """The tokens of a store from `start` to `stop`; `split` gives views of the same files."""

    folder: Path
    index: Index
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    passages: NDArray[np.int64]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many tokens there are, ends of documents included."""
        return self.stop - self.start

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Where documents start and end in `tokens`, cut where the view is."""
        if not self.size:
            return np.array([self.start], dtype=np.int64)
        ends = self.documents[:, 0]
        first = np.searchsorted(ends, self.start, side="right")
        last = np.searchsorted(ends, self.stop, side="left")
        return np.concatenate(([self.start], ends[first:last], [self.stop])).astype(np.int64)

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.bounds) - 1

    def document(self, number: int) -> NDArray[Any]:
        bounds = self.bounds
        if not 0 <= number < len(bounds) - 1:
            raise InputError(f"there is no document {number}", f"use 0 to {len(bounds) - 2}")
        return self.tokens[bounds[number] : bounds[number + 1]]

    @property
    def bytes(self) -> int:
        """Bytes of UTF-8 that the tokens stand for."""
        return self._bytes_before(self.stop) - self._bytes_before(self.start)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.size

    def _bytes_before(self, place: int) -> int:
        row = int(np.searchsorted(self.passages[:, 0], place, side="right"))
        return int(self.passages[row - 1, 1]) if row else 0

    def split(
        self, share: float, *, by: Literal["tokens", "documents"] = "tokens"
    ) -> tuple["Store", "Store"]:
        """All but the last share, and the last share, of the tokens or of the documents.

        By tokens it is cut at the end of a document, or where none is near, within one: at the end
        of a passage, so that bytes stay known.
        """
        if not 0 < share < 1:
            raise InputError(f"share={share} is no part of a whole", "use one between 0 and 1")
        bounds = self.bounds
        if by == "documents":
            kept = len(bounds) - 1 - max(1, round(share * (len(bounds) - 1)))
            place = int(bounds[max(kept, 0)])
        else:
            place = self._near(self.stop - share * self.size, share * self.size / 10, bounds)
        if not self.start < place < self.stop:
            raise InputError(
                f"the last {share:.3g} of {len(bounds) - 1} documents and {self.size} tokens "
                "cannot be split off",
                "give more text, another share, or a separator that makes more documents of it",
            )
        return replace(self, stop=place), replace(self, start=place)

    def _near(self, wanted: float, tolerance: float, bounds: NDArray[np.int64]) -> int:
        nearest = int(bounds[np.argmin(np.abs(bounds - wanted))])
        if abs(nearest - wanted) <= tolerance:
            return nearest
        ends = self.passages[:, 0]
        return int(ends[np.argmin(np.abs(ends - wanted))])

    def verify(self) -> None:
        """Read everything and hold it against the checksums that were taken when it was written."""
        for column, file in enumerate(self.index.sizes):
            width = np.dtype(self.index.dtype).itemsize if column == 0 else ROW
            with (self.folder / file).open("rb") as opened:
                for number, part in enumerate(self.index.parts):
                    count = (part.tokens, part.documents, part.passages)[column]
                    if zlib.crc32(opened.read(count * width)) != part.checksums[column]:
                        raise InputError(
                            f"{self.folder / file} is damaged in part {number}",
                            "tokenise the texts again",
                        )


def open_store(folder: str | Path, tokenizer: Any = None) -> Store:
    """A finished store, whole, and made with this tokenizer where one is given."""
    folder = Path(folder)
    index = Index.read(folder)
    if not index.finished:
        raise InputError(
            f"{folder} is unfinished: {index.documents} documents are written",
            "call write_store again, it goes on from there",
        )
    if tokenizer is not None and checksum_of(tokenizer) != index.tokenizer:
        raise InputError(
            f"{folder} was made with another tokenizer", "give that one, or tokenise again"
        )
    for name, size in index.sizes.items():
        file = folder / name
        there = file.stat().st_size if file.is_file() else 0
        if there != size:
            raise InputError(
                f"{file} has {there} bytes, and {INDEX} asks for {size}", "tokenise the texts again"
            )
    store = Store(
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
            raise InputError(
                f"{folder} holds documents that do not fit", "tokenise the texts again"
            )
    return store


def checksum_of(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's description, whatever padding and limit it is set to."""
    known = json.loads(tokenizer.to_str())
    known |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _mapped(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    # Nothing cannot be mapped.
    if not shape[0]:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=shape)
