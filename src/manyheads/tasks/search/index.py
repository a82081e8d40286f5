"""An index of documents: created, changed and searched, on disk or in an object store."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.encoding.encode import Options, encode_with_counts
from manyheads.encoding.fingerprints import model_fingerprint
from manyheads.encoding.late_scores import maxsim
from manyheads.encoding.text_reader import require_text_model
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import InputError, ManyheadsError, TruncationWarning, check_int, short_repr
from manyheads.formatting import alternatives
from manyheads.models.build import Model
from manyheads.ragged import Ragged
from manyheads.tasks.search.chunking import CHUNK_TOKENS, OVERLAP, Chunker, ChunkSettings
from manyheads.tasks.search.documents import Document, Documents, Scalar
from manyheads.tasks.search.rank_fusion import fuse_rankings
from manyheads.tasks.search.residual_codes import ResidualCodec, ResidualCodes
from manyheads.tasks.search.storage import index_manifest
from manyheads.tasks.search.storage.index_manifest import IndexKind, IndexLocation, IndexManifest
from manyheads.tasks.search.storage.index_writer import IndexingReport, IndexWriter, read_codec
from manyheads.tasks.search.storage.keyword_search import KeywordIndex
from manyheads.tasks.search.storage.vector_store import ChunkTable, damage_named

KINDS: tuple[IndexKind, ...] = ("dense", "late", "bm25", "hybrid")
FORMATS: tuple[index_manifest.VectorFormat, ...] = ("float32", "float16", "2bit")
# How many documents of each ranking a hybrid search fuses, at least.
FUSED = 100
# How often a reader tries again if a writer replaces the files that it opens.
RETRIES = 5

Where = str | Mapping[str, Any]
RowVectorsInMemory = Float[Tensor, "n c"] | Ragged | ResidualCodes


@dataclass(frozen=True, slots=True)
class Hit:
    """A document and its best chunk: characters `start` to `end` of the document's text."""

    id: str
    score: float
    text: str
    title: str
    chunk: int
    start: int
    end: int
    source: str
    metadata: Mapping[str, Scalar]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("id", "score", "title", "text", "chunk", "start", "end", "source")
        return {name: getattr(self, name) for name in names} | {"metadata": dict(self.metadata)}


class _SearchScope(NamedTuple):
    """Which rows may be found, by which condition, how many, and whether one per document."""

    allowed: Bool[np.ndarray, " n"]
    where: Where | None
    depth: int
    every_chunk: bool = False


class _Ranked(NamedTuple):
    """The number of a row, what it counts as, itself or its document, and its score."""

    row: int
    key: int
    score: float


