"""What every test gets."""

import math
import sys
from itertools import count
from pathlib import Path

import pytest

NUMBERS = count()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tests out of the user's cache, and of each other's."""
    folder = tmp_path_factory.getbasetemp() / "cache" / str(next(NUMBERS))
    monkeypatch.setenv("MANYHEADS_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_notes_of_slow_work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a command silent that takes seconds here: a slow machine must not change what it says.

    The tests of the progress bar itself keep its times.
    """
    progress = sys.modules.get("manyheads.progress")
    if progress is not None and not request.module.__name__.endswith("test_progress"):
        monkeypatch.setattr(progress, "QUIET_SECONDS", math.inf)
        monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", math.inf)
