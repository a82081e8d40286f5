"""What the tests of Ray share."""

from collections.abc import Iterator

import pytest

from manyheads.tasks.filtering import ray_engine


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray for two workers and a reader, started once for a file."""
    with ray_engine.ray_session(2):
        yield
