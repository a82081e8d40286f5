"""A lock file for one process at a time, released even when the process is killed."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