class Index:
    """Documents that can be searched; `create` or `open` one.

    An `Index` sees the state in which it was opened, or that of its own last change.
    """

    def __init__(
        self,
        location: IndexLocation,
        manifest: IndexManifest,
        model: Model | None,
        report: IndexingReport | None = None,
    ) -> None:
        self.model, self.report, self._location = model, report, location
        self._state = _Snapshot(location, manifest)

    @classmethod
    def create(
        cls,
        path: str | Path,
        model: Model | str | Path | None,
        documents: Documents,
        *,
        kind: IndexKind = "dense",
        chunk_tokens: int = CHUNK_TOKENS,
        overlap: int = OVERLAP,
        whole: bool = False,
        code: bool = False,
        vectors: index_manifest.VectorFormat = "float32",
        progress: bool = True,
    ) -> "Index":
        """Index documents, or bring the index at `path` up to date with them.

        `documents` is what `read_documents` takes. Only new and changed documents are encoded, and
        those that an interrupted run had not reached; documents that are gone are removed. Until
        all is done, an index that was there before is searched unchanged. "bm25" needs no model,
        "late" keeps one vector per token, and "hybrid" fuses BM25 with the model's own kind.
        """
        if kind not in KINDS:
            raise InputError(f"kind must be {alternatives(KINDS)}, got {short_repr(kind)}")
        if vectors not in FORMATS:
            raise InputError(f"vectors must be {alternatives(FORMATS)}, got {short_repr(vectors)}")
        settings = ChunkSettings(chunk_tokens=chunk_tokens, overlap=overlap, whole=whole, code=code)
        # Keywords are split and searched without a model.
        used = None if kind == "bm25" else model
        opened = load(used) if isinstance(used, str | Path) else used
        if opened is None and kind != "bm25":
            raise InputError(f"kind={kind!r} needs a model", "give one, or use kind='bm25'")
        plan = _plan(kind, vectors, settings, opened)
        location = IndexLocation(path)
        location.prepare()
        with location.lock():
            writer = IndexWriter(location, plan, opened)
            manifest = writer.write(documents, keep_others=False, progress=progress)
        _warn_if_truncated(writer.report)
        return cls(location, manifest, opened, writer.report)

    @classmethod
    def open(cls, path: str | Path, model: Model | str | Path | None = None) -> "Index":
        """An index with the model that made it, which is loaded from where it was then.

        If it has moved or was made in memory, give it as `model`; another one is refused.
        """
        location = IndexLocation(path)
        manifest = location.require_manifest()
        opened = load(model) if isinstance(model, str | Path) else model
        if manifest.row_vectors != "none":
            opened = _check_model(location, manifest, opened)
        for attempt in range(RETRIES):
            try:
                index = cls(location, manifest, opened)
                # What a writer may remove is read at once.
                _ = index._state.keywords, index._state.codec
                return index
            except (ValueError, RuntimeError, OSError, LookupError, TypeError) as error:
                current = location.require_manifest()
                if current == manifest or attempt == RETRIES - 1:
                    if isinstance(error, ManyheadsError):
                        raise
                    raise InputError(
                        f"the index {location} is damaged ({str(error)[:300]})",
                        "create it again in a new folder",
                    ) from error
                manifest = current
        raise AssertionError("unreachable")

    @staticmethod
    def model_name(path: str | Path) -> str:
        """The model that an index was made with: a folder, a name, or "" if it has no vectors."""
        manifest = IndexLocation(path).require_manifest()
        return "" if manifest.row_vectors == "none" else manifest.model

    @property
    def kind(self) -> IndexKind:
        return self._state.manifest.kind

    @property
    def settings(self) -> ChunkSettings:
        """How documents are split into chunks."""
        return self._state.manifest.settings

    @property
    def chunks(self) -> int:
        """How many chunks the documents have."""
        return self._state.manifest.chunks

    @property
    def ids(self) -> list[str]:
        """The ids of all documents."""
        return list(self._state.names.documents)

    def __len__(self) -> int:
        return self._state.manifest.documents

    def search(
        self, query: str, *, top_k: int = 10, where: Where | None = None, every_chunk: bool = False
    ) -> list[Hit]:
        """The best documents for a query, each with its best chunk, or the best chunks.

        `where` is a condition on metadata in SQL, or a mapping of keys to values or lists of them.
        Scores are cosines ("dense"), sums of the best cosines per query token ("late"), of BM25, or
        sums of reciprocal ranks ("hybrid"); documents without any word of the query are no hits of
        "bm25". With `every_chunk` a document may be found several times, such as a file of code for
        each of its functions.
        """
        return self.search_many([query], top_k, where=where, every_chunk=every_chunk)[0]

    def search_many(
        self,
        queries: Sequence[str],
        top_k: int = 10,
        *,
        where: Where | None = None,
        every_chunk: bool = False,
    ) -> list[list[Hit]]:
        """`search` for each query."""
        check_int("top_k", top_k, minimum=1)
        for query in [queries] if isinstance(queries, str) else queries:
            if isinstance(queries, str) or not isinstance(query, str) or not query.strip():
                raise InputError(
                    f"a query must be a string with some text, got {short_repr(query)}",
                    "give a list of queries" if isinstance(queries, str) else "",
                )
        state = self._state
        scope = _SearchScope(state.allowed(where), where, self._depth(top_k), every_chunk)
        rankings: list[list[list[_Ranked]]] = []
        if state.manifest.row_vectors != "none":
            assert self.model is not None
            encoded = _encode_queries(self.model, queries, state.manifest.row_vectors)
            rankings.append([state.by_vectors(vector, scope) for vector in encoded])
        if state.keywords is not None:
            rankings.append([state.by_keywords(query, scope) for query in queries])
        return [state.hits(_fused(list(ranked), top_k)) for ranked in zip(*rankings, strict=True)]

    def like(
        self, document: str | Document, top_k: int = 10, *, where: Where | None = None
    ) -> list[Hit]:
        """The documents most similar to one of the index, given by its id, or to another one.

        The similarity is that of the mean of its chunks' vectors, or of all its tokens ("late").
        """
        check_int("top_k", top_k, minimum=1)
        state = self._state
        allowed = state.allowed(where)
        own = state.rows_of(document) if isinstance(document, str) else np.zeros(0, dtype=np.int64)
        allowed[own] = False
        scope = _SearchScope(allowed, where, self._depth(top_k))
        rankings = []
        if state.manifest.row_vectors != "none":
            query = (
                self._vectors_of(document)
                if isinstance(document, Document)
                else state.query_of(own)
            )
            rankings.append(state.by_vectors(query, scope))
        if state.keywords is not None:
            texts = (row["text"] for row in state.table.take(state.names.rows[own]))
            text = document.text if isinstance(document, Document) else "\n".join(texts)
            rankings.append(state.by_keywords(text, scope))
        return state.hits(_fused(rankings, top_k))

    def sample(self, count: int = 3) -> list[Hit]:
        """Documents spread over the index, each with its first chunk and no score."""
        check_int("count", count, minimum=1)
        state = self._state
        places = np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64)
        rows = [int(np.argmax(state.names.document == place)) for place in places]
        return state.hits([_Ranked(row, row, math.nan) for row in rows]) if rows else []

    def _depth(self, top_k: int) -> int:
        return max(FUSED, top_k) if self.kind == "hybrid" else top_k

    def _vectors_of(self, document: Document) -> Tensor:
        assert self.model is not None
        late = self._state.manifest.row_vectors == "late"
        [chunks] = Chunker(self.settings, self.model, late=late).split([document])
        texts = [chunk.encoded for chunk in chunks]
        if late:
            return encode_tokens(self.model, texts, progress=False).values
        vectors = _encode_queries(self.model, texts, "dense")
        return F.normalize(torch.stack(vectors).mean(0), dim=0)

    def add(self, documents: Documents, *, progress: bool = True) -> IndexingReport:
        """Add documents; one whose id is already there replaces it. Returns what was done."""
        return self._change(documents, progress=progress)

    def delete(self, ids: str | Iterable[str]) -> IndexingReport:
        """Remove documents by their ids."""
        listed = [ids] if isinstance(ids, str) else list(ids)
        self._state.require(listed)
        return self._change([], remove=dict.fromkeys(listed), progress=False)

    def _change(
        self, documents: Documents, *, remove: Iterable[str] = (), progress: bool
    ) -> IndexingReport:
        with self._location.lock():
            # Another process may have changed it since this one opened it.
            plan = self._location.require_manifest()
            writer = IndexWriter(self._location, plan, self.model)
            manifest = writer.write(documents, keep_others=True, remove=remove, progress=progress)
        _warn_if_truncated(writer.report)
        self._state = _Snapshot(self._location, manifest)
        self.report = writer.report
        return writer.report

    def refresh(self) -> None:
        """See what other processes have changed since."""
        self._state = Index.open(self._location.address, self.model)._state


