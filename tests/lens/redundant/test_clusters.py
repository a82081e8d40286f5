"""Average linkage joins what scipy joins."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from manyheads.errors import InputError
from manyheads.lens.redundant.heads import average_linkage, cut
from tests.messages import refuses


def likeness(count: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).random((count, count))
    values = (values + values.T) / 2
    np.fill_diagonal(values, 1.0)
    return values


@pytest.mark.parametrize("seed", range(5))
def test_it_is_scipys_average_linkage(seed: int) -> None:
    values = likeness(17, seed)
    peer = linkage(squareform(1 - values, checks=False), method="average")
    merges = average_linkage(values)
    np.testing.assert_allclose([1 - merge.likeness for merge in merges], peer[:, 2])
    for above in (0.4, 0.55, 0.7):
        labels = fcluster(peer, 1 - above, criterion="distance")
        expected = {tuple(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
        assert set(cut(merges, above, 17)) == expected


def test_what_has_no_likeness_is_never_joined() -> None:
    values = likeness(4, 0)
    values[:2, 2:] = values[2:, :2] = np.nan
    assert {merge.one + merge.other for merge in average_linkage(values)} == {(0, 1), (2, 3)}
    assert cut(average_linkage(values), -1.0, 4) == ((0, 1), (2, 3))


def test_one_or_none_has_nothing_to_join() -> None:
    assert average_linkage(np.ones((1, 1))) == ()
    assert average_linkage(np.ones((0, 0))) == ()
    assert cut((), 0.5, 2) == ((0,), (1,))


def test_values_that_are_of_no_pairs_are_refused() -> None:
    with refuses(InputError, "likeness of shape (2, 3) is of no pairs: give h x h values."):
        average_linkage.__wrapped__(np.ones((2, 3)))  # type: ignore[attr-defined]
