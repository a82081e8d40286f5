"""How things are said in a line."""

__all__ = ["counted"]


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "text"), counted(1200, "text")
    ('1 text', '1,200 texts')
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
