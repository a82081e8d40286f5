"""Why a text matched a query: what its words, the query's words and each head add to the score."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.lens.results import addresses, files, tables

MatchKind = Literal["dense", "late"]
# How heads are measured: without each of them, or from one backward pass.
HeadMethod = Literal["ablation", "gradient"]
# How tokens are measured.
TokenMethod = Literal["decomposition", "removal", "gradient"]
SideName = Literal["query", "document"]


@dataclass(frozen=True, slots=True)
class MatchWord:
    """A word of a text, its place in characters, and what it adds to the score."""

    text: str
    start: int
    end: int
    contribution: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MatchSide:
    """The tokens of one text: their names, the characters and the word each belongs to.

    Tokens that stand for no part of the text, such as [CLS], have the word -1.
    """

    text: str
    tokens: tuple[str, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    word_of_token: tuple[int, ...]
    contributions: Float[np.ndarray, " t"]

    def words(self) -> list[MatchWord]:
        """The words in the order of the text, each with the sum over its tokens."""
        words = []
        for tokens in tokens_of_words(self.word_of_token):
            start = min(self.starts[token] for token in tokens)
            end = max(self.ends[token] for token in tokens)
            raw = self.text[start:end]
            start += len(raw) - len(raw.lstrip())
            total = float(sum(self.contributions[token] for token in tokens))
            words.append(MatchWord(raw.strip(), start, start + len(raw.strip()), total))
        return words

    @property
    def special(self) -> float:
        """What the tokens add that stand for no part of the text."""
        pairs = zip(self.word_of_token, self.contributions.tolist(), strict=True)
        return float(sum(value for word, value in pairs if word < 0))


def tokens_of_words(words: Sequence[int]) -> list[list[int]]:
    """The tokens of each word, from the word of each token."""
    tokens: dict[int, list[int]] = {}
    for token, word in enumerate(words):
        if word >= 0:
            tokens.setdefault(word, []).append(token)
    return list(tokens.values())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class MatchExplanation(files.Result):
    """Why a text matched a query.

    `similarity` has a row per token of the query and a column per token of the document. Of a late
    match it is the similarity of their vectors, and the score is the sum of the largest of each
    row. Of a dense match that pools by the mean it sums to the score; of others it is None.
    `heads` has what each head adds on the side of the query and of the document: the score minus
    the score without it.
    """

    kind: MatchKind
    by: HeadMethod
    tokens_by: TokenMethod
    score: float
    query: MatchSide
    document: MatchSide
    similarity: Float[np.ndarray, "q d"] | None = None
    heads: tables.ByHead | None = None

    @classmethod
    def load(cls, path: Path | str) -> "MatchExplanation":
        """Read what `save` wrote to .json or .safetensors."""
        return cast(MatchExplanation, files.read_result(path, {cls.__name__: cls}))

    def side(self, name: SideName) -> MatchSide:
        if name not in ("query", "document"):
            raise InputError(f"side must be query or document, got {name!r}", "use one of them")
        return self.query if name == "query" else self.document

    def top_words(self, top_k: int = 8, side: SideName = "document") -> list[MatchWord]:
        """The words that add most to the score, most first."""
        words = sorted(self.side(side).words(), key=lambda word: -word.contribution)
        return [word for word in words[:top_k] if word.contribution > 0]

    def top_heads(self, top_k: int = 8) -> list[tuple[addresses.Address, float]]:
        """The heads that add most to the score on both sides together, most first."""
        if self.heads is None:
            return []
        total = np.sum([self.heads.means[name] for name in self.heads.names], axis=0)
        pairs = zip(self.heads.addresses, total.tolist(), strict=True)
        ranked = sorted(pairs, key=lambda pair: -pair[1])
        return [(address, value) for address, value in ranked[:top_k] if value > 0]

    def best_matches(self) -> list[tuple[str, str, float]]:
        """For each token of the query the document token that it is most similar to."""
        if self.similarity is None:
            return []
        best = self.similarity.argmax(1)
        return [
            (name, self.document.tokens[column], float(self.similarity[row, column]))
            for row, (name, column) in enumerate(zip(self.query.tokens, best, strict=True))
        ]

    def record(self, top_k: int = 8) -> dict[str, Any]:
        """The explanation as plain values for JSON: words with offsets, heads and matches."""
        means = {} if self.heads is None else self.heads.means
        by_head = [
            {"head": str(address)} | {name: float(values[index]) for name, values in means.items()}
            for index, address in enumerate(self.heads.addresses if self.heads else ())
        ]
        about = {
            "kind": self.kind,
            "score": self.score,
            "heads_by": self.by,
            "tokens_by": self.tokens_by,
            "query": _side_record(self.query),
            "document": _side_record(self.document),
            "top_words": [word.text for word in self.top_words(top_k)],
            "top_heads": [str(address) for address, _ in self.top_heads(top_k)],
            "heads": by_head,
            "matches": [
                {"query": word, "document": match, "similarity": value}
                for word, match, value in self.best_matches()
            ],
        }
        return cast(dict[str, Any], without_nan(about))

    def picture_data(self) -> dict[str, Any]:
        """The arguments of `pictures.draw_match`, all but the path."""
        words = self.document.words()
        data: dict[str, Any] = {
            "words": [word.text for word in words],
            "contributions": np.array([word.contribution for word in words]),
            "query": self.query.tokens,
            "document": self.document.tokens,
            "matrix": self.similarity,
            "title": f"Why it matched: {shorten(self.query.text, 58, placeholder='…')}",
            "subtitle": f"{self.kind} match, score {self.score:.3f}; words by {self.tokens_by}"
            + (f", heads by {self.by}" if self.heads else ""),
        }
        if self.heads is not None:
            stack = self.heads.blocks[0].stack
            by_side = {name: self.heads[name].layers(stack) for name in self.heads.names}
            data["heads"] = {name: list(layers.values()) for name, layers in by_side.items()}
            data["layers"] = [block.layer for block in self.heads.blocks]
        return data

    def __str__(self) -> str:
        lines = [f"{self.kind} match, score {self.score:.4f} (tokens by {self.tokens_by})"]
        sides: tuple[SideName, ...] = ("query", "document")
        for name in sides:
            words = _distinct(self.top_words(16, name))[:8]
            named = ", ".join(f"{word.text} {word.contribution:+.3f}" for word in words)
            lines.append(f"  {name}: {named or 'no word adds to the score'}")
        if heads := self.top_heads():
            named = ", ".join(f"{address} {value:+.3f}" for address, value in heads)
            lines.append(f"  heads: {named} (by {self.by})")
        return "\n".join(lines)

    __repr__ = __str__

    def _summary(self) -> dict[str, Any]:
        return {
            "top_words": [word.text for word in self.top_words()],
            "top_heads": [str(address) for address, _ in self.top_heads()],
        }


def _side_record(side: MatchSide) -> dict[str, Any]:
    return {
        "text": side.text,
        "words": [asdict(word) for word in side.words()],
        "special": side.special,
    }


def _distinct(words: Iterable[MatchWord]) -> list[MatchWord]:
    """Each word once, where it occurs first.

    >>> len(_distinct([MatchWord("Wing", 0, 4, 0.2), MatchWord("wing", 9, 13, 0.1)]))
    1
    """
    first_words: dict[str, MatchWord] = {}
    for word in words:
        first_words.setdefault(word.text.casefold(), word)
    return list(first_words.values())
