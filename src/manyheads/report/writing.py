"""A report becomes a file whole, or not at all."""

from pathlib import Path

from manyheads.errors import InputError
from manyheads.whole import check_writable, whole

__all__ = ["check_page_path", "write_page"]


def check_page_path(path: Path) -> None:
    """Refuse a name that no page can have, before anything is computed for it."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"the report {path} is no HTML", "let its name end in .html")
    if path.is_dir():
        raise InputError(f"the report {path} is a folder", "name a file in it")
    check_writable(path)


def write_page(page: str, path: Path) -> int:
    """Write it, and say how many bytes it has."""
    check_page_path(path)
    written = page.encode("utf-8", errors="replace")
    with whole(path) as beside:
        beside.write_bytes(written)
    return len(written)
