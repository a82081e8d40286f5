"""Tokenize texts into a store, part by part: a killed process loses one part at most.

A part is appended to the files of the store and then entered in its index, which is replaced
atomically. Bytes after the last part of the index are cut off when tokenizing is resumed.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.atomic_write import exclusive_lock
from manyheads.data import store
from manyheads.data.sources.texts import Passage, TextSource
from manyheads.data.tokenizer_training import EOS
from manyheads.errors import InputError
from manyheads.progress import Progress
from manyheads.tokenizers import plain_copy

LOCK = "lock"
UNMOVED = f"{store.INDEX}.new"
# Characters per part, and per call of the tokenizer.
PART = 2**25
AT_A_TIME = 2**21
MEGABYTE = 1_000_000


def write_store(
    source: TextSource,
    tokenizer: Any,
    folder: str | Path,
    *,
    end: str | None = EOS,
    part_size: int = PART,
    progress: bool = True,
) -> store.TokenStore:
    """Tokenize texts into a folder, or resume it, or open it if it is complete.

    `end` is the token appended to every document; None appends none, as for models whose chunks
    have tokens around them. Special tokens that occur in a text are treated as plain text.
    """
    folder = Path(folder)
    expected = _expected_index(source, tokenizer, end)
    folder.mkdir(parents=True, exist_ok=True)
    # Two processes must not write the same store.
    with exclusive_lock(folder / LOCK, lambda: _report_waiting(folder)):
        index = _read_or_create_index(folder, expected)
        if not index.finished:
            plain = plain_copy(tokenizer)
            # Special tokens in texts are treated as plain text.
            plain.encode_special_tokens = True
            _write(source, plain, folder, index, part_size, progress)
    return store.open_store(folder, tokenizer)


def store_mismatch(
    source: TextSource, tokenizer: Any, folder: str | Path, *, end: str | None = EOS
) -> str:
    """How a store differs from the requested one; empty if it does not."""
    folder = Path(folder)
    if not (folder / store.INDEX).is_file():
        return ""
    return _mismatch(store.StoreIndex.read(folder), _expected_index(source, tokenizer, end))


def _expected_index(source: TextSource, tokenizer: Any, end: str | None) -> store.StoreIndex:
    """The index of an empty store."""
    number = None if end is None else tokenizer.token_to_id(end)
    if end is not None and number is None:
        raise InputError(
            f"the tokenizer has no token {end!r}",
            "set end to its end-of-sequence token, or to None",
        )
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return store.StoreIndex(
        format=store.FORMAT,
        finished=False,
        dtype="<u2" if vocabulary <= 2**16 else "<u4",
        vocabulary=vocabulary,
        end=number,
        tokenizer=store.tokenizer_checksum(tokenizer),
        source=source.identity(),
        parts=(),
    )


def _read_or_create_index(folder: Path, expected: store.StoreIndex) -> store.StoreIndex:
    """The index of the folder; an error if it was made from other texts or settings."""
    others = [file.name for file in folder.iterdir() if file.name not in (LOCK, UNMOVED)]
    if not (folder / store.INDEX).is_file():
        if others:
            raise InputError(
                f"{folder} has {sorted(others)[0]} and no {store.INDEX}", "use an empty folder"
            )
        _write_index(folder, expected)
        return expected
    stored = store.StoreIndex.read(folder)
    mismatch = _mismatch(stored, expected)
    if mismatch:
        raise InputError(f"{folder} was made {mismatch}", "remove it, or use another folder")
    return stored


def _mismatch(stored: store.StoreIndex, expected: store.StoreIndex) -> str:
    for what, which in (("tokenizer", "another tokenizer"), ("end", "another end token")):
        if getattr(stored, what) != getattr(expected, what):
            return f"with {which}"
    if stored.source != expected.source:
        return f"from other texts ({_difference(stored.source, expected.source)})"
    return ""


def _difference(stored: dict[str, Any], expected: dict[str, Any]) -> str:
    for key in expected:
        then, now = stored.get(key), expected[key]
        if key == "files" and then is not None:
            changed = [name for name, looks in now if [name, looks] not in then]
            removed = [name for name, looks in then if [name, looks] not in now]
            if changed or removed:
                return f"{(changed or removed)[0]} was not there or has changed"
        if then != now:
            return f"{key} was {then!r} and is {now!r}"
    return "other settings"


@dataclass(slots=True)
class _PartBuffer:
    """The part that is being filled; totals include the parts before."""

    tokens: int
    bytes: int
    next_file: int = 0
    next_passage: int = 0
    ids: list[NDArray[Any]] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)
    passages: list[tuple[int, int]] = field(default_factory=list)

    def add(self, passage: Passage, ids: NDArray[Any]) -> None:
        self.ids.append(ids)
        self.tokens += len(ids)
        self.bytes += len(passage.text.encode())
        self.passages.append((self.tokens, self.bytes))
        if passage.ends:
            self.documents.append((self.tokens, self.bytes))
        if passage.file != self.next_file:
            self.next_file, self.next_passage = passage.file, 0
        self.next_passage += 1


def _write(
    source: TextSource,
    tokenizer: Any,
    folder: Path,
    index: store.StoreIndex,
    part_size: int,
    progress: bool,
) -> None:
    buffer = _resumed(folder, index)
    total_bytes = source.expected_bytes()
    left = None if total_bytes is None else max(total_bytes - buffer.bytes, 0)
    first = True
    passages = islice(source.read(buffer.next_file), buffer.next_passage, None)
    total = None if left is None else left / MEGABYTE
    with Progress("tokenizing", total=total, unit="MB", enabled=progress) as bar:
        for chunk in _chunks(passages, part_size):
            before = buffer.tokens, buffer.bytes
            _tokenize(tokenizer, chunk, buffer, index)
            read = buffer.bytes - before[1]
            if first and left is not None and read:
                needed = (buffer.tokens - before[0]) * np.dtype(index.dtype).itemsize / read * left
                free = shutil.disk_usage(folder).free
                if needed > free:
                    raise InputError(
                        f"{folder} will need about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB "
                        "are free",
                        "free some space, or use a folder on another disk",
                    )
            first = False
            # A store that was killed just before its end must not get an empty part.
            if chunk[-1] is None and buffer.passages:
                index = _write_part(folder, index, buffer)
                buffer = replace(buffer, ids=[], documents=[], passages=[])
            bar.advance(read / MEGABYTE)
    _write_index(folder, replace(index, finished=True))


def _chunks(passages: Iterator[Passage], part_size: int) -> Iterator[list[Passage | None]]:
    """Passages to tokenize together; the last entry is None at the end of a part."""
    chunk: list[Passage | None] = []
    in_chunk = in_part = 0
    for passage in passages:
        chunk.append(passage)
        in_chunk += len(passage.text)
        in_part += len(passage.text)
        if in_part >= part_size:
            yield [*chunk, None]
            chunk, in_chunk, in_part = [], 0, 0
        elif in_chunk >= AT_A_TIME:
            yield chunk
            chunk, in_chunk = [], 0
    yield [*chunk, None]


def _tokenize(
    tokenizer: Any, chunk: list[Passage | None], buffer: _PartBuffer, index: store.StoreIndex
) -> None:
    passages = [passage for passage in chunk if passage is not None]
    texts = [passage.text for passage in passages]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for passage, encoding in zip(passages, encodings, strict=True):
        ids = encoding.ids
        if passage.ends and index.end is not None:
            ids = [*ids, index.end]
        buffer.add(passage, np.array(ids, dtype=index.dtype))


def _write_part(folder: Path, index: store.StoreIndex, buffer: _PartBuffer) -> store.StoreIndex:
    """Append the part to the files, and then enter it in the index."""
    tables = [np.array(rows, dtype="<i8") for rows in (buffer.documents, buffer.passages)]
    ids = np.concatenate([*buffer.ids, np.zeros(0, dtype=index.dtype)])
    for name, array in zip(index.sizes, (ids, *tables), strict=True):
        with (folder / name).open("ab") as file:
            file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
    starts = range(0, len(ids), store.BLOCK)
    blocks = (store.array_checksum(ids[start : start + store.BLOCK]) for start in starts)
    part = store.StorePart(
        tokens=len(ids),
        documents=len(buffer.documents),
        passages=len(buffer.passages),
        blocks=tuple(blocks),
        tables=(store.array_checksum(tables[0]), store.array_checksum(tables[1])),
        next_file=buffer.next_file,
        next_passage=buffer.next_passage,
    )
    index = replace(index, parts=(*index.parts, part))
    _write_index(folder, index)
    return index


def _write_index(folder: Path, index: store.StoreIndex) -> None:
    beside = folder / UNMOVED
    with beside.open("w", encoding="utf-8") as file:
        file.write(index.to_json())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / store.INDEX)


def _resumed(folder: Path, index: store.StoreIndex) -> _PartBuffer:
    """Cut off what was written after the last part, and continue after it."""
    for name, size in index.sizes.items():
        with (folder / name).open("ab") as file:
            actual = file.tell()
            if actual < size:
                problem = f"{folder / name} has {actual} bytes, and {store.INDEX} says {size}"
                raise InputError(problem, store.AGAIN)
            file.truncate(size)
    if not index.parts:
        return _PartBuffer(tokens=0, bytes=0)
    last = np.fromfile(folder / "passages.bin", dtype="<i8")[-2:]
    return _PartBuffer(
        tokens=index.tokens,
        bytes=int(last[1]) if len(last) else 0,
        next_file=index.parts[-1].next_file,
        next_passage=index.parts[-1].next_passage,
    )


def _report_waiting(folder: Path) -> None:
    print(f"waiting for another process that is writing {folder}", file=sys.stderr, flush=True)
