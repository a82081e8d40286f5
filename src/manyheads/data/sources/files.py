"""Files by path, folder or glob, and their bytes, decompressed."""

import bz2
import glob
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from manyheads.errors import InputError, import_package

# A fingerprint reads this many bytes at this many positions of a file.
SAMPLE_BYTES, SAMPLES = 2**12, 16

# Files, folders and globs.
Paths = str | Path | Sequence[str | Path]


def find_files(paths: Paths, suffixes: Collection[str], *, any_suffix: bool = False) -> list[Path]:
    """All files of paths, folders and globs, in order and sorted within a folder, each once.

    Of a folder only files with a known suffix are read, and no hidden ones.
    """
    listed_paths = (paths,) if isinstance(paths, str | Path) else paths
    files = [file for path in listed_paths for file in _expand(str(path), suffixes, any_suffix)]
    if not files:
        raise InputError("there is no file to read", "give a file, a folder or a glob")
    return list(dict.fromkeys(files))


def _expand(path: str, suffixes: Collection[str], any_suffix: bool) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        inside = [
            file
            for file in sorted(expanded.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(expanded).parts)
        ]
        files = [file for file in inside if any_suffix or (suffix_of(file) or None) in suffixes]
        if not files:
            raise InputError(f"{path} has no {listed(suffixes)} file", "give another folder")
        return files
    if expanded.is_file():
        files = [expanded]
    elif any(mark in path for mark in "*?["):
        # Path.glob does not accept absolute patterns.
        files = [Path(name) for name in sorted(glob.glob(str(expanded), recursive=True))]  # noqa: PTH207
        files = [file for file in files if file.is_file()]
        if not files:
            raise InputError(f"no file matches {path}", "check the folder and the pattern")
    else:
        raise InputError(f"{path} does not exist", "check the path")
    for file in files:
        if not any_suffix and suffix_of(file) not in suffixes:
            raise InputError(
                f"{file} has an unknown suffix {suffix_of(file)!r}",
                f"use {listed(suffixes)}, or set format",
            )
    return files


def listed(suffixes: Collection[str]) -> str:
    """
    >>> listed([".txt", ".jsonl", ""])
    '.txt or .jsonl'
    """
    named = [suffix for suffix in suffixes if suffix]
    return " or ".join([", ".join(named[:-1]), named[-1]]) if len(named) > 1 else named[0]


def suffix_of(path: Path) -> str:
    """The suffix of a file without that of its compression.

    >>> suffix_of(Path("a/corpus.jsonl.GZ"))
    '.jsonl'
    """
    name = Path(path.name.lower())
    return name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix


def fingerprint(path: Path) -> str:
    """The size of a file and a checksum, of a large file only at a few positions.

    It is cheap, and detects most edits.
    """
    size = path.stat().st_size
    samples = range(SAMPLES) if size > SAMPLE_BYTES * SAMPLES else range(1)
    checksum = 0
    with path.open("rb") as file:
        for sample in samples:
            file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1) if sample else 0)
            checksum = zlib.crc32(file.read(SAMPLE_BYTES if len(samples) > 1 else size), checksum)
    return f"{size} bytes, {checksum:08x}"


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed if its suffix is that of a compression."""
    with path.open("rb") as stored, decompress(path, stored) as file:
        yield file


@contextmanager
def decompress(path: Path, stored: IO[bytes]) -> Iterator[IO[bytes]]:
    """The bytes of a file that is open as it is stored, for callers that follow its position."""
    suffix = path.suffix.lower()
    try:
        with COMPRESSED.get(suffix, nullcontext)(stored) as file:
            yield file
    except Exception as error:
        # bz2 and gzip raise an OSError without errno.
        broken = isinstance(error, OSError) and error.errno is None
        broken = broken or isinstance(error, lzma.LZMAError | EOFError)
        if not broken and type(error).__name__ != "ZstdError":
            raise
        raise InputError(
            f"{path} is not a complete {suffix} file ({error})", "download it again"
        ) from None


# Compressed bytes read at a time: decompressed they may be many thousand times as many.
READ = 2**12


def open_zstandard(stored: IO[bytes]) -> io.BufferedReader:
    """A reader with lines, which unlike the package's own detects truncated files."""
    zstandard = import_package("zstandard", stored.name, "zstandard")
    return io.BufferedReader(_ZstandardReader(stored, zstandard.ZstdDecompressor()))


class _ZstandardReader(io.RawIOBase):
    def __init__(self, stored: IO[bytes], decompressor: Any) -> None:
        self._file = stored
        self._decompressor = decompressor
        self._frame: Any = None
        self._compressed = b""
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            self._compressed = self._compressed or self._file.read(READ)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            # A frame may end in what was read, and the next begin.
            self._frame = self._frame or self._decompressor.decompressobj()
            self._waiting = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        block = self._waiting[: len(buffer)]
        buffer[: len(block)] = block
        self._waiting = self._waiting[len(block) :]
        return len(block)


COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstandard,
}
