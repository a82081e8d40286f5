"""Kill a process that writes an index at chosen points, and look at what is left.

Run alone it kills at every point:
python -m tests.tasks.search.storage.crash_points FOLDER [ACTION [POINT ...]]
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from manyheads import load
from manyheads.atomic_write import os as atomic_os
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.tasks.search.documents import Document
from manyheads.tasks.search.index import Index
from manyheads.tasks.search.storage import index_writer
from manyheads.tasks.search.storage.index_manifest import IndexLocation
from manyheads.tasks.search.storage.keyword_search import KeywordIndex
from manyheads.tasks.search.storage.vector_store import ChunkTable

WORDS = ("river", "mountain", "house", "tree", "cloud", "stone", "bridge", "garden")
# Documents of the index that grows while others read it.
GROWN = 8
# Two documents per batch, two chunks and more per document.
SETTINGS: dict[str, Any] = {"kind": "hybrid", "chunk_tokens": 24, "overlap": 4, "progress": False}


def document(number: int, edition: int = 1) -> Document:
    word = WORDS[number % len(WORDS)]
    text = " ".join(f"{word} number {number} of edition {edition}." for _ in range(6))
    return Document(f"d{number}", text, f"About a {word}", {"edition": edition})


OLD = [document(number) for number in range(6)]
# Two changed, two removed by `create`, two new.
NEW = [document(0), document(1), document(2, edition=2), document(3, edition=2)]
NEW += [document(6), document(7)]
ADDED = [*OLD[:2], *NEW[2:4], *OLD[4:], *NEW[4:]]

# What is there before, what is done, and the documents that there are then.
ACTIONS: dict[str, tuple[list[Document], Callable[[Path, Model], object], list[Document]]] = {
    "first": ([], lambda path, model: Index.create(path, model, OLD, **SETTINGS), OLD),
    "again": (OLD, lambda path, model: Index.create(path, model, NEW, **SETTINGS), NEW),
    "add": (OLD, lambda path, model: Index.open(path, model).add(NEW[2:], progress=False), ADDED),
}
STEPS: list[tuple[Any, str]] = [
    (ChunkTable, "add"),
    (ChunkTable, "delete"),
    (ChunkTable, "compact"),
    (KeywordIndex, "save"),
    (IndexLocation, "new_folder"),
    (IndexLocation, "commit"),
    (atomic_os, "fsync"),
    (IndexLocation, "remove_all_but"),
]


@contextmanager
def killed_at(point: int, log: Path) -> Iterator[None]:
    """Kill this process before step 0, after it, before step 1, and so on; log what it passed."""
    passed: list[str] = []

    def pass_by(name: str) -> None:
        passed.append(name)
        if len(passed) - 1 == point:
            log.write_text(json.dumps(passed), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            pass_by(f"before {name}")
            value = function(*args, **kwargs)
            pass_by(f"after {name}")
            return value

        return call

    originals = [(owner, name, getattr(owner, name)) for owner, name in STEPS]
    for owner, name, function in originals:
        setattr(owner, name, watched(name, function))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def act(path: Path, model: Model, action: str, point: int, log: Path) -> None:
    with killed_at(point, log):
        ACTIONS[action][1](path, model)


def state_of(path: Path, model: Model) -> dict[str, int] | None:
    """Each document with its edition if it is whole and found; None if there is no index."""
    try:
        index = Index.open(path, model)
    except InputError as error:
        if "never finished" in str(error) or "no index" in str(error):
            return None
        raise
    result = {}
    for each in index.ids:
        rows = index._state.table.take(index._state.names.rows[index._state.rows_of(each)])
        chunks = sorted(rows, key=lambda row: int(row["chunk_start"]))
        edition = json.loads(chunks[0]["metadata"])["edition"]
        original = document(int(each[1:]), edition)
        assert chunks[0]["chunk_start"] == 0
        assert all(later["chunk_start"] <= one["chunk_end"] for one, later in pairwise(chunks))
        assert chunks[-1]["chunk_end"] == len(original.text)
        for row in chunks:
            assert row["text"] == original.text[row["chunk_start"] : row["chunk_end"]]
        # Vectors and keywords belong to the same rows.
        hits = index.search(f"About a {WORDS[int(each[1:]) % len(WORDS)]} {each[1:]}", top_k=8)
        assert each in [hit.id for hit in hits[:2]]
        result[each] = edition
    assert len(index) == len(result)
    return result


def editions(documents: list[Document]) -> dict[str, int]:
    return {each.id: int(each.metadata["edition"]) for each in documents}


def check(path: Path, model: Model, action: str, passed: list[str]) -> dict[str, Any]:
    """The old or the new state, and then a second run that encodes only what is missing."""
    before, again, after = ACTIONS[action]
    old = editions(before) if before else None
    result = state_of(path, model)
    committed = "after commit" in passed
    assert result == (editions(after) if committed else old) or "after fsync" in passed
    index: Any = again(path, model)
    report = index if action == "add" else index.report
    stored = 2 * passed.count("after add")
    new = len(set(editions(after).items()) - set((old or {}).items()))
    assert report.encoded <= new - stored, (report, stored)
    assert state_of(path, model) == editions(after)
    return {"found": "old" if result == old else "new", "resumed": report.resumed}


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """The signal that ended a process, and what the work in it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), json.loads(content or "null")


