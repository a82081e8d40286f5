import numpy as np

from manyheads.report.measures import measures_of
from tests.report.small import findings


def test_worth_comes_first_and_every_measure_is_known_for_some_head() -> None:
    found = measures_of(findings())
    assert found[0].name == "worth"
    assert not any(np.isnan(each.values).all() for each in found)
    assert len({each.name for each in found}) == len(found)
