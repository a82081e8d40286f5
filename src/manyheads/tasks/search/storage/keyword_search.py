"""BM25 over the words of chunks, by the package bm25s."""

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import import_package

WORD = re.compile(r"\w+")
# The borders within an identifier: parseHTTPRequest is parse, HTTP, Request.
INSIDE_A_WORD = re.compile(r"[^\W_]*?[a-z0-9](?=[A-Z])|[A-Z]+(?=[A-Z][a-z])|[^\W_]+")


def keywords_of(text: str, *, code: bool = False) -> list[str]:
    """The words of a text in lower case, without English stop words.

    Of code also the parts of identifiers.

    >>> keywords_of("The heads of a model"), keywords_of("read_HTMLText", code=True)
    (['heads', 'model'], ['read_htmltext', 'read', 'html', 'text'])
    """
    stop_words = _stop_words()
    words = []
    for word in WORD.findall(text):
        lower = word.lower()
        if lower in stop_words:
            continue
        words.append(lower)
        if code:
            parts = [part.lower() for part in INSIDE_A_WORD.findall(word)]
            words += parts if len(parts) > 1 else []
    return words


class KeywordIndex:
    """Scores of all rows for a query."""

    def __init__(self, engine: Any, rows: int, *, code: bool) -> None:
        self._engine = engine
        self.rows = rows
        self.code = code

    @classmethod
    def of(cls, texts: Sequence[str], *, code: bool = False) -> "KeywordIndex":
        engine = _package().BM25()
        # A text without any word must keep its row, and nothing at all is refused.
        words = [keywords_of(text, code=code) or [""] for text in texts]
        engine.index(words or [[""]], show_progress=False)
        return cls(engine, len(texts), code=code)

    def save(self, folder: Path) -> None:
        self._engine.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path, *, rows: int, code: bool) -> "KeywordIndex":
        engine = _package().BM25.load(folder, show_progress=False)
        return cls(engine, rows, code=code)

    def scores(self, query: str) -> Float[np.ndarray, " rows"]:
        """The BM25 score of each row, 0 where no word occurs."""
        vocabulary = self._engine.vocab_dict
        words = [word for word in keywords_of(query, code=self.code) if word in vocabulary]
        if not words:
            return np.zeros(self.rows, dtype=np.float32)
        scores: np.ndarray = self._engine.get_scores(words)
        return scores[: self.rows]


@cache
def _stop_words() -> frozenset[str]:
    return frozenset(_package().stopwords.STOPWORDS_EN)


def _package() -> Any:
    import_package("bm25s.stopwords", "keyword search", "'manyheads[search]'")
    return import_module("bm25s")
