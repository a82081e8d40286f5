"""Writing an index: encode what is new, stage it, and commit it by the manifest."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from manyheads.encoding.encode import Options, encode_with_counts
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import InputError
from manyheads.formatting import listed, pluralise
from manyheads.models.build import Model
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tasks.search.chunking import Chunker
from manyheads.tasks.search.documents import Document, Documents, read_documents
from manyheads.tasks.search.residual_codes import ResidualCodec, train_codec
from manyheads.tasks.search.storage import index_manifest, vector_store
from manyheads.tasks.search.storage.keyword_search import KeywordIndex
from manyheads.tasks.search.storage.vector_store import ChunkRow, ChunkTable

# Documents that are encoded and stored together: a killed run loses at most these.
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, {"cpu": 2**17, "cuda": 2**21}
# Tokens that are encoded together; on the CPU most of the memory is theirs.
BATCH_TOKENS = {"cpu": 2048, "cuda": None}

# As many train the codec of 2-bit vectors.
TRAINING_DOCUMENTS, TRAINING_CHARACTERS = 8192, 2**20
CODEC_FILE = "codec.safetensors"
# Names of skipped files per reason that a report lists.
NAMED = 3


@dataclass(slots=True)
class IndexingReport:
    """What a run did: documents read, encoded, unchanged and removed; chunks and tokens encoded.

    `resumed` documents had been encoded by a run that was interrupted. `truncated` chunks were
    longer than the model reads. `skipped` are pairs of a name and a reason.
    """

    documents: int = 0
    encoded: int = 0
    unchanged: int = 0
    resumed: int = 0
    removed: int = 0
    chunks: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        """As in: 12 documents, 31 chunks, 5,280 tokens encoded in 1.2 s (4,400 tokens/s)"""
        work = [pluralise(self.encoded, "document"), pluralise(self.chunks, "chunk")]
        speed = ""
        if self.tokens:
            work.append(pluralise(self.tokens, "token"))
            speed = f" ({self.tokens / self.seconds:,.0f} tokens/s)"
        return f"{', '.join(work)} encoded in {self.seconds:.1f} s{speed}"

    def details(self) -> list[str]:
        """What was not encoded, one line for each reason."""
        counts = (
            (self.unchanged, "unchanged"),
            (self.resumed, "already encoded by a run before this one"),
            (self.removed, "removed"),
        )
        lines = [", ".join(f"{count:,} {what}" for count, what in counts if count)]
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.skipped:
            reasons[reason].append(name)
        for reason, names in reasons.items():
            lines.append(f"skipped {len(names):,} ({reason}): {listed(names, NAMED)}")
        return [line for line in lines if line]


class IndexWriter:
    """One change of an index, which is complete or did not happen. The lock must be held."""

    def __init__(
        self,
        location: index_manifest.IndexLocation,
        plan: index_manifest.IndexManifest,
        model: Model | None,
    ) -> None:
        self.location = location
        self.plan = plan
        self.model = model
        self.report = IndexingReport()
        self._old = location.manifest()
        self._table = ChunkTable.open_or_create(location.address, plan)
        # Rows that earlier runs wrote, those of interrupted ones included.
        self._staged = self._table.fingerprints()
        self._codec: ResidualCodec | None = None
        if plan.vectors == "2bit":
            self._codec = read_codec(location, codes_name(plan))
            if self._codec is None and self._staged:
                # An interrupted clean-up left rows that nobody can decode.
                self._table.delete(list(self._staged))
                self._staged = {}
        self._committed: dict[str, str] = {}
        if self._old is not None and self._old.table == plan.table_name:
            same = self._old.version == self._table.version
            table = self._table if same else ChunkTable.pinned(location.address, self._old)
            self._committed = dict(self._staged) if same else table.fingerprints()

    def write(
        self,
        documents: Documents,
        *,
        keep_others: bool,
        remove: Iterable[str] = (),
        progress: bool = True,
    ) -> index_manifest.IndexManifest:
        """Add or replace documents, remove some, and commit; `keep_others` keeps the rest."""
        started = time.perf_counter()
        keys_by_id = {name: key for key, name in self._committed.items()} if keep_others else {}
        for name in remove:
            del keys_by_id[name]
        new_keys: dict[str, str] = {}
        with Progress(
            "indexing", total=_count(documents), unit="documents", enabled=progress
        ) as bar:
            for batch in self._new_documents(documents, new_keys, bar):
                self._add(batch)
                bar.advance(len(batch))
            keys_by_id |= new_keys
            if not keys_by_id and not keep_others:
                raise InputError("there are no documents to index", "give at least one with text")
            manifest = self._commit(keys_by_id)
        self.report.seconds = time.perf_counter() - started
        return manifest

    def _new_documents(
        self, documents: Documents, new_keys: dict[str, str], bar: Progress
    ) -> Iterator[list[Document]]:
        """Documents that are not stored yet, some at a time."""
        batch: list[Document] = []
        characters = 0
        most = BATCH_CHARACTERS[self._device]
        largest = BATCH_DOCUMENTS
        if self.plan.vectors == "2bit" and self._codec is None:
            # The codec is trained on the first batch.
            most, largest = max(most, TRAINING_CHARACTERS), TRAINING_DOCUMENTS
        for document in read_documents(documents, on_skip=self._skip):
            key = document.fingerprint
            if document.id in new_keys:
                if new_keys[document.id] != key:
                    raise InputError(
                        f"two documents have the id {document.id!r}", "give each an id of its own"
                    )
                self._skip(document.id, "duplicate")
                continue
            new_keys[document.id] = key
            self.report.documents += 1
            if key in self._staged:
                self.report.unchanged += key in self._committed
                self.report.resumed += key not in self._committed
                bar.advance()
                continue
            batch.append(document)
            characters += len(document.text)
            if len(batch) >= largest or characters >= most:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    @property
    def _device(self) -> str:
        """The kind of device that the tables above know: "cpu", or "cuda" for all others."""
        home = "cpu" if self.model is None else next(self.model.parameters()).device.type
        return "cpu" if home == "cpu" else "cuda"

    def _skip(self, name: str, reason: str) -> None:
        self.report.skipped.append((name, reason))

    def _add(self, documents: Sequence[Document]) -> None:
        """Split, encode and store whole documents in one step."""
        keys = [document.fingerprint for document in documents]
        chunker = Chunker(self.plan.settings, self.model, late=self.plan.row_vectors == "late")
        rows = [
            ChunkRow(document, chunk, key)
            for document, key, chunks in zip(documents, keys, chunker.split(documents), strict=True)
            for chunk in chunks
        ]
        self._table.add(rows, self._encode([row.chunk.encoded for row in rows]))
        self._staged |= {key: document.id for key, document in zip(keys, documents, strict=True)}
        self.report.encoded += len(documents)
        self.report.chunks += len(rows)

    def _encode(self, texts: Sequence[str]) -> Tensor | Ragged | None:
        if self.plan.row_vectors == "none":
            return None
        assert self.model is not None
        if self.plan.row_vectors == "dense":
            batch_tokens = BATCH_TOKENS[self._device]
            options = Options(normalize=True, batch_tokens=batch_tokens, progress=False)
            done = encode_with_counts(self.model, texts, options)
            self.report.tokens += done.tokens
            self.report.truncated += done.truncated
            return done.vectors
        vectors = encode_tokens(self.model, texts, progress=False)
        self.report.tokens += vectors.lengths.total
        return vectors if self.plan.vectors != "2bit" else vectors.map(self._coded)

    def _coded(self, vectors: Tensor) -> Tensor:
        """Codes of vectors, by a codec that is stored before anything that it encodes."""
        if self._codec is None:
            self._codec = train_codec(vectors, progress=False)
            with self.location.new_folder(codes_name(self.plan)) as folder:
                self._codec.save(folder / CODEC_FILE)
        return self._codec.encode(vectors)

    def _commit(self, keys_by_id: dict[str, str]) -> index_manifest.IndexManifest:
        keys = set(keys_by_id.values())
        stale = [key for key in self._staged if key not in keys]
        committed = set(self._committed)
        self.report.removed = len(
            {self._committed[key] for key in committed - keys} - keys_by_id.keys()
        )
        if stale:
            self._table.delete(stale)
        old, plan = self._old, self.plan
        before = None if old is None else (old.kind, old.table, old.model)
        same = before == (plan.kind, plan.table_name, plan.model)
        if old is not None and same and committed == keys and not stale:
            return old
        compacted = self._table.compact()
        vectors = self._table.count_vectors()
        approximate = vectors > vector_store.EXACT_VECTORS and self.plan.vectors != "2bit"
        if approximate:
            self._table.build_vector_index()
        manifest = replace(
            self.plan,
            table=self.plan.table_name,
            version=self._table.version,
            approximate=approximate,
            documents=len(keys_by_id),
            chunks=self._table.count_rows(),
            vector_count=vectors,
            codes=codes_name(self.plan) if self._codec is not None else "",
        )
        if manifest.kind in ("bm25", "hybrid"):
            stamp = plan.table_name.removeprefix(index_manifest.TABLE)
            name = f"{index_manifest.KEYWORDS}{stamp}-{manifest.version}"
            if name not in self.location.names():
                words = KeywordIndex.of(self._table.searched_texts(), code=plan.settings.code)
                with self.location.new_folder(name) as folder:
                    words.save(folder)
            manifest = replace(manifest, keywords=name)
        manifest = manifest.with_before(old)
        self.location.commit(manifest)
        if compacted:
            self._table.remove_old_versions()
        self.location.remove_all_but(manifest)
        return manifest


def _count(documents: Documents) -> int | None:
    """How many documents there are, if that is known before they are read."""
    if not isinstance(documents, Sequence) or isinstance(documents, str):
        return None
    return None if any(isinstance(document, Path) for document in documents) else len(documents)


def codes_name(plan: index_manifest.IndexManifest) -> str:
    """The folder of the codec of a table."""
    return index_manifest.CODES + plan.table_name.removeprefix(index_manifest.TABLE)


def read_codec(location: index_manifest.IndexLocation, name: str) -> ResidualCodec | None:
    """The codec of a table, None if it was not trained yet."""
    if name not in location.names():
        return None
    with location.local_folder(name) as folder:
        return ResidualCodec.load(folder / CODEC_FILE)
