"""How things are said in a line, and in JSON."""

import math
from typing import Any

__all__ = ["counted", "without_nan"]


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "text"), counted(1200, "text")
    ('1 text', '1,200 texts')
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def without_nan(value: Any) -> Any:
    """JSON knows no NaN: what is not defined is null.

    >>> without_nan({"entropy": [1.0, math.nan]})
    {'entropy': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
