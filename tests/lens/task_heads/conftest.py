"""Induction heads are found on few sequences here: the planted ones are plain."""

from collections.abc import Iterator

import pytest

from manyheads.lens.head_kinds import head_tests


@pytest.fixture(scope="module", autouse=True)
def few_sequences() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_tests, "SEQUENCES", 5)
        yield