class _Snapshot:
    """One committed state of an index, of which parts are read when they are needed."""

    def __init__(self, location: IndexLocation, manifest: IndexManifest) -> None:
        self.location = location
        self.manifest = manifest
        self.table = ChunkTable.pinned(location.address, manifest)
        self.names = self.table.names()
        counts = (len(self.names), len(self.names.documents))
        if counts != (manifest.chunks, manifest.documents):
            raise InputError(
                f"the index {location} has {counts[0]} chunks of {counts[1]} documents, and its "
                f"manifest names {manifest.chunks} of {manifest.documents}",
                "create the index again in a new folder",
            )
        self._searched = False

    @cached_property
    def keywords(self) -> KeywordIndex | None:
        if not self.manifest.keywords:
            return None
        with self.location.local_folder(self.manifest.keywords) as folder:
            return KeywordIndex.load(folder, rows=len(self.names), code=self.manifest.settings.code)

    @cached_property
    def codec(self) -> ResidualCodec | None:
        return read_codec(self.location, self.manifest.codes) if self.manifest.codes else None

    @cached_property
    def vectors(self) -> RowVectorsInMemory:
        stored = self.table.vectors()
        if not isinstance(stored, Ragged):
            # Products of half precision are slow on the CPU.
            return stored.float()
        return stored if self.codec is None else ResidualCodes(self.codec, stored)

    def require(self, ids: Sequence[str]) -> None:
        """Refuse ids that no document has."""
        documents = set(self.names.documents)
        for name in ids:
            if name not in documents:
                problem = f"the index has no document {name!r}"
                raise InputError(problem, "use ids that a search returns")

    def rows_of(self, document: str) -> Int[np.ndarray, " m"]:
        """The rows of a document."""
        self.require([document])
        return np.flatnonzero(self.names.document == self.names.documents.index(document))

    def query_of(self, rows: Int[np.ndarray, " m"]) -> Tensor:
        """The vectors of some rows as those of a query."""
        vectors = self.table.vectors_of(self.names.rows[rows])
        if isinstance(vectors, Ragged):
            codes = vectors.values
            return codes.float() if self.codec is None else self.codec.decode(codes)
        return F.normalize(vectors.float().mean(0), dim=0)

    def allowed(self, where: Where | None) -> Bool[np.ndarray, " n"]:
        """Which rows a condition holds for."""
        if where is None:
            return np.ones(len(self.names), dtype=bool)
        return np.isin(self.names.rows, self.table.matching(self.table.condition(where)))

    def by_vectors(self, query: Tensor, scope: _SearchScope) -> list[_Ranked]:
        if not len(self.names):
            return []
        if not self.manifest.approximate:
            return self._best(_similarities(query, self.vectors), scope.allowed, scope)
        condition = None if scope.where is None else self.table.condition(scope.where)
        proposed = self.table.nearest(query, scope.depth, condition)
        numbers = np.searchsorted(self.names.rows, proposed)
        scores = np.full(len(self.names), -np.inf, dtype=np.float32)
        scores[numbers] = _similarities(query, self.table.vectors_of(proposed))
        return self._best(scores, (scores > -np.inf) & scope.allowed, scope)

    def by_keywords(self, query: str, scope: _SearchScope) -> list[_Ranked]:
        assert self.keywords is not None
        scores = self.keywords.scores(query)
        return self._best(scores, (scores > 0) & scope.allowed, scope)

    def _best(
        self, scores: Float[np.ndarray, " n"], allowed: Bool[np.ndarray, " n"], scope: _SearchScope
    ) -> list[_Ranked]:
        """The best row of each of the best documents, or the best rows."""
        rows = np.flatnonzero(allowed)
        fetched = 4 * scope.depth
        while True:
            candidates = rows
            if len(rows) > fetched:
                candidates = rows[np.argpartition(-scores[rows], fetched)[:fetched]]
            best: dict[int, _Ranked] = {}
            for row in candidates[np.lexsort((candidates, -scores[candidates]))].tolist():
                key = row if scope.every_chunk else int(self.names.document[row])
                if key not in best:
                    best[key] = _Ranked(row, key, float(scores[row]))
                    if len(best) == scope.depth:
                        break
            if len(best) == scope.depth or len(candidates) == len(rows):
                return list(best.values())
            fetched *= 4

    def hits(self, ranked: Sequence[_Ranked]) -> list[Hit]:
        with damage_named(self.location.address):
            return self._hits(ranked)

    def _hits(self, ranked: Sequence[_Ranked]) -> list[Hit]:
        names, numbers = self.names, np.array([hit.row for hit in ranked], dtype=np.int64)
        # A process that searches once reads only the rows that it shows.
        if self._searched and self._held is not None:
            rows = self._held.take(numbers).to_pylist()
        else:
            rows = self.table.take(names.rows[numbers])
        self._searched = True
        return [
            Hit(
                id=names.documents[names.document[hit.row]],
                score=hit.score,
                text=row["text"],
                title=row["title"],
                chunk=int(names.chunk[hit.row]),
                start=row["chunk_start"],
                end=row["chunk_end"],
                source=row["source"],
                metadata=json.loads(row["metadata"]),
            )
            for hit, row in zip(ranked, rows, strict=True)
        ]

    @cached_property
    def _held(self) -> Any:
        return self.table.held_rows()


