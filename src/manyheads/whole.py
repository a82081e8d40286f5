"""A file is there whole, or as it was before."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["whole", "write_tensors"]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside the file to write to, which takes its place once all went well.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole(Path(folder) / "new" / "numbers.txt") as beside:
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
