"""Stop strings, wherever the borders between tokens fall."""

from collections.abc import Sequence

__all__ = ["first_stop", "may_begin_a_stop"]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest stop string begins.

    >>> first_stop("one. two\\n", ("\\n", ". "))
    3
    """
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def may_begin_a_stop(text: str, stops: Sequence[str]) -> int:
    """How many of the last letters could be the beginning of a stop string.

    >>> may_begin_a_stop("so it EN", ("END", "N!"))
    2
    """
    lengths = (
        length
        for stop in stops
        for length in range(min(len(stop) - 1, len(text)), 0, -1)
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
