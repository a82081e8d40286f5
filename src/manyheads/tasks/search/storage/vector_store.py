"""Rows of chunks with their vectors in a table of LanceDB."""

import errno
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError, ManyheadsError, import_package, short_repr
from manyheads.ragged import Lengths, Ragged
from manyheads.tasks.search.chunking import Chunk
from manyheads.tasks.search.documents import Document
from manyheads.tasks.search.storage.index_manifest import IndexManifest

# Rows whose texts are fetched, and fingerprints that a condition names, at a time.
AT_A_TIME = 500
# A table of more parts than this is compacted.
PARTS = 32
# How long versions stay for readers that opened them before they were replaced.
KEEP_VERSIONS = timedelta(days=1)
# Up to this many vectors a search computes all products; beyond, LanceDB's index proposes rows.
EXACT_VECTORS = 1_000_000
# Rows that the index proposes per document to be found, and at least; all are scored exactly.
PROPOSED, MIN_PROPOSED = 16, 512
# The index is made again when a larger fraction of the rows is not in it.
UNINDEXED = 0.1
CPU_FLAG, CPU_INFO = "avx2", Path("/proc/cpuinfo")

VECTOR = "vector"
# Columns of every table; metadata of the same name is stored with a prefix.
OWN_COLUMNS = (
    *("document", "chunk", "title", "text", "source", "metadata", "fingerprint"),
    *("chunk_start", "chunk_end", VECTOR),
)
METADATA_PREFIX = "metadata_"
# Errors of the system that say that files are not as they were.
DAMAGE = (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# What a hit shows besides the names of its document and chunk.
HIT_COLUMNS = ("title", "text", "source", "metadata", "chunk_start", "chunk_end")
# Up to this many bytes of them in the files are held in memory, after the first search.
HELD_BYTES = 2**24

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRow:
    """A chunk with its document and, if there are vectors, those of the chunk."""

    document: Document
    chunk: Chunk
    fingerprint: str


@dataclass(frozen=True, slots=True, eq=False)
class RowNames:
    """The document and the chunk of each row of a table, by the row's id."""

    rows: Int[np.ndarray, " n"]
    document: Int[np.ndarray, " n"]
    chunk: Int[np.ndarray, " n"]
    documents: list[str]

    def __len__(self) -> int:
        return len(self.rows)


def require_lancedb() -> Any:
    """The package, unless it is missing or would crash on this processor."""
    if platform.machine() in ("x86_64", "AMD64") and CPU_INFO.is_file():
        flags = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
        if flags and CPU_FLAG not in flags[1].split():
            raise InputError(
                "LanceDB, which stores an index, needs a processor with AVX2, which this one lacks",
                "use another machine, such as any x86 one since 2015 or an ARM one",
            )
    import_package("pyarrow", "a search index", "'manyheads[search]'")
    return import_package("lancedb", "a search index", "'manyheads[search]'")


@contextmanager
def damage_named(where: str) -> Iterator[None]:
    """What LanceDB and Arrow raise for damaged files, as an error that names the index."""
    try:
        yield
    except ManyheadsError:
        raise
    except Exception as error:
        # A panic of Rust is of no class that could be named here.
        if isinstance(error, OSError) and error.errno not in (None, *DAMAGE):
            raise
        raise InputError(
            f"the index {where} is damaged ({' '.join(str(error).split())[:300]})",
            "create it again in a new folder",
        ) from error


def _names_damage(method: Method) -> Method:
    @wraps(method)
    def call(self: "ChunkTable", *args: Any, **kwargs: Any) -> Any:
        with damage_named(self._address):
            return method(self, *args, **kwargs)

    return cast(Method, call)


class ChunkTable:
    """A table of LanceDB at one address, at its latest version or pinned to one."""

    def __init__(self, address: str, table: Any, manifest: IndexManifest) -> None:
        self._address = address
        self._table = table
        self._manifest = manifest

    @classmethod
    def open_or_create(cls, address: str, manifest: IndexManifest) -> "ChunkTable":
        """The latest version of the table that a manifest's settings name."""
        name = manifest.table_name
        database = require_lancedb().connect(address)
        with damage_named(address), full_disk_named(address):
            if name in database.list_tables(limit=10000).tables:
                return cls(address, database.open_table(name), manifest)
            return cls(address, database.create_table(name, schema=_schema(manifest)), manifest)

    @classmethod
    def pinned(cls, address: str, manifest: IndexManifest) -> "ChunkTable":
        """The version that a manifest names, whatever was written since."""
        lancedb = require_lancedb()
        with damage_named(address):
            table = lancedb.connect(address).open_table(manifest.table)
            table.checkout(manifest.version)
        return cls(address, table, manifest)

    @property
    def version(self) -> int:
        return int(self._table.version)

    @_names_damage
    def fingerprints(self) -> dict[str, str]:
        """The id of the document of each fingerprint that has rows."""
        table = self._table.search().select(["fingerprint", "document"]).to_arrow()
        pairs = zip(table["fingerprint"].to_pylist(), table["document"].to_pylist(), strict=True)
        return dict(pairs)

    @_names_damage
    def add(self, rows: Sequence[ChunkRow], vectors: Tensor | Ragged | None) -> None:
        """Add whole documents, in one step."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            "document": [row.document.id for row in rows],
            "chunk": [row.chunk.number for row in rows],
            "title": [row.chunk.title for row in rows],
            "text": [row.chunk.text for row in rows],
            "source": [row.document.source for row in rows],
            "metadata": [json.dumps(dict(row.document.metadata)) for row in rows],
            "fingerprint": [row.fingerprint for row in rows],
            "chunk_start": [row.chunk.start for row in rows],
            "chunk_end": [row.chunk.end for row in rows],
        }
        columns |= self._metadata(rows)
        if vectors is not None:
            columns[VECTOR] = _as_arrow(vectors, self._manifest)
        schema = self._table.schema
        arrays = [
            pa.array(columns.get(column.name, [None] * len(rows)), column.type) for column in schema
        ]
        with full_disk_named(self._address):
            self._table.add(pa.table(arrays, schema=schema))

    def _metadata(self, rows: Sequence[ChunkRow]) -> dict[str, list[Any]]:
        """A column for each key of the metadata, which the table gets if it lacks it."""
        columns: dict[str, list[Any]] = {}
        for number, row in enumerate(rows):
            for key, value in row.document.metadata.items():
                column = columns.setdefault(metadata_column(key), [None] * len(rows))
                numeric = isinstance(value, int | float) and not isinstance(value, bool)
                column[number] = float(value) if numeric else value
        kinds = {str: "string", float: "double", bool: "bool"}
        types = {column.name: str(column.type) for column in self._table.schema}
        fresh = {}
        for name, column in columns.items():
            for row, value in zip(rows, column, strict=True):
                if value is None:
                    continue
                kind = kinds[type(value)]
                if types.setdefault(name, kind) != kind:
                    raise InputError(
                        f"metadata {name!r} of document {row.document.id!r} is "
                        f"{short_repr(value)}, and other documents have a {types[name]} there",
                        "use the same type in all documents",
                    )
                if name not in self._table.schema.names:
                    # SQL has another name for one of the types of Arrow.
                    fresh[name] = f"cast(NULL as {'boolean' if kind == 'bool' else kind})"
        if fresh:
            self._table.add_columns(fresh)
        return columns

    @_names_damage
    def delete(self, fingerprints: Sequence[str]) -> None:
        """Remove all rows of some documents."""
        for start in range(0, len(fingerprints), AT_A_TIME):
            batch = ", ".join(map(_quoted, fingerprints[start : start + AT_A_TIME]))
            with full_disk_named(self._address):
                self._table.delete(f"fingerprint IN ({batch})")

    @_names_damage
    def compact(self) -> bool:
        """Join the parts of the table if there are many; no version is removed."""
        if self._table.stats()["fragment_stats"]["num_fragments"] <= PARTS:
            return False
        with full_disk_named(self._address):
            self._table.optimize(cleanup_older_than=timedelta(days=36500))
        return True

    def remove_old_versions(self) -> None:
        """Remove versions that no reader needs, right after the latest was committed."""
        self._table.optimize(cleanup_older_than=KEEP_VERSIONS)

    @_names_damage
    def names(self) -> RowNames:
        """All rows, in the order of their ids."""
        query = self._table.search().select(["document", "chunk"]).with_row_id(True)
        table = query.to_arrow().sort_by("_rowid").combine_chunks()
        if table["document"].null_count or table["chunk"].null_count:
            raise ValueError("a row has no document")
        coded = table["document"].combine_chunks().dictionary_encode()
        return RowNames(
            table["_rowid"].to_numpy().astype(np.int64),
            coded.indices.to_numpy(),
            table["chunk"].to_numpy(),
            coded.dictionary.to_pylist(),
        )

    @_names_damage
    def searched_texts(self) -> list[str]:
        """Title and text of each row, in the order of `names`."""
        query = self._table.search().select(["title", "text"]).with_row_id(True)
        table = query.to_arrow().sort_by("_rowid")
        pairs = zip(table["title"].to_pylist(), table["text"].to_pylist(), strict=True)
        return [f"{title}\n{text}" if title else text for title, text in pairs]

    @_names_damage
    def vectors(self) -> Float[Tensor, "n c"] | Ragged:
        """The vectors of each row, or their codes, in the order of `names`."""
        table = self._table.search().select([VECTOR]).with_row_id(True).to_arrow()
        column = table.sort_by("_rowid")[VECTOR].combine_chunks()
        return _from_arrow(column, self._manifest)

    def build_vector_index(self) -> None:
        """Let LanceDB group the vectors, so that a search reads only some of them.

        Rows that were added since are all read, until they are many.
        """
        from lancedb.index import IvfFlat

        indexed = [entry for entry in self._table.list_indices() if VECTOR in entry.columns]
        if indexed and indexed[0].num_unindexed_rows <= UNINDEXED * self.count_rows():
            return
        with full_disk_named(self._address):
            self._table.create_index(VECTOR, config=IvfFlat(distance_type="cosine"))

    @_names_damage
    def nearest(
        self, query: Float[Tensor, "*q c"], depth: int, where: str | None
    ) -> Int[np.ndarray, " m"]:
        """The ids of rows that are likely among the best `depth` documents."""
        search = self._table.search(query.float().numpy(), vector_column_name=VECTOR)
        search = search.limit(max(MIN_PROPOSED, PROPOSED * depth)).with_row_id(True)
        if where is not None:
            search = search.where(where, prefilter=True)
        rows: np.ndarray = search.select(["chunk", "_distance"]).to_arrow()["_rowid"].to_numpy()
        return np.unique(rows.astype(np.int64))

    @_names_damage
    def vectors_of(self, rows: Int[np.ndarray, " m"]) -> Float[Tensor, "m c"] | Ragged:
        """The vectors of some rows, or their codes; ids must ascend."""
        table = self._table.take_row_ids(rows.tolist()).select([VECTOR]).with_row_id().to_arrow()
        return _from_arrow(table.sort_by("_rowid")[VECTOR].combine_chunks(), self._manifest)

    @_names_damage
    def count_rows(self) -> int:
        return int(self._table.count_rows())

    @_names_damage
    def count_vectors(self) -> int:
        """How many vectors all rows have together."""
        if self._manifest.row_vectors != "late":
            return self.count_rows() if self._manifest.row_vectors == "dense" else 0
        table = self._table.search().select({"vectors": f"array_length({VECTOR})"}).to_arrow()
        return int(np.sum(table["vectors"].to_numpy()))

    @_names_damage
    def take(self, rows: Int[np.ndarray, " m"]) -> list[dict[str, Any]]:
        """What a hit shows of each of some rows, in their order."""
        hits: dict[int, dict[str, Any]] = {}
        for start in range(0, len(rows), AT_A_TIME):
            batch = self._table.take_row_ids(rows[start : start + AT_A_TIME].tolist())
            batch_rows = batch.select(list(HIT_COLUMNS)).with_row_id().to_list()
            hits |= {row["_rowid"]: row for row in batch_rows}
        return [hits[row] for row in rows.tolist()]

    @_names_damage
    def held_rows(self) -> Any:
        """What a hit shows of all rows, in the order of `names`, or None if it is large.

        It is a table of Arrow, which gives some rows much faster than LanceDB does.
        """
        manifest = self._manifest
        number = {"float32": 4, "float16": 2, "2bit": 1}[manifest.vectors]
        vectors = manifest.vector_count * manifest.row_width * number
        if int(self._table.stats()["total_bytes"]) - vectors > HELD_BYTES:
            return None
        table = self._table.search().select(list(HIT_COLUMNS)).with_row_id(True).to_arrow()
        return table.sort_by("_rowid").drop_columns("_rowid").combine_chunks()

    def matching(self, condition: str) -> Int[np.ndarray, " m"]:
        """The ids of the rows that a condition holds for."""
        query = self._table.search().where(condition).select(["chunk"]).with_row_id(True)
        try:
            row_ids: np.ndarray = query.to_arrow()["_rowid"].to_numpy()
        except (ValueError, RuntimeError) as error:
            reason = re.split(r"\n|\. Valid fields", str(error))[0][:300]
            raise InputError(
                f"where={condition!r} is not a condition over the metadata ({reason})",
                f"use SQL such as \"year > 2020 AND author = 'Ada'\" over {self._filterable()}",
            ) from None
        return row_ids.astype(np.int64)

    def condition(self, where: str | Mapping[str, Any]) -> str:
        """SQL, or equality or membership in a list for each key."""
        if isinstance(where, str):
            return where
        if not isinstance(where, Mapping):
            raise InputError(
                f"where must be SQL or a mapping, got {short_repr(where)}",
                "use for example {'author': 'Ada'}",
            )
        columns = self._table.schema.names
        parts = []
        for key, value in where.items():
            name = key if key in ("document", "title", "source") else metadata_column(str(key))
            if name not in columns:
                raise InputError(
                    f"where has {key!r}, which no document has", f"use {self._filterable()}"
                )
            values = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
            parts.append(f"`{name}` IN ({', '.join(map(_literal, values))})" if values else "false")
        return " AND ".join(parts) or "true"

    def _filterable(self) -> str:
        own = set(OWN_COLUMNS) - {"document", "title", "source"}
        return ", ".join(name for name in self._table.schema.names if name not in own)


def metadata_column(key: str) -> str:
    """The column of a key of the metadata.

    >>> metadata_column("year"), metadata_column("text"), metadata_column("due date")
    ('year', 'metadata_text', 'due_date')
    """
    name = re.sub(r"\W", "_", key, flags=re.ASCII)
    plain = name and not name[0].isdigit() and not name.startswith("_")
    return name if plain and name not in OWN_COLUMNS else f"{METADATA_PREFIX}{name}"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(float(value))
    if isinstance(value, str):
        return _quoted(value)
    raise InputError(
        f"where has the value {short_repr(value)}", "use strings, numbers, True or False"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _schema(manifest: IndexManifest) -> Any:
    import pyarrow as pa

    columns: list[Any] = [
        *((name, pa.string()) for name in ("document", "title", "text", "source", "metadata")),
        ("fingerprint", pa.string()),
        *((name, pa.int64()) for name in ("chunk", "chunk_start", "chunk_end")),
    ]
    number = {"float32": pa.float32(), "float16": pa.float16(), "2bit": pa.uint8()}
    vector = pa.list_(number[manifest.vectors], manifest.row_width)
    if manifest.row_vectors != "none":
        columns.append((VECTOR, pa.list_(vector) if manifest.row_vectors == "late" else vector))
    return pa.schema(columns)


def _as_arrow(vectors: Tensor | Ragged, manifest: IndexManifest) -> Any:
    import pyarrow as pa

    values = vectors.values if isinstance(vectors, Ragged) else vectors
    dtype = {"float32": torch.float32, "float16": torch.float16, "2bit": torch.uint8}
    flat = values.detach().to("cpu", dtype[manifest.vectors]).contiguous().view(-1).numpy()
    column = pa.FixedSizeListArray.from_arrays(pa.array(flat), manifest.row_width)
    if not isinstance(vectors, Ragged):
        return column
    return pa.ListArray.from_arrays(pa.array(vectors.lengths.offsets.cpu().numpy()), column)


def _from_arrow(column: Any, manifest: IndexManifest) -> Tensor | Ragged:
    late = manifest.row_vectors == "late"
    # `values` of a slice would begin before it.
    flat = column.flatten().flatten() if late else column.flatten()
    values = torch.from_numpy(np.array(flat.to_numpy(zero_copy_only=False)))
    values = values.view(-1, manifest.row_width)
    if not late:
        return values
    return Ragged(values, Lengths.of(np.diff(column.offsets.to_numpy()).tolist()))


@contextmanager
def full_disk_named(where: str) -> Iterator[None]:
    """Errors of the operating system as such: LanceDB hides them in texts."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        match = re.search(r"os error (\d+)", str(error))
        if isinstance(error, InputError) or match is None:
            raise
        number = int(match[1])
        reason = os.strerror(number)
        if number == errno.ENOSPC:
            reason += "; the index is as it was, and continues when there is room"
        raise OSError(number, reason, where) from error
