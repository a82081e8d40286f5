"""Search an index from the page, and explain why a document matched."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.studio.models import unique_name
from manyheads.studio.requests import LIMITS, DisconnectedError, RequestBody
from manyheads.studio.run_cache import IsCancelled
from manyheads.studio.views import rounded
from manyheads.tasks.search.highlights import highlight
from manyheads.tasks.search.index import Hit, Index
from manyheads.tasks.search.match_explanation import check_explains, explain_hit
from manyheads.tasks.search.match_result import HeadMethod, MatchExplanation, MatchSide

MAX_HITS = 50
# Queries to try, and how many words of a document without a title they have.
EXAMPLES, EXAMPLE_WORDS = 3, 6
# Tokens on each axis of the matrix: those with the largest values, in the order of the text.
MAX_ROWS, MAX_COLUMNS = 40, 48


class SearchHandlers:
    """Answers requests about the indexes that the studio was started with."""

    def __init__(self, indexes: Sequence[tuple[str, Index]] = ()) -> None:
        self.indexes: dict[str, Index] = {}
        for name, index in indexes:
            self.indexes[unique_name(name, self.indexes)] = index

    def describe(self) -> list[dict[str, Any]]:
        """What the page needs to know about each index."""
        return [
            {
                "name": name,
                "kind": index.kind,
                "documents": len(index),
                "explains": index.kind != "bm25",
                "queries": [_example_query(hit) for hit in index.sample(EXAMPLES)],
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
        """What the words of a passage and, on request, the heads add to its score."""
        body.check_fields("index", "query", "title", "text", "heads")
        index, query = self._index(body), _query(body)
        title, text = body.text("title"), body.text("text")
        check_explains(index)
        if cancelled():
            raise DisconnectedError
        place: dict[str, Any] = {"id": "", "source": "", "chunk": 0, "start": 0, "end": len(text)}
        hit = Hit(score=0.0, text=text, title=title, metadata={}, **place)
        assert index.model is not None
        weights = sum(weight.numel() for weight in index.model.parameters())
        # Running a large model without each head would take too long.
        by: HeadMethod = "gradient" if weights > LIMITS.large_parameters else "ablation"
        heads = body.flag("heads")
        # Requests run in inference mode, which has no gradients.
        with torch.inference_mode(mode=False):
            return _explanation(explain_hit(index, query, hit, by=by, heads=heads, progress=False))

    def _index(self, body: RequestBody) -> Index:
        name = body.name("index")
        if name not in self.indexes:
            names = ", ".join(self.indexes)
            remedy = f"use {names}" if names else "start the studio with --index INDEX"
            raise InputError(f"there is no index {name[:80]!r}", remedy)
        return self.indexes[name]


def _example_query(hit: Hit) -> str:
    """The title of a document, or its first words."""
    return " ".join((hit.title or hit.text).split()[:EXAMPLE_WORDS])[:80]


def _query(body: RequestBody) -> str:
    query = body.text("query")
    if not query.strip():
        raise InputError("the query is empty", "type at least one word")
    return query


def _hit(hit: Hit, query: str) -> dict[str, Any]:
    view = without_nan(hit.as_dict()) | {"score": rounded(hit.score)}
    return view | {"marks": highlight(query, hit.text)}


def _explanation(match: MatchExplanation) -> dict[str, Any]:
    view: dict[str, Any] = {
        "kind": match.kind,
        "score": rounded(match.score),
        "tokens_by": match.tokens_by,
        "heads_by": match.by,
        "query": _words(match.query),
        "document": _words(match.document),
        "matrix": None if match.similarity is None else _matrix(match),
        "heads": None,
    }
    if match.heads is not None:
        stack = match.heads.blocks[0].stack
        view["heads"] = {
            name: [
                {"layer": layer, "values": [rounded(value) for value in values.tolist()]}
                for layer, values in match.heads[name].layers(stack).items()
            ]
            for name in match.heads.names
        }
        view["top_heads"] = [
            {"head": str(address), "value": rounded(value)} for address, value in match.top_heads()
        ]
    return view


def _words(side: MatchSide) -> dict[str, Any]:
    return {
        "text": side.text,
        "words": [[word.start, word.end, rounded(word.contribution)] for word in side.words()],
        "special": rounded(side.special),
    }


def _matrix(match: MatchExplanation) -> dict[str, Any]:
    assert match.similarity is not None
    table = match.similarity
    rows = np.sort(np.argsort(-table.max(1), kind="stable")[:MAX_ROWS])
    strength = table.max(0)
    # Those that are the best match of a token of the query come first.
    strength[table.argmax(1)] += np.abs(table).max()
    columns = np.sort(np.argsort(-strength, kind="stable")[:MAX_COLUMNS])
    return {
        "rows": [match.query.tokens[row] for row in rows],
        "columns": [match.document.tokens[column] for column in columns],
        "tokens": len(match.document.tokens),
        "values": [
            [rounded(value) for value in line] for line in table[np.ix_(rows, columns)].tolist()
        ],
    }
