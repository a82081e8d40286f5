"""An order that is computed is a permutation, differs by seed and epoch, and favors nothing."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.stream import mix_seed, permute


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 99))
def test_every_number_comes_once(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(count))


@given(count=st.integers(1, 500), data=st.data())
def test_any_place_is_computed_without_the_others(count: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, count - 1))
    whole = permute(np.arange(count), count, seed=7)
    assert permute(np.array([place]), count, seed=7).tolist() == [whole[place]]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), 50, seed=seed, epoch=epoch).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("count", [3, 4])
def test_all_orders_of_a_few_are_about_equally_likely(count: int) -> None:
    tried = 1500
    seen = Counter(
        tuple(permute(np.arange(count), count, seed=seed).tolist()) for seed in range(tried)
    )
    kinds = int(np.prod(range(1, count + 1)))
    assert len(seen) == kinds
    assert max(seen.values()) < 1.7 * tried / kinds


def test_neighbors_are_torn_apart() -> None:
    order = permute(np.arange(100_000), 100_000, seed=0)
    steps = np.abs(np.diff(order))
    # Two places drawn at random lie a third of the whole apart.
    assert abs(steps.mean() / 100_000 - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02


def test_seeds_made_of_seeds_do_not_meet() -> None:
    assert (
        len({mix_seed(mix_seed(seed) + epoch) for seed in range(100) for epoch in range(100)})
        == 10**4
    )
