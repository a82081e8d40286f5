"""Sums by token, for tokens that appear one after another."""

import numpy as np

from manyheads.lens.corpus.token_sums import FIRST_CAPACITY, TokenSums, top_lifts


def test_sums_are_those_of_each_token() -> None:
    draw = np.random.default_rng(0)
    sums, every = TokenSums(2), []
    for _ in range(4):
        ids, values = draw.integers(0, 3 * FIRST_CAPACITY, 2000), draw.normal(size=(2000, 2))
        sums.add(ids, values)
        every.append((ids, values))
    ids, values = (np.concatenate(part) for part in zip(*every, strict=True))
    assert set(sums.ids.tolist()) == set(ids.tolist())
    assert len(sums) > FIRST_CAPACITY
    for place in range(0, len(sums), 500):
        assert np.allclose(sums.sums[place], values[ids == sums.ids[place]].sum(0))


def test_restored_sums_go_on() -> None:
    sums, again = TokenSums(1), TokenSums(1)
    sums.add(np.array([9, 4]), np.array([[1.0], [2.0]]))
    again.restore(sums.ids, sums.sums)
    again.add(np.array([4, 7]), np.array([[3.0], [5.0]]))
    assert dict(zip(again.ids.tolist(), again.sums[:, 0].tolist(), strict=True)) == {
        9: 1.0,
        4: 5.0,
        7: 5.0,
    }


def test_rare_tokens_count_in_totals_only() -> None:
    ids, counts = np.arange(3), np.array([10.0, 10.0, 1.0])
    lifts = top_lifts(ids, np.array([2.0, 1.0, 9.0]), counts, counts, top=5, min_count=5)
    assert [lift.token for lift in lifts] == [0, 1]
    assert lifts[0].lift == np.float64(2 / 12 / (10 / 21)).round(6)


def test_a_head_without_weight_has_no_tokens() -> None:
    ones = np.ones(2)
    assert top_lifts(np.arange(2), np.zeros(2), ones, ones, top=5, min_count=0) == []
