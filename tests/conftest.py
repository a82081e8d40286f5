"""What every test gets: patches for as long as it runs, and a browser that is closed after it."""

import math
import os
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


# Set by hooks: autouse fixtures for each of them would take longer than most tests do.
PATCHES = pytest.MonkeyPatch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    use_own_cache(item.config)
    if item.path.stem != "test_progress":
        omit_notes_of_slow_work()
    if "head_kinds" not in item.path.parts:
        measure_kinds_once()
    if {"architecture", "studies"} & set(item.path.parts):
        draw_small()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        yield
    finally:
        PATCHES.undo()
    if not opens_pages(nextitem):
        close_browser()


def use_own_cache(config: pytest.Config) -> None:
    """Keep tests out of the user's cache, and of each other's."""
    temporary: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    folder = temporary.getbasetemp() / "cache" / str(next(NUMBERS))
    PATCHES.setenv("MANYHEADS_CACHE", str(folder))


@pytest.fixture
def own_cache() -> Path:
    """The cache of this test alone."""
    return Path(os.environ["MANYHEADS_CACHE"])


def omit_notes_of_slow_work() -> None:
    """Keep a command silent that takes seconds here: a slow machine must not change what it says.

    The tests of the progress bar itself keep its times.
    """
    progress = sys.modules.get("manyheads.progress")
    if progress is not None:
        PATCHES.setattr(progress, "QUIET_SECONDS", math.inf)
        PATCHES.setattr(progress, "FIRST_LINE_SECONDS", math.inf)


def measure_kinds_once() -> None:
    """Give the kinds of a small model again to a later test, as the cache does for a large one.

    A page or a report of a model of a hundred kilobytes takes seconds only for its kinds. The tests
    of kinds themselves measure.
    """
    kinds = sys.modules.get("manyheads.lens.head_kinds.kinds")
    if kinds is None:
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

    PATCHES.setattr(stored_tests, "MIN_PARAMETERS", 0)
    PATCHES.setattr(kinds, "storable_fingerprint", named)
    PATCHES.setattr(head_tests, "recall_test", remembered)


def draw_small() -> None:
    """Draw what nobody looks at with few pixels, and without finding room for every label.

    Snippets of the docs and studies only have to draw; tests/pictures looks at every picture.
    """
    canvas = sys.modules.get("manyheads.pictures.canvas")
    if canvas is None:
        return
    save = canvas.save_figure

    def save_small(figure: Any, path: Path, **options: Any) -> None:
        figure.set_layout_engine("none")
        save(figure, path, **options | {"dpi": 20})

    PATCHES.setattr(canvas, "save_figure", save_small)
