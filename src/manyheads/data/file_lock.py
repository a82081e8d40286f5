"""One process at a time: a file that is held, and let go even by one that was killed."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(file: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the file; where another process does, `busy` may refuse or say so, and then we wait.

    Systems and disks that know no such thing let everybody in.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                busy()
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield
