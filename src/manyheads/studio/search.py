"""Search an index from the page, and explain why a document matched."""

import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.studio.requests import LIMITS, DisconnectedError, RequestBody
from manyheads.studio.run_cache import IsCancelled
from manyheads.studio.views import rounded
from manyheads.tasks.search.highlights import highlight
from manyheads.tasks.search.index import Hit, Index
from manyheads.tasks.search.match_explanation import check_explains, explain_hit
from manyheads.tasks.search.match_result import HeadMethod, MatchExplanation, MatchSide

MAX_HITS = 50
# Tokens on each axis of the matrix: those with the largest values, in the order of the text.
MAX_ROWS, MAX_COLUMNS = 40, 48


class SearchHandlers:
    """Answers requests about the indexes that the studio was started with."""

    def __init__(self, indexes: Sequence[tuple[str, Index]] = ()) -> None:
        self.indexes: dict[str, Index] = {}
        for name, index in indexes:
            unique, count = name, 2
            while unique in self.indexes:
                unique, count = f"{name} ({count})", count + 1
            self.indexes[unique] = index

    def describe(self) -> list[dict[str, Any]]:
        """What the page needs to know about each index."""
        return [
            {
                "name": name,
                "kind": index.kind,
                "documents": len(index),
                "explains": _explains(index),
            }
            for name, index in self.indexes.items()
        ]

    def search(self, body: RequestBody, _: IsCancelled) -> dict[str, Any]:
        """The documents that fit a query best, with the places of the words that they share."""
        body.check_fields("index", "query", "top_k")
        index, query = self._index(body), _query(body)
        top_k = body.integer("top_k", 1, MAX_HITS, 10)
        start = time.perf_counter()
        # A file of code is found for each of its functions.
        hits = index.search(query, top_k=top_k, every_chunk=index.settings.code)
        seconds = time.perf_counter() - start
        return {"seconds": rounded(seconds), "hits": [_hit(hit, query) for hit in hits]}

    def explain_match(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """What the words of a passage and, if asked for, the heads add to its score."""
        body.check_fields("index", "query", "title", "text", "heads")
        index, query = self._index(body), _query(body)
        title, text = body.text("title"), body.text("text")
        check_explains(index)
        if cancelled():
            raise DisconnectedError
        heads = body.flag("heads")
        hit = Hit(
            id="",
            score=0.0,
            text=text,
            title=title,
            chunk=0,
            start=0,
            end=len(text),
            source="",
            metadata={},
        )
        # Requests run in inference mode, which has no gradients.
        with torch.inference_mode(mode=False):
            by: HeadMethod = "gradient" if _is_large(index) else "ablation"
            found = explain_hit(index, query, hit, by=by, heads=heads, progress=False)
        return _explanation(found)

    def _index(self, body: RequestBody) -> Index:
        name = body.name("index")
        if name not in self.indexes:
            known = ", ".join(self.indexes)
            raise InputError(
                f"there is no index {name[:80]!r}",
                f"use {known}" if known else "start the studio with --index INDEX",
            )
        return self.indexes[name]


def index_name(address: str) -> str:
    """The name of an index on the page: the last part of its address.

    >>> index_name("notes/my.index/"), index_name("s3://bucket/docs")
    ('my.index', 'docs')
    """
    return PurePath(address.replace("\\", "/").rstrip("/")).name or address


def _explains(index: Index) -> bool:
    return index.kind != "bm25"


def _is_large(index: Index) -> bool:
    """Whether running the model without each head would take too long."""
    assert index.model is not None
    return sum(each.numel() for each in index.model.parameters()) > LIMITS.large_parameters


def _query(body: RequestBody) -> str:
    query = body.text("query")
    if not query.strip():
        raise InputError("the query is empty", "type at least one word")
    return query


def _hit(hit: Hit, query: str) -> dict[str, Any]:
    return {
        "id": hit.id,
        "score": rounded(hit.score),
        "title": hit.title,
        "text": hit.text,
        "chunk": hit.chunk,
        "start": hit.start,
        "end": hit.end,
        "source": hit.source,
        "metadata": without_nan(dict(hit.metadata)),
        "marks": highlight(query, hit.text),
    }


def _explanation(found: MatchExplanation) -> dict[str, Any]:
    view: dict[str, Any] = {
        "kind": found.kind,
        "score": rounded(found.score),
        "tokens_by": found.tokens_by,
        "heads_by": found.by,
        "query": _words(found.query),
        "document": _words(found.document),
        "matrix": None if found.similarity is None else _matrix(found),
        "heads": None,
    }
    if found.heads is not None:
        stack = found.heads.blocks[0].stack
        view["heads"] = {
            name: [
                {"layer": layer, "values": [rounded(value) for value in values.tolist()]}
                for layer, values in found.heads[name].layers(stack).items()
            ]
            for name in found.heads.names
        }
        view["top_heads"] = [
            {"head": str(address), "value": rounded(value)} for address, value in found.top_heads()
        ]
    return view


def _words(side: MatchSide) -> dict[str, Any]:
    return {
        "text": side.text,
        "words": [[word.start, word.end, rounded(word.contribution)] for word in side.words()],
        "special": rounded(side.special),
    }


def _matrix(found: MatchExplanation) -> dict[str, Any]:
    assert found.similarity is not None
    table = found.similarity
    rows = np.sort(np.argsort(-table.max(1), kind="stable")[:MAX_ROWS])
    strength = table.max(0)
    # Those that are the best match of a token of the query come first.
    strength[table.argmax(1)] += np.abs(table).max()
    columns = np.sort(np.argsort(-strength, kind="stable")[:MAX_COLUMNS])
    shown = table[np.ix_(rows, columns)]
    return {
        "rows": [found.query.tokens[row] for row in rows],
        "columns": [found.document.tokens[column] for column in columns],
        "tokens": len(found.document.tokens),
        "values": [[rounded(value) for value in line] for line in shown.tolist()],
    }
