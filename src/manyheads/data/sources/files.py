"""Files by name, folder or glob, and their bytes, compressed or not."""

import bz2
import glob
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from manyheads.errors import InputError, MissingExtraError

# Bytes that are looked at in each of so many places of a file.
BYTES, PLACES = 2**12, 16

# Files, folders and globs.
Paths = str | Path | Sequence[str | Path]


def find_files(paths: Paths, known: Collection[str], *, any_suffix: bool = False) -> list[Path]:
    """Every file meant, in the order given and by name within a folder or glob, each once.

    Of a folder those with a known suffix are taken, hidden ones left out.
    """
    found: dict[Path, None] = {}
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        for file in _meant(str(path), known, any_suffix):
            found[file] = None
    if not found:
        raise InputError("there is no file to read", "name a file, a folder or a glob")
    return list(found)


def _meant(path: str, known: Collection[str], any_suffix: bool) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        inside = [file for file in sorted(place.rglob("*")) if _is_shown(file, place)]
        taken = [file for file in inside if any_suffix or (suffix_of(file) or None) in known]
        if not taken:
            raise InputError(f"{path} holds no {listed(known)} file", "name another folder")
        return taken
    if place.is_file():
        taken = [place]
    elif any(mark in path for mark in "*?["):
        # Path.glob takes no pattern that begins at the root.
        taken = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]  # noqa: PTH207
        taken = [file for file in taken if file.is_file()]
        if not taken:
            raise InputError(f"no file matches {path}", "check the folder and the pattern")
    else:
        raise InputError(f"there is no file {path}", "check the name")
    for file in taken:
        if not any_suffix and suffix_of(file) not in known:
            raise InputError(
                f"{file} ends in {suffix_of(file)!r}, which says nothing known of what it holds",
                f"use {listed(known)}, or say which format it has",
            )
    return taken


def _is_shown(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden


def listed(suffixes: Collection[str]) -> str:
    """
    >>> listed([".txt", ".jsonl", ""])
    '.txt or .jsonl'
    """
    named = [suffix for suffix in suffixes if suffix]
    return " or ".join([", ".join(named[:-1]), named[-1]]) if len(named) > 1 else named[0]


def suffix_of(path: Path) -> str:
    """What the file holds, whatever it is compressed with.

    >>> suffix_of(Path("a/corpus.jsonl.GZ"))
    '.jsonl'
    """
    name = Path(path.name.lower())
    return name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix


def fingerprint(path: Path) -> str:
    """The size of a file and a checksum: of a small file all of it, of a large one a few places.

    It costs next to nothing to ask, and tells a text that was edited since.
    """
    size = path.stat().st_size
    places = range(PLACES) if size > BYTES * PLACES else range(1)
    checksum = 0
    with path.open("rb") as file:
        for place in places:
            file.seek((size - BYTES) * place // (PLACES - 1) if place else 0)
            checksum = zlib.crc32(file.read(BYTES if len(places) > 1 else size), checksum)
    return f"{size} bytes, {checksum:08x}"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name says that it is packed."""
    suffix = path.suffix.lower()
    try:
        with COMPRESSED.get(suffix, _plain)(path) as file:
            yield file
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError) as error:
        raise InputError(f"{path} is no whole {suffix} file ({error})", "fetch it again") from None
    except Exception as error:
        # bz2 has no error of its own: its OSError comes without a number.
        broken = isinstance(error, OSError) and error.errno is None
        if not broken and type(error).__name__ != "ZstdError":
            raise
        raise InputError(f"{path} is no whole {suffix} file ({error})", "fetch it again") from None


def _plain(path: Path) -> IO[bytes]:
    return path.open("rb")


# Bytes unpacked at a time: they may become many thousand times as many.
READ = 2**12


def open_zstandard(path: Path) -> io.BufferedReader:
    """The package's own reader gives no lines, and takes a file that breaks off for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError(
            f"{path} needs the package zstandard", "pip install 'manyheads[zstd]'"
        ) from None
    return io.BufferedReader(_Unpacked(path, zstandard.ZstdDecompressor()))


class _Unpacked(io.RawIOBase):
    def __init__(self, path: Path, packer: Any) -> None:
        self._file = path.open("rb")
        self._packer = packer
        self._frame: Any = None
        self._packed = b""
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._waiting:
            self._packed = self._packed or self._file.read(READ)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._unpack()
        some = self._waiting[: len(room)]
        room[: len(some)] = some
        self._waiting = self._waiting[len(some) :]
        return len(some)

    def _unpack(self) -> None:
        """One frame may end and the next begin in what was read."""
        if self._frame is None:
            self._frame = self._packer.decompressobj()
        self._waiting = memoryview(self._frame.decompress(self._packed))
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        self._file.close()
        super().close()


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstandard,
}
