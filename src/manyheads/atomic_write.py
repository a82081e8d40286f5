"""Writing files and folders atomically: they are complete, or as they were before."""

import ctypes
import errno
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# How long a writer waits for another one that writes the same folder.
PATIENCE = 20.0


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before anything is computed for it.

    It is tried with a temporary file: permissions do not always say what a disk allows.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
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
    # A link stays a link, and what it points to is replaced.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A copy of a folder to change, which replaces it when the block succeeds.

    The copy is beside it and made of hard links, so write a file anew instead of changing it; a
    link stays a link, and what a linked `folder` points to is replaced. At every moment there is a
    complete folder: Linux and macOS exchange the two in one step. Where a file system cannot, the
    old one is renamed away just before the new one takes its name, and the next `atomic_folder` or
    `recover_folder` completes what was interrupted in between. Writers of one folder take turns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with atomic_folder(Path(parent) / "model") as fresh:
    ...         _ = (fresh / "config.json").write_text("{}")
    ...     print(sorted(file.name for file in Path(parent).rglob("*")))
    ['config.json', 'model']
    """
    folder = resolve_folder(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file", "give a folder to save to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _folder_lock(folder) as locked:
        _restore(folder, locked)
        # Whoever has the lock is the only live writer, so the rest is of killed ones.
        leftovers = (*_leftovers(folder, "old"), *_leftovers(folder, "part"))
        for leftover in leftovers if locked else ():
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
        # Without a lock two processes must not share it.
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            if folder.exists():
                shutil.copytree(folder, fresh, symlinks=True, copy_function=_link)
            else:
                fresh.mkdir()
            yield fresh
            fresh.chmod(0o755)
            _flush(fresh)
            _replace(fresh, folder)
            _flush(folder.parent)
        finally:
            # The old folder, where the two were exchanged.
            shutil.rmtree(fresh, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Restore a folder if its writer was killed while it had no name."""
    folder = resolve_folder(folder)
    if folder.exists() or not _leftovers(folder, "old"):
        return
    with _folder_lock(folder) as locked:
        _restore(folder, locked)


def resolve_folder(folder: Path) -> Path:
    """The folder that a path means, with links followed."""
    try:
        target = folder.resolve()
        target.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{str(folder)[:200]!r} is not a path ({error})"[:400]) from None
    return target


@contextmanager
def _folder_lock(folder: Path) -> Iterator[bool]:
    """Wait for the lock of a folder, which leaves no file; False where there are no locks."""
    file, end = folder.with_name(f".{folder.name}.lock"), time.monotonic() + PATIENCE
    while True:
        opened = file.open("w")
        try:
            state = _try_lock(opened.fileno())
            # Its last owner may have removed the file that was opened.
            if state != "busy" and _same_file(opened.fileno(), file):
                try:
                    yield state == "locked"
                finally:
                    file.unlink(missing_ok=True)
                return
        finally:
            opened.close()
        if time.monotonic() > end:
            raise InputError(
                f"another process has been saving to {folder} for {PATIENCE:.0f} seconds",
                "wait for it, stop it, or save to another folder",
            )
        time.sleep(0.01)


def _try_lock(descriptor: int) -> str:
    try:
        import fcntl
    except ImportError:
        return "unsupported"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "busy" if error.errno in (errno.EACCES, errno.EAGAIN) else "unsupported"
    return "locked"


def _same_file(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _leftovers(folder: Path, suffix: str) -> list[Path]:
    """The temporary folders of all writers of a folder, by process."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.{suffix}")
    return [path for path in folder.parent.glob(f".*.{suffix}") if name.fullmatch(path.name)]


def _restore(folder: Path, locked: bool) -> None:
    """Give a folder its name back that a killed writer renamed away."""
    for old in _leftovers(folder, "old"):
        if not folder.exists() and not locked:
            # Without locks it may be a live writer's, who is done in far less than a second.
            time.sleep(1)
        if not folder.exists():
            old.rename(folder)


def _replace(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
    elif not exchange(fresh, folder):
        old = fresh.with_suffix(".old")
        folder.rename(old)
        try:
            fresh.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system cannot."""
    rename = _exchanger()
    if rename is None:
        return False
    if rename(os.fsencode(first), os.fsencode(second)) == 0:
        return True
    number = ctypes.get_errno()
    # Old kernels, file systems such as NFS, and sandboxes.
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


@cache
def _exchanger() -> Callable[[bytes, bytes], int] | None:
    """The system's call that exchanges two names: renameat2 in Linux, renamex_np in macOS."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None
    current_folder, exchange_flag = -100, 2
    if hasattr(library, "renameat2"):
        return lambda first, second: library.renameat2(
            current_folder, first, current_folder, second, exchange_flag
        )
    if hasattr(library, "renamex_np"):
        return lambda first, second: library.renamex_np(first, second, exchange_flag)
    return None


def _link(source: str, target: str) -> str:
    """Link a file that stays, or copy it if the file system cannot link."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _flush(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    with file.open("w") as opened:
        if _try_lock(opened.fileno()) == "busy":
            import fcntl

            on_busy()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