def kill(folder: Path, model: Model, action: str, points: list[int]) -> Iterator[dict[str, Any]]:
    """Kill a writer at some points, or at all: where, and what it had passed by then.

    LanceDB lives in forked processes alone, because its threads do not survive a fork.
    """
    before, first = folder / f"{action}-before", ACTIONS[action][0]
    if first and not before.exists():
        forked(lambda: len(Index.create(before, model, first, **SETTINGS)))
    for point in points or range(1000):
        path, log = folder / f"{action}-{point}", folder / f"{action}-{point}.json"
        if before.exists():
            shutil.copytree(before, path)
        killed, _ = forked(lambda at=path, to=log, n=point: act(at, model, action, n, to))
        if not killed:
            return
        passed = json.loads(log.read_text(encoding="utf-8"))
        yield {"path": str(path), "action": action, "passed": passed}


def grow(path: Path, model: Model) -> int:
    """Add one document after the other."""
    index = Index.create(path, model, OLD[:1], **SETTINGS)
    for number in range(1, GROWN):
        index.add([document(number)], progress=False)
    return len(index)


def watch(path: Path, model: Model) -> list[int]:
    """Read while another process adds: each state holds the first documents, whole."""
    seen = [0]
    while seen[-1] < GROWN:
        time.sleep(0.3)
        result = state_of(path, model) or {}
        assert set(result) == {f"d{number}" for number in range(len(result))}
        assert len(result) >= seen[-1]
        seen += [len(result)] if len(result) > seen[-1] else []
    return seen


def run_all(folder: Path, model: Model) -> None:
    """Every point of every action, then two readers and a writer."""
    for action in ACTIONS:
        for killed in kill(folder, model, action, []):
            path, passed = Path(killed["path"]), killed["passed"]
            _, result = forked(lambda a=action, at=path, by=passed: check(at, model, a, by))
            print(json.dumps({"at": path.name, "step": passed[-1], **result}), flush=True)
    path = folder / "growing"
    readers = [os.fork() for _ in range(2)]
    if 0 in readers:
        print(json.dumps({"a reader saw": watch(path, model)}), flush=True)
        os._exit(0)
    print(json.dumps({"the writer added": forked(lambda: grow(path, model))[1]}), flush=True)
    assert [os.waitpid(reader, 0)[1] for reader in readers] == [0, 0]


if __name__ == "__main__":
    # Most of what LanceDB imports, once for all forks: none of it starts a thread.
    for module in ("lance_namespace", "pandas", "pyarrow.dataset"):
        import_module(module)
    # Threads of OpenMP do not survive a fork either.
    torch.set_num_threads(1)
    index_writer.BATCH_DOCUMENTS = 2
    where, house_bert = Path(sys.argv[1]), load("house-bert")
    if len(sys.argv) == 2:
        run_all(where, house_bert)
    else:
        for each in kill(where, house_bert, sys.argv[2], [int(point) for point in sys.argv[3:]]):
            print(json.dumps(each), flush=True)
        grow(where / "growing", house_bert)
