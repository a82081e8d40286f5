"""A report becomes a file whole, or not at all."""

import os
import tempfile
from pathlib import Path

from manyheads.errors import InputError

__all__ = ["check_page_path", "write_page"]


def check_page_path(path: Path) -> None:
    """Refuse a name that no page can have, before anything is computed for it."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"the report {path} is no HTML", "let its name end in .html")
    if path.is_dir():
        raise InputError(f"the report {path} is a folder", "name a file in it")


def write_page(page: str, path: Path) -> int:
    """Write beside the file first, then move; how many bytes it has."""
    check_page_path(path)
    written = page.encode("utf-8", errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(written)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return len(written)
