"""Time indexing and search beside other libraries, with real MiniLM: `python bench/search.py`.

The texts are docstrings and comments of Python's own library. sentence-transformers encodes with
its defaults; faiss searches its vectors exactly, in memory, and LanceDB exactly on disk. All find
the same documents before anything is timed, or the run ends. Entrants take turns on parts of the
texts, in one process.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from corpus import passages, prose
from encode_peers import SentenceTransformers, minilm
from side_by_side import alone, count, peak_extra, say, show

from manyheads.checkpoints.folder import load
from manyheads.tasks.search.documents import Document
from manyheads.tasks.search.index import Index

__all__ = ["main"]

OURS, FAISS, LANCE = "manyheads", "s-transformers + faiss", "s-transformers + LanceDB"
# Short enough for one chunk, and for MiniLM.
TOKENS = range(5, 241)
QUERIES = 100
TOP_K = 10
# Vectors agree to about 1e-6, so that documents this close may change places.
TIE = 1e-5
GOAL = 1.3

Found = list[tuple[str, float]]


class Entrant(Protocol):
    """A library that adds texts to an index and searches it."""

    def add(self, start: int, texts: Sequence[str]) -> None: ...

    def search(self, query: str) -> Found: ...


class Manyheads:
    """`Index.create` and `Index.add`, with everything that makes them durable."""

    def __init__(self, folder: Path) -> None:
        self.model = load(minilm())
        self.folder = folder / "manyheads"
        self.index: Index | None = None

    def add(self, start: int, texts: Sequence[str]) -> None:
        documents = [Document(str(number), text) for number, text in enumerate(texts, start)]
        if self.index is None:
            self.index = Index.create(self.folder, self.model, documents, progress=False)
        else:
            self.index.add(documents, progress=False)

    def search(self, query: str) -> Found:
        assert self.index is not None
        return [(hit.id, hit.score) for hit in self.index.search(query, top_k=TOP_K)]


class Faiss:
    """A flat index of inner products, written to disk after every part."""

    def __init__(self, folder: Path) -> None:
        self.faiss: Any = import_module("faiss")
        self.faiss.omp_set_num_threads(torch.get_num_threads())
        self.encoder = SentenceTransformers()
        self.index = self.faiss.IndexFlatIP(384)
        self.file = folder / "faiss"

    def add(self, start: int, texts: Sequence[str]) -> None:
        assert start == self.index.ntotal
        self.index.add(self.encoder.encode(list(texts)).numpy())
        self.faiss.write_index(self.index, str(self.file))

    def search(self, query: str) -> Found:
        scores, rows = self.index.search(self.encoder.encode([query]).numpy(), TOP_K)
        return [(str(row), float(score)) for row, score in zip(rows[0], scores[0], strict=True)]


class Lance:
    """A table of texts and vectors, searched without an index of its own."""

    def __init__(self, folder: Path) -> None:
        lancedb: Any = import_module("lancedb")
        self.database = lancedb.connect(str(folder / "lance"))
        self.encoder = SentenceTransformers()
        self.table: Any = None

    def add(self, start: int, texts: Sequence[str]) -> None:
        vectors = self.encoder.encode(list(texts)).numpy()
        rows = [
            {"id": str(number), "text": text, "vector": vector}
            for number, (text, vector) in enumerate(zip(texts, vectors, strict=True), start)
        ]
        if self.table is None:
            self.table = self.database.create_table("texts", rows)
        else:
            self.table.add(rows)

    def search(self, query: str) -> Found:
        [vector] = self.encoder.encode([query]).numpy()
        rows = self.table.search(vector).distance_type("dot").limit(TOP_K).to_list()
        return [(row["id"], 1 - row["_distance"]) for row in rows]


ENTRANTS: dict[str, Callable[[Path], Entrant]] = {OURS: Manyheads, FAISS: Faiss, LANCE: Lance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=10_000, help="how many texts are indexed")
    parser.add_argument("--parts", type=int, default=10, help="in how many turns")
    parser.add_argument("--memory-texts", type=int, default=2_000, help="texts for the memory")
    arguments = parser.parse_args()
    texts, queries = _texts(arguments.texts)
    say(
        f"{len(texts):,} docstrings and comments of Python's library, real MiniLM-L6, float32, "
        f"{torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as place:
        entrants = {name: make(Path(place)) for name, make in ENTRANTS.items()}
        indexing = _index(entrants, texts, arguments.parts)
        _check(entrants, queries)
        searching = _search(entrants, queries)
    memory = {name: alone(_memory, name, texts[: arguments.memory_texts]) for name in ENTRANTS}
    _report(indexing, searching, memory, len(texts), arguments.memory_texts)


def _texts(wanted: int) -> tuple[list[str], list[str]]:
    tokenizer: Any = load(minilm()).tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    result = prose()
    lengths = [len(one.ids) for one in tokenizer.encode_batch_fast(result)]
    chosen = passages(wanted + QUERIES, lengths, result, TOKENS)
    return chosen[QUERIES:], [" ".join(text.split()[:12]) for text in chosen[:QUERIES]]


class Timer:
    """Seconds by the clock, and of all cores together, per call."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cores: list[float] = []

    def run(self, work: Callable[[], Any]) -> None:
        wall, cores = time.perf_counter(), time.process_time()
        work()
        self.wall.append(time.perf_counter() - wall)
        self.cores.append(time.process_time() - cores)


