"""A file is there whole, or as it was before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole"]


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
