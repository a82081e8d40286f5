"""Killed writers, full disks, several processes; crash_points.py kills at every point."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyheads import load
from manyheads.errors import InputError
from manyheads.tasks import Index
from manyheads.tasks.search.storage import index_writer
from manyheads.tasks.search.storage.index_manifest import IndexLocation
from manyheads.tasks.search.storage.keyword_search import KeywordIndex
from tests.tasks.search.storage.crash_points import (
    GROWN,
    NEW,
    OLD,
    SETTINGS,
    check,
    editions,
    state_of,
    watch,
)

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_writer_loses_nothing_and_readers_never_see_half_a_change(tmp_path: Path) -> None:
    """After the first batch, and with the manifest written but not in place."""
    command = [
        sys.executable,
        "-m",
        "tests.tasks.search.storage.crash_points",
        str(tmp_path),
        "again",
    ]
    model = load("house-bert")
    Index.create(tmp_path / "again-before", model, OLD, **SETTINGS)
    with subprocess.Popen(
        [*command, "1", "14"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            killed = json.loads(process.stdout.readline())
            result = check(Path(killed["path"]), model, "again", killed["passed"])
            assert result["resumed"] == 2 * killed["passed"].count("after add") or (
                result["found"] == "new"
            )
        # The same process now adds documents while this one reads.
        assert watch(tmp_path / "growing", model)[-1] == GROWN
    assert process.returncode == 0


def test_a_full_disk_leaves_the_old_index_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = load("house-bert"), tmp_path / "index"
    monkeypatch.setattr(index_writer, "BATCH_DOCUMENTS", 2)
    Index.create(path, model, OLD, **SETTINGS)
    from lancedb.table import LanceTable

    add, calls = LanceTable.add, []

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("lance error: LanceError(IO): No space left on device (os error 28)")
        return add(self, *args, **kwargs)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name, broken in (
        (LanceTable, "add", full),
        (KeywordIndex, "save", fails),
        (IndexLocation, "commit", fails),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            with pytest.raises(OSError, match="No space left") as caught:
                Index.create(path, model, NEW, **SETTINGS)
            assert caught.value.errno == errno.ENOSPC
        assert state_of(path, model) == editions(OLD)
    finished = Index.create(path, model, NEW, **SETTINGS)
    assert finished.report is not None
    assert (finished.report.encoded, finished.report.resumed) == (0, 4)
    assert state_of(path, model) == editions(NEW)


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    index = Index.create(tmp_path / "index", None, ["some words"], kind="bm25", progress=False)
    with IndexLocation(tmp_path / "index").lock():
        with pytest.raises(InputError, match=r"another process.*wait"):
            index.add(["more words"], progress=False)
        with pytest.raises(InputError, match=r"another process.*wait"):
            Index.create(tmp_path / "index", None, ["other words"], kind="bm25", progress=False)
        assert len(Index.open(tmp_path / "index").search("words")) == 1
    index.add(["more words"], progress=False)
    assert len(index.search("words")) == 2
