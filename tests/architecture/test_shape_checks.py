"""What the shape checks of conftest.py do to the functions that they check."""

import os

import pytest

from manyheads.taps import Site, Tap


@pytest.mark.skipif("MANYHEADS_NO_TYPECHECK" in os.environ, reason="types are not checked")
def test_a_failure_in_a_checked_function_shows_the_locals_of_its_frames() -> None:
    """The `__init__` of a frozen dataclass reads names of the function that it was made in."""
    free = Site.__init__.__code__.co_freevars
    assert free
    with pytest.raises(Exception, match="layer") as error:
        Site(layer="1", tap=Tap.QUERY)  # type: ignore[arg-type]
    shown = [entry.frame.f_locals for entry in error.traceback]
    assert any(set(free) <= set(names) for names in shown)
