"""What the tests of Ray share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from manyheads.tasks.filtering import ray_engine
from tests.workers import unit_of

# The cluster, while it runs: two files have their tests on it.
RUNNING = ExitStack()
OPEN: list[bool] = []


@pytest.fixture
def cluster() -> None:
    """A local Ray for two workers and a reader, started once for all files that name it."""
    if not OPEN:
        # Every process of Ray imports for seconds; none is started before there is work for it.
        os.environ.setdefault("RAY_enable_worker_prestart", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        RUNNING.enter_context(ray_engine.ray_session(2))
        OPEN.append(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if OPEN and (nextitem is None or unit_of(nextitem) != unit_of(item)):
        RUNNING.close()
        OPEN.clear()
