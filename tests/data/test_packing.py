"""Packing: every piece once and whole, never above the budget, hardly a gap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.packing import pack

SIZES = st.lists(st.integers(1, 60), max_size=300)


@given(sizes=SIZES, budget=st.integers(60, 400), waiting=st.integers(1, 64))
def test_every_piece_comes_once_and_no_batch_is_above_the_budget(
    sizes: list[int], budget: int, waiting: int
) -> None:
    batches = list(pack(enumerate(sizes), budget, lookahead=waiting))
    assert sorted(number for batch in batches for number in batch) == list(range(len(sizes)))
    assert all(0 < sum(sizes[number] for number in batch) <= budget for batch in batches)


@given(sizes=SIZES, budget=st.integers(60, 400), waiting=st.integers(1, 64))
def test_no_waiting_piece_would_have_fitted(sizes: list[int], budget: int, waiting: int) -> None:
    left = dict(enumerate(sizes))
    for batch in pack(enumerate(sizes), budget, lookahead=waiting):
        room = budget - sum(left.pop(number) for number in batch)
        oldest = sorted(left)[:waiting]
        assert all(left[number] > room for number in oldest)


@given(sizes=SIZES, waiting=st.integers(1, 64))
def test_none_waits_for_longer_than_the_buffer_is(sizes: list[int], waiting: int) -> None:
    left = set(range(len(sizes)))
    for batch in pack(enumerate(sizes), 60, lookahead=waiting):
        assert min(left) in batch
        left -= set(batch)


DRAW = np.random.default_rng(0)
DISTRIBUTIONS = {
    "web pages": DRAW.lognormal(6.0, 1.2, 6_000),
    "sentences": DRAW.lognormal(3.2, 0.6, 20_000),
    "mostly whole pieces": np.where(DRAW.random(6_000) < 0.9, 1024, DRAW.uniform(1, 1024, 6_000)),
    "all of middling size": DRAW.uniform(300, 500, 6_000),
    "a few long among short": np.where(
        DRAW.random(20_000) < 0.01, 1024, DRAW.uniform(20, 80, 20_000)
    ),
}


@pytest.mark.parametrize("budget", [4096, 16_384, 65_536])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_batches_are_over_99_percent_full(kind: str, budget: int) -> None:
    sizes = np.clip(DISTRIBUTIONS[kind], 1, 1024).astype(int)
    batches = list(pack(enumerate(sizes.tolist()), budget))
    # The last may be short for want of pieces.
    full = sum(int(sizes[batch].sum()) for batch in batches[:-1]) / budget / (len(batches) - 1)
    assert full > 0.99
    # Without a gap there would be so many batches.
    assert len(batches) <= 1.01 * sizes.sum() / budget + 1


def test_order_is_kept_but_for_the_last_gap() -> None:
    sizes = np.clip(DISTRIBUTIONS["web pages"], 1, 1024).astype(int)
    batches = list(pack(enumerate(sizes.tolist()), 65_536))
    places = np.concatenate(batches)
    assert np.median(np.abs(places - np.arange(len(places)))) < 200
