"""What the studio says no to: a status of HTTP and a sentence for the person who asked."""

__all__ = ["GONE", "LeftError", "RefusedError"]

# Nobody is there to read it; the number is the one that servers write into their logs.
GONE = 499


class RefusedError(Exception):
    """A request that is not answered, with the reason in a sentence.

    >>> RefusedError(404, "There is nothing at /attic.").status
    404
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class LeftError(Exception):
    """Whoever asked has gone; the work is dropped."""
