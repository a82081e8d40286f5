"""Chance, the number of tests, and intervals, against values computed elsewhere."""

import numpy as np
import pytest

from manyheads.lens.head_kinds.significance import benjamini_hochberg, chance_above, interval


def test_significance_depends_on_all_tests_and_not_on_their_order() -> None:
    # The example of Benjamini and Hochberg (1995): 15 tests, of which 4 are rejected at 5%.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    values = np.array(p)
    assert benjamini_hochberg(values).tolist() == [True] * 4 + [False] * 11
    order = np.random.default_rng(0).permutation(15)
    assert (benjamini_hochberg(values[order]) == benjamini_hochberg(values)[order]).all()
    assert not benjamini_hochberg(np.array([0.06, 0.9])).any()
    assert benjamini_hochberg(np.zeros(0)).tolist() == []


def test_chance_is_that_of_students_distribution() -> None:
    # Upper tails of t = 2 and t = 3 with 10 and 30 degrees of freedom, from tables.
    for t, freedom, tail in ((2.0, 10, 0.03669), (3.0, 30, 0.002695), (2.0, 30, 0.02731)):
        result = chance_above(np.array([t]), np.zeros(1), np.ones(1), np.array([freedom + 1.0]))
        assert result[0] == pytest.approx(tail, rel=0.03)
    unknown = np.array([np.nan])
    assert chance_above(unknown, np.zeros(1), np.ones(1), np.ones(1)).tolist() == [1.0]


def test_intervals_hold_as_often_as_they_say() -> None:
    """Wilson's interval on 40 words, also where almost all are right."""
    draws = np.random.default_rng(0)
    for true in (0.5, 0.8, 0.95):
        inside = 0
        for hits in draws.binomial(40, true, size=400):
            share = hits / 40
            low, high = interval(float(share), float(np.sqrt(share * (1 - share) / 40)), 40.0)
            inside += low <= true <= high
        assert inside / 400 > 0.91
    assert np.isnan(interval(0.5, np.nan)).all()