def _plan(
    kind: IndexKind,
    vectors: index_manifest.VectorFormat,
    settings: ChunkSettings,
    model: Model | None,
) -> IndexManifest:
    row_vectors: index_manifest.RowVectors = "none"
    if kind == "hybrid":
        row_vectors = "late" if getattr(model, "late", None) is not None else "dense"
    elif kind != "bm25":
        row_vectors = kind
    plan = IndexManifest(kind=kind, row_vectors=row_vectors, vectors=vectors, settings=settings)
    if vectors == "2bit" and row_vectors != "late":
        raise InputError(
            f"vectors='2bit' is for one vector per token, and kind={kind!r} has none here",
            "use kind='late', or vectors='float16'",
        )
    if model is None:
        return plan
    require_text_model(model)
    folder = bool(model.source) and Path(model.source).is_dir()
    source = str(Path(model.source).resolve()) if folder else model.source
    [probe] = _encode_queries(model, ["width"], row_vectors)
    return replace(
        plan, model=source, model_fingerprint=model_fingerprint(model), width=probe.shape[-1]
    )


def _encode_queries(model: Model, queries: Sequence[str], row_vectors: str) -> list[Tensor]:
    if row_vectors == "late":
        return encode_tokens(model, queries, role="query", progress=False).to_list()
    return list(encode_with_counts(model, queries, Options(normalize=True, progress=False)).vectors)


