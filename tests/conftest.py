"""What every test gets."""

import math
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import close_browser, opens_pages

NUMBERS = count()
# What kinds have measured of small models, which are not stored in the cache: by model and inputs.
MEASURED: dict[tuple[str, str, str], Any] = {}
SMALL = "small "


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


@pytest.fixture(autouse=True)
def kinds_are_measured_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the kinds of a small model again to a later test, as the cache does for a large one.

    A page or a report of a model of a hundred kilobytes takes seconds only for its kinds. The tests
    of kinds themselves measure.
    """
    kinds = sys.modules.get("manyheads.lens.head_kinds.kinds")
    if kinds is None or "head_kinds" in request.path.parts:
        return
    head_tests = sys.modules["manyheads.lens.head_kinds.head_tests"]
    stored_tests = sys.modules["manyheads.lens.head_kinds.stored_tests"]
    fingerprint, recall = kinds.storable_fingerprint, head_tests.recall_test
    least = stored_tests.MIN_PARAMETERS

    def named(model: Any) -> str | None:
        name: str | None = fingerprint(model)
        small = sum(parameter.numel() for parameter in model.parameters()) < least
        return SMALL + name if small and name is not None else name

    def remembered(
        name: str | None,
        test: str,
        inputs: object,
        measure: Callable[[], tuple[Any, bool]],
        *,
        remeasure: bool = False,
    ) -> Any:
        if name is None or not name.startswith(SMALL):
            return recall(name, test, inputs, measure, remeasure=remeasure)
        key = (name, test, repr(inputs))
        if remeasure or key not in MEASURED:
            result, complete = measure()
            if not complete:
                return result
            MEASURED[key] = result
        return deepcopy(MEASURED[key])

    monkeypatch.setattr(stored_tests, "MIN_PARAMETERS", 0)
    monkeypatch.setattr(kinds, "storable_fingerprint", named)
    monkeypatch.setattr(head_tests, "recall_test", remembered)


@pytest.fixture(autouse=True)
def unseen_pictures_are_small(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw what nobody looks at with few pixels, and without finding room for every label.

    Snippets of the docs and studies only have to draw; tests/pictures looks at every picture.
    """
    canvas = sys.modules.get("manyheads.pictures.canvas")
    if canvas is None or not {"architecture", "studies"} & set(request.path.parts):
        return
    save = canvas.save_figure

    def save_small(figure: Any, path: Path, **options: Any) -> None:
        figure.set_layout_engine("none")
        save(figure, path, **options | {"dpi": 20})

    monkeypatch.setattr(canvas, "save_figure", save_small)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if not opens_pages(nextitem):
        close_browser()
