"""Errors by their whole message: given value, reason, remedy."""

import re
from contextlib import AbstractContextManager

import pytest

from manyheads.errors import ManyheadsError


def refuses(
    error: type[ManyheadsError], message: str
) -> AbstractContextManager[pytest.ExceptionInfo[ManyheadsError]]:
    """The block must raise this error, in exactly these words."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")
