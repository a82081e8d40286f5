"""Writing files atomically: a file is complete, or as it was before."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before anything is computed for it.

    It is tried with a temporary file: permissions do not always say what a disk allows.
    """
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {folder} is not writable ({error.strerror})",
            "choose another folder",
        ) from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which replaces `path` when the block succeeds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "new" / "numbers.txt") as temporary:
    ...         _ = temporary.write_text("1 2 3")
    ...     print([file.name for file in Path(folder).rglob("*")])
    ['new', 'numbers.txt']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, "Tensor"], file: Path) -> None:
    """One safetensors file; a full disk is an OSError, as with any other file."""
    # Importing them loads torch, which is slow and not needed to write text.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number) if match else str(error), str(file)) from error


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
