"""Texts tokenised once, part by part: a kill costs one part at most, and leaves no trace.

A part is appended to the files of the store and then entered in its index, which is replaced as a
whole. What lies behind the last part of the index is cut off when the work is taken up again.
"""

import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.eos import END
from manyheads.data.file_lock import held
from manyheads.data.sources.texts import Passage, TextSource
from manyheads.data.store import FORMAT, INDEX, Index, Part, Store, checksum_of, open_store
from manyheads.errors import InputError
from manyheads.progress import Progress
from manyheads.tokenizing import plain_copy

LOCK = "lock"
UNMOVED = f"{INDEX}.new"
# Characters of a part, and of what is handed to the threads of the tokenizer at a time.
PART = 2**25
AT_A_TIME = 2**21
MEGABYTE = 1_000_000


def write_store(
    source: TextSource,
    tokenizer: Any,
    folder: str | Path,
    *,
    end: str | None = END,
    part: int = PART,
    shown: bool = True,
) -> Store:
    """Tokenise texts into a folder, or go on where that was broken off, or open what is finished.

    `end` is the token put behind every document; None puts none, as for models that read whole
    pieces between tokens of their own. Special tokens written out in a text are plain text.
    """
    folder = Path(folder)
    asked = _asked(source, tokenizer, end)
    folder.mkdir(parents=True, exist_ok=True)
    # Two writers of one store would spoil it.
    with held(folder / LOCK, lambda: _tell_wait(folder)):
        index = _known(folder, asked)
        if not index.finished:
            _write(source, _plain(tokenizer), folder, index, part, shown)
    return open_store(folder, tokenizer)


def made_otherwise(
    source: TextSource, tokenizer: Any, folder: str | Path, *, end: str | None = END
) -> str:
    """How what a folder holds differs from what is asked for; nothing where it does not."""
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        return ""
    return _otherwise(Index.read(folder), _asked(source, tokenizer, end))


def _asked(source: TextSource, tokenizer: Any, end: str | None) -> Index:
    """The index of a store in which nothing is written yet."""
    number = None if end is None else tokenizer.token_to_id(end)
    if end is not None and number is None:
        raise InputError(
            f"the tokenizer has no token {end!r}",
            "name the token that ends a document of its own, or give end=None",
        )
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Index(
        format=FORMAT,
        finished=False,
        dtype="<u2" if vocabulary <= 2**16 else "<u4",
        vocabulary=vocabulary,
        end=number,
        tokenizer=checksum_of(tokenizer),
        source=source.identity(),
        parts=(),
    )


def _known(folder: Path, asked: Index) -> Index:
    """What is written already, if it was asked for in the same words."""
    others = [file.name for file in folder.iterdir() if file.name not in (LOCK, UNMOVED)]
    if not (folder / INDEX).is_file():
        if others:
            raise InputError(
                f"{folder} holds {sorted(others)[0]} and no {INDEX}", "name a folder of its own"
            )
        _write_index(folder, asked)
        return asked
    known = Index.read(folder)
    otherwise = _otherwise(known, asked)
    if otherwise:
        raise InputError(f"{folder} was made {otherwise}", "remove it, or name another folder")
    return known


def _otherwise(known: Index, asked: Index) -> str:
    for what, which in (("tokenizer", "another tokenizer"), ("end", "another end token")):
        if getattr(known, what) != getattr(asked, what):
            return f"with {which}"
    if known.source != asked.source:
        return f"from other texts ({_difference(known.source, asked.source)})"
    return ""


def _difference(known: dict[str, Any], asked: dict[str, Any]) -> str:
    for key in asked:
        then, now = known.get(key), asked[key]
        if key == "files" and then is not None:
            changed = [name for name, looks in now if [name, looks] not in then]
            gone = [name for name, looks in then if [name, looks] not in now]
            if changed or gone:
                return f"{(changed or gone)[0]} was not there or has changed"
        if then != now:
            return f"{key} was {then!r} and is {now!r}"
    return "it says less of them"


def _plain(tokenizer: Any) -> Any:
    """A copy that pads and cuts nothing, and takes no text for a special token."""
    copy = plain_copy(tokenizer)
    copy.encode_special_tokens = True
    return copy


