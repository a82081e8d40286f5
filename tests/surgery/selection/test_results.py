"""The table of a selection."""

import pytest

from manyheads.surgery.selection.results import describe_harm


@pytest.mark.parametrize(
    ("harmful", "units", "text"),
    [(0, 1, ""), (1, 1, ", harmful"), (2, 9, ", 2 of them harmful")],
)
def test_harmful_units_are_counted(harmful: int, units: int, text: str) -> None:
    assert describe_harm(harmful, units) == text