def _index(entrants: dict[str, Entrant], texts: list[str], parts: int) -> dict[str, Timer]:
    timers = {name: Timer() for name in entrants}
    size = -(-len(texts) // parts)
    for start in range(0, len(texts), size):
        for name, entrant in entrants.items():
            timers[name].run(partial(entrant.add, start, texts[start : start + size]))
    return timers


def _check(entrants: dict[str, Entrant], queries: list[str]) -> None:
    """Everyone finds what faiss finds, up to documents of equal scores."""
    for query in queries:
        expected = dict(entrants[FAISS].search(query))
        worst = min(expected.values())
        for name, entrant in entrants.items():
            result = dict(entrant.search(query))
            for document in result.keys() ^ expected.keys():
                score = result.get(document, expected.get(document, 0.0))
                if abs(score - worst) > TIE:
                    raise SystemExit(f"{name} and {FAISS} disagree about {query!r}")
            for document in result.keys() & expected.keys():
                if abs(result[document] - expected[document]) > TIE:
                    raise SystemExit(f"{name} scores {document} differently for {query!r}")


def _search(entrants: dict[str, Entrant], queries: list[str]) -> dict[str, Timer]:
    timers = {name: Timer() for name in entrants}
    for query in queries:
        for name, entrant in entrants.items():
            timers[name].run(partial(entrant.search, query))
    return timers


def _memory(name: str, texts: list[str]) -> int:
    """Bytes at the peak of indexing some texts, in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    try:
        entrant = ENTRANTS[name](folder)
        entrant.add(0, texts[:64])

        def work() -> torch.Tensor:
            entrant.add(64, texts[64:])
            return torch.zeros(0)

        return peak_extra(work, "cpu")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(
    indexing: dict[str, Timer],
    searching: dict[str, Timer],
    memory: dict[str, int],
    texts: int,
    memory_texts: int,
) -> None:
    rows = []
    for name in ENTRANTS:
        wall, cores = sum(indexing[name].wall), sum(indexing[name].cores)
        rows.append(
            [
                name,
                f"{wall:.1f} s",
                f"{texts / wall:,.0f}",
                f"{wall / sum(indexing[OURS].wall):.2f}",
                f"{cores:.1f} s",
                f"{cores / sum(indexing[OURS].cores):.2f}",
                count(median(searching[name].wall), "s"),
                count(median(searching[name].cores), "s"),
                count(memory[name], "B"),
            ]
        )
    columns = (
        *("", "indexing", "texts/s", "times ours", "cores", "times ours", "a query", "cores"),
        f"memory, {memory_texts:,} texts",
    )
    show("wall: by the clock; cores: time of all cores together", columns, rows)
    for name in (FAISS, LANCE):
        by_wall = median(
            peer / ours for peer, ours in zip(indexing[name].wall, indexing[OURS].wall, strict=True)
        )
        by_cores = median(
            peer / ours
            for peer, ours in zip(indexing[name].cores, indexing[OURS].cores, strict=True)
        )
        verdict = "reached" if by_cores >= GOAL else "missed"
        say(
            f"indexing against {name}, median over parts: {by_wall:.2f} by wall, {by_cores:.2f} by "
            f"cores (goal {GOAL} by cores: {verdict})"
        )


if __name__ == "__main__":
    main()
