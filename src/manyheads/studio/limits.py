"""How much one request may ask for, so that no page can make the studio ill."""

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of single requests; `waiting` and `kept_bytes` are bounds of all of them together.

    >>> LIMITS.tokens >= 8192
    True
    """

    body_bytes: int = 4_000_000
    body_seconds: float = 30.0
    letters: int = 400_000
    tokens: int = 16_384
    heads: int = 12
    switched: int = 4096
    keys: int = 64
    rows: int = 256
    cells: int = 512
    max_new_tokens: int = 512
    answers: int = 20
    # The atlas needs every pair of tokens in every head; of a longer text it shows the beginning.
    atlas_tokens: int = 2048
    kind_sequences: int = 8
    # Patching runs the model once a head: it is for prompts, not for books.
    patched_tokens: int = 256
    waiting: int = 32
    kept_bytes: int = 1_500_000_000


LIMITS = Limits()