@dataclass(slots=True)
class _Growing:
    """One part while it is filled; totals go on from the parts before."""

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
    source: TextSource, tokenizer: Any, folder: Path, index: Index, part: int, shown: bool
) -> None:
    growing = _resumed(folder, index)
    expected = source.expected_bytes()
    left = None if expected is None else max(expected - growing.bytes, 0)
    first = True
    passages = islice(source.read(growing.next_file), growing.next_passage, None)
    total = None if left is None else left / MEGABYTE
    with Progress("tokenising", total=total, unit="MB", shown=shown) as bar:
        for chunk in _chunks(passages, part):
            before = growing.tokens, growing.bytes
            _tokenise(tokenizer, chunk, growing, index)
            read = growing.bytes - before[1]
            if first and left is not None and read:
                needed = (growing.tokens - before[0]) * np.dtype(index.dtype).itemsize / read * left
                _check_room(folder, needed)
            first = False
            # Killed between its last part and its end, a store must not get an empty one.
            if chunk[-1] is None and growing.passages:
                index = _write_part(folder, index, growing)
                growing = replace(growing, ids=[], documents=[], passages=[])
            bar.advance(read / MEGABYTE)
    _write_index(folder, replace(index, finished=True))


def _chunks(passages: Iterator[Passage], part: int) -> Iterator[list[Passage | None]]:
    """Passages to be tokenised together; None comes last where a part ends with them."""
    chunk: list[Passage | None] = []
    in_chunk = in_part = 0
    for passage in passages:
        chunk.append(passage)
        in_chunk += len(passage.text)
        in_part += len(passage.text)
        if in_part >= part:
            yield [*chunk, None]
            chunk, in_chunk, in_part = [], 0, 0
        elif in_chunk >= AT_A_TIME:
            yield chunk
            chunk, in_chunk = [], 0
    yield [*chunk, None]


def _tokenise(tokenizer: Any, chunk: list[Passage | None], growing: _Growing, index: Index) -> None:
    passages = [passage for passage in chunk if passage is not None]
    texts = [passage.text for passage in passages]
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for passage, encoding in zip(passages, found, strict=True):
        ids = encoding.ids
        if passage.ends and index.end is not None:
            ids = [*ids, index.end]
        growing.add(passage, np.array(ids, dtype=index.dtype))


def _write_part(folder: Path, index: Index, growing: _Growing) -> Index:
    """Append what has been gathered, and only then say that it is there."""
    tables = [np.array(rows, dtype="<i8") for rows in (growing.documents, growing.passages)]
    ids = np.concatenate([*growing.ids, np.zeros(0, dtype=index.dtype)])
    checksums = []
    for name, array in zip(index.sizes, (ids, *tables), strict=True):
        data = array.tobytes()
        checksums.append(zlib.crc32(data))
        with (folder / name).open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    part = Part(
        tokens=len(ids),
        documents=len(growing.documents),
        passages=len(growing.passages),
        checksums=(checksums[0], checksums[1], checksums[2]),
        next_file=growing.next_file,
        next_passage=growing.next_passage,
    )
    index = replace(index, parts=(*index.parts, part))
    _write_index(folder, index)
    return index


def _write_index(folder: Path, index: Index) -> None:
    beside = folder / UNMOVED
    with beside.open("w", encoding="utf-8") as file:
        file.write(index.to_json())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / INDEX)


def _resumed(folder: Path, index: Index) -> _Growing:
    """Cut off what was written after the last part, and go on behind it."""
    for name, size in index.sizes.items():
        with (folder / name).open("ab") as file:
            there = file.tell()
            if there < size:
                raise InputError(
                    f"{folder / name} has {there} bytes, and {INDEX} asks for {size}",
                    "remove the folder and tokenise again",
                )
            file.truncate(size)
    if not index.parts:
        return _Growing(tokens=0, bytes=0)
    last = np.fromfile(folder / "passages.bin", dtype="<i8")[-2:]
    return _Growing(
        tokens=index.tokens,
        bytes=int(last[1]) if len(last) else 0,
        next_file=index.parts[-1].next_file,
        next_passage=index.parts[-1].next_passage,
    )


def _check_room(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder} will need about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free",
            "make room, or name a folder on another disk",
        )


def _tell_wait(folder: Path) -> None:
    print(f"another process is writing {folder}: waiting for it", file=sys.stderr, flush=True)
