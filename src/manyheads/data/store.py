"""The tokens of a corpus in memory-mapped files.

A store is a folder:

    tokens.bin      every token, uint16 or uint32, document after document
    documents.bin   two int64 per document: tokens and UTF-8 bytes from the start to its end
    passages.bin    the same for each passage that was tokenized, so that bytes are known within
                    documents too
    index.json      counts, checksums, tokenizer, source; whether the store is complete

The index and the two tables are verified when a store is opened. The tokens have a checksum for
every block of 65,536, which is verified when a process first reads the block.
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.dataclass_codec import DataclassCodec
from manyheads.errors import InputError, ManyheadsError

FORMAT = 2
INDEX = "index.json"
TABLES = {"documents.bin": "documents", "passages.bin": "passages"}
ROW = 16
# Tokens with one checksum.
BLOCK = 2**16
CODEC = DataclassCodec("kind")
AGAIN = "remove this folder, and have the texts tokenized again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePart:
    """The counts and checksums of a finished part, and where to continue reading.

    `blocks` are the checksums of its tokens, one per block; `tables` those of the other two files.
    """

    tokens: int
    documents: int
    passages: int
    blocks: tuple[int, ...]
    tables: tuple[int, int]
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
        values = asdict(self)
        text = json.dumps({**values, "checksum": _checksum(values)}, ensure_ascii=False, indent=1)
        return text + "\n"

    @classmethod
    def read(cls, folder: Path) -> "StoreIndex":
        file = folder / INDEX
        if not file.is_file():
            raise InputError(f"{folder} is not a token store", f"give a folder with {INDEX}")
        try:
            values = json.loads(file.read_bytes())
            if values.get("format") == FORMAT - 1:
                raise InputError(f"{file} has format {FORMAT - 1}, without checksums", AGAIN)
            if values.pop("checksum") != _checksum(values):
                raise InputError(f"{file} is damaged (its checksum is wrong)", AGAIN)
            index: StoreIndex = CODEC.decode_table(cls, values)
            return index
        except InputError:
            raise
        except ManyheadsError as error:
            why = error.problem
        except (KeyError, TypeError, AttributeError, ValueError, OSError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
        raise InputError(f"{file} is damaged ({why})", AGAIN)


def array_checksum(array: NDArray[Any], before: int = 0) -> int:
    """CRC-32 of the values of an array, after those that gave `before`."""
    return zlib.crc32(array.data, before)


def _checksum(values: dict[str, Any]) -> int:
    """The checksum of an index."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Blocks of tokens: where each starts and the last ends, their checksums, which are verified.

    Views of the same files share them.
    """

    starts: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    verified: NDArray[np.bool_]

    @classmethod
    def of(cls, index: StoreIndex) -> "TokenBlocks":
        """None is verified yet; every part starts a new block."""
        starts, before = [np.zeros(0, dtype=np.int64)], 0
        for part in index.parts:
            starts.append(np.arange(before, before + part.tokens, BLOCK))
            before += part.tokens
        checksums = [block for part in index.parts for block in part.blocks]
        return cls(
            np.concatenate([*starts, [before]]),
            np.array(checksums, dtype=np.uint32),
            np.zeros(len(checksums), dtype=np.bool_),
        )

    def find_damage(self, tokens: NDArray[Any], start: int, stop: int) -> tuple[int, int] | None:
        """The first damaged block of a span; blocks that are verified already are not read."""
        if start >= stop:
            return None
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1
        for number in np.flatnonzero(~self.verified[first : last + 1]) + first:
            begin, end = int(self.starts[number]), int(self.starts[number + 1])
            if array_checksum(tokens[begin:end]) != self.checksums[number]:
                return begin, end
            self.verified[number] = True
        return None


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
    blocks: TokenBlocks = field(repr=False)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from `start` to `stop`; a block is verified when it is first read."""
        damaged = self.blocks.find_damage(self.tokens, start, stop)
        if damaged is not None:
            raise InputError(
                f"{self.folder / 'tokens.bin'} is damaged in tokens {damaged[0]:,} to "
                f"{damaged[1] - 1:,}",
                f"{AGAIN}; a run then resumes from its last checkpoint",
            )
        return self.tokens[start:stop]

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
        return self.read(int(bounds[number]), int(bounds[number + 1]))

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
            target = self.stop - fraction * self.size
            position = int(bounds[np.argmin(np.abs(bounds - target))])
            if abs(position - target) > fraction * self.size / 10:
                ends = self.passages[:, 0]
                position = int(ends[np.argmin(np.abs(ends - target))])
        if not self.start < position < self.stop:
            raise InputError(
                f"cannot split off the last {fraction:.3g} of {len(bounds) - 1} documents and "
                f"{self.size} tokens",
                "use more text, another fraction, or a separator that gives more documents",
            )
        return replace(self, stop=position), replace(self, start=position)

    @property
    def checksum(self) -> int:
        """Of all tokens, and of where this view begins and ends."""
        tokens = array_checksum(self.blocks.checksums)
        return array_checksum(np.array((self.start, self.stop)), tokens)

    def verify(self) -> None:
        """Read all tokens and compare them with their checksums."""
        self.blocks.verified[:] = False
        self.read(0, self.index.tokens)


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
            f"{folder} was made with another tokenizer", "use that one, or tokenize again"
        )
    for name, size in index.sizes.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else 0
        if actual != size:
            raise InputError(f"{file} has {actual} bytes, and {INDEX} says {size}", AGAIN)
    store = TokenStore(
        folder=folder,
        index=index,
        tokens=_mapped(folder / "tokens.bin", np.dtype(index.dtype), (index.tokens,)),
        documents=_mapped(folder / "documents.bin", np.dtype("<i8"), (index.documents, 2)),
        passages=_mapped(folder / "passages.bin", np.dtype("<i8"), (index.passages, 2)),
        start=0,
        stop=index.tokens,
        blocks=TokenBlocks.of(index),
    )
    for column, (name, counted) in enumerate(TABLES.items()):
        table, row = getattr(store, counted), 0
        for part in index.parts:
            end = row + getattr(part, counted)
            if array_checksum(table[row:end]) != part.tables[column]:
                damaged = f"{folder / name} is damaged in rows {row:,} to {end - 1:,}"
                raise InputError(damaged, AGAIN)
            row = end
    return store


def tokenizer_checksum(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's JSON without padding and truncation."""
    settings = json.loads(tokenizer.to_str())
    settings |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _mapped(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    if not shape[0]:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=shape)