def _similarities(query: Tensor, rows: RowVectorsInMemory) -> Float[np.ndarray, " n"]:
    """Cosines with one vector per row, or MaxSim with several."""
    match rows:
        case Ragged():
            scores = maxsim(query, rows)
        case ResidualCodes():
            scores = rows.score(query)
        case _:
            scores = rows.float() @ query.float()
    similar: np.ndarray = scores.numpy()
    return similar


def _fused(rankings: Sequence[list[_Ranked]], top_k: int) -> list[_Ranked]:
    if len(rankings) == 1:
        return rankings[0][:top_k]
    rows: dict[int, int] = {}
    for ranking in rankings:
        for hit in ranking:
            rows.setdefault(hit.key, hit.row)
    fused = fuse_rankings([[hit.key for hit in ranking] for ranking in rankings])
    return [_Ranked(rows[key], key, score) for key, score in fused[:top_k]]


def _check_model(location: IndexLocation, manifest: IndexManifest, model: Model | None) -> Model:
    """The model that an index was made with, loaded unless it is given."""
    if model is None and not manifest.model:
        raise InputError(
            f"the index {location} was made with a model in memory", "give it as model"
        )
    try:
        model = model or load(manifest.model)
    except (ManyheadsError, OSError) as error:
        raise InputError(
            f"the model of the index {location}, {manifest.model}, cannot be loaded "
            f"({str(error).rstrip('.')})",
            "put it back, or give its new place as model",
        ) from None
    if model_fingerprint(model) != manifest.model_fingerprint:
        raise InputError(
            f"the model is not the one that the index {location} was made with, "
            f"{manifest.model or 'a model in memory'}, or it was changed since",
            "give that model, or create the index again with this one",
        )
    return model


def _warn_if_truncated(report: IndexingReport) -> None:
    if report.truncated:
        warnings.warn(
            f"{report.truncated:,} of {report.chunks:,} chunks were truncated to what the model "
            "reads",
            TruncationWarning,
            stacklevel=3,
        )
