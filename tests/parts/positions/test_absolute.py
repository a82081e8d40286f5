"""A learned vector a position: how many there are, and where counting starts."""

import pytest

from manyheads.errors import ConfigError
from manyheads.parts.positions import Learned
from tests.messages import refuses


@pytest.mark.parametrize(("count", "offset", "longest"), [(512, 0, 512), (514, 2, 512), (3, 2, 1)])
def test_the_offset_costs_places(count: int, offset: int, longest: int) -> None:
    assert Learned(count=count, offset=offset).longest == longest


@pytest.mark.parametrize("offset", [-1, 8, 9])
def test_an_offset_outside_the_table_is_refused(offset: int) -> None:
    with refuses(
        ConfigError,
        f"0 to 7, got {offset}",
    ):
        Learned(count=8, offset=offset)
