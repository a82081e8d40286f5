"""A file is there whole, or as it was before."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
from collections.abc import Callable


def check_writable(path: Path) -> None:
    """Refuse a place that cannot be written to, before anything is computed for it.

    It is tried, with a file that is gone at once: what a disk allows is not always what it says.
    """
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{path} cannot be written, for nothing can in {folder} ({error.strerror})",
            "name another place",
        ) from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name beside the file to write to, which takes its place once all went well.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "new" / "numbers.txt") as beside:
    ...         _ = beside.write_text("1 2 3")
    ...     print([file.name for file in Path(folder).rglob("*")])
    ['new', 'numbers.txt']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, "Tensor"], file: Path) -> None:
    """One safetensors file; a full disk is an OSError, as with any other file."""
    # They load torch, which those who write text should not wait for.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(file)) from error


@contextmanager
def exclusive_lock(file: Path, on_busy: Callable[[], None]) -> Iterator[None]:
    """Lock the file. If another process has it, call `on_busy`, which may raise, and then wait.

    Where the system or the disk does not support locks, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("w") as open_file:
        try:
            fcntl.flock(open_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                on_busy()
                fcntl.flock(open_file, fcntl.LOCK_EX)
        yield
