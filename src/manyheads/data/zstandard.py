"""Zstandard files as bytes that can be read by lines, frame after frame; half a file is no file."""

import io
from pathlib import Path
from typing import Any

from manyheads.errors import MissingExtraError

__all__ = ["open_zstandard"]

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
