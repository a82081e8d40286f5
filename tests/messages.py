"""Errors by their class, the offending value and the remedy, whatever the sentence around them."""

import re
from contextlib import AbstractContextManager

import pytest

from manyheads.errors import ManyheadsError


def refuses(
    error: type[ManyheadsError], *parts: str
) -> AbstractContextManager[pytest.ExceptionInfo[ManyheadsError]]:
    """The block must raise this error, with each of these parts somewhere in its message.

    "..." within a part stands for any words.
    """
    patterns = (".*".join(map(re.escape, part.split("..."))) for part in parts)
    pattern = "".join(f"(?=.*{each})" for each in patterns)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))
