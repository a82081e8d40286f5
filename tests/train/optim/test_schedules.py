"""The share of the peak rate and the tokens of a step, by the step."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_wsd_schedule

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import (
    BatchGrowth,
    Cosine,
    Decay,
    InverseSqrt,
    Schedule,
    Stable,
    WarmupStableDecay,
)
from tests.messages import refuses

SCHEDULES: list[Schedule] = [
    Stable(warmup=10),
    Decay(),
    Decay(shape="linear", floor=0.1),
    Decay(shape="cosine"),
    WarmupStableDecay(warmup=10, decay=20),
    WarmupStableDecay(decay=100, shape="cosine", floor=0.2),
    Cosine(warmup=10),
    InverseSqrt(warmup=10),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_shares_lie_above_zero_and_reach_one(schedule: Schedule) -> None:
    shares = [schedule.factor(step, 100) for step in range(100)]
    assert all(0 < share <= 1 for share in shares)
    assert max(shares) == 1


def test_warmup_stable_decay_joins_its_three_parts() -> None:
    schedule = WarmupStableDecay(warmup=4, decay=4, floor=0.2)
    shares = [schedule.factor(step, 12) for step in range(13)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:9] == [1.0] * 5
    expected = [0.2 + 0.8 * (1 - math.sqrt(step / 4)) for step in range(5)]
    assert shares[8:] == pytest.approx(expected)
    assert schedule.final_factor(12) == pytest.approx(0.2)


@pytest.mark.parametrize("shape", ["sqrt", "linear", "cosine"])
def test_warmup_stable_decay_is_that_of_transformers(
    shape: Literal["sqrt", "linear", "cosine"],
) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    peer = get_wsd_schedule(
        torch.optim.SGD([weight], lr=1.0),
        num_warmup_steps=5,
        num_stable_steps=10,
        num_decay_steps=8,
        decay_type={"sqrt": "1-sqrt"}.get(shape, shape),
        min_lr_ratio=0.1,
    )
    [rate] = peer.lr_lambdas
    ours = WarmupStableDecay(warmup=5, decay=8, shape=shape, floor=0.1)
    # They warm up from nothing, we from the first of `warmup` equal stairs.
    expected = [rate(step) for step in range(5, 23)]
    assert [ours.factor(step, 23) for step in range(5, 23)] == pytest.approx(expected)
    # The rate of the plateau once more where the fall begins, and above the floor to the last.
    assert expected[10] == 1 > expected[11]
    assert expected[-1] > 0.1


def test_shapes_are_their_formulas_half_way() -> None:
    assert Decay(shape="linear").factor(50, 100) == 0.5
    assert Decay(shape="cosine").factor(25, 100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert Decay(shape="sqrt").factor(25, 100) == 0.5
    assert Cosine(warmup=20, floor=0.1).factor(60, 100) == pytest.approx(0.55)


def test_inverse_square_root_is_that_of_2017() -> None:
    width, warmup = 512, 4000
    peak = (width * warmup) ** -0.5
    for step in (1, 1000, 4000, 100_000):
        expected = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        result = peak * InverseSqrt(warmup=warmup).factor(step - 1, 200_000)
        assert result == pytest.approx(expected)


def test_modernberts_batch_grows_with_equal_updates_a_size() -> None:
    length = 1024
    growth = BatchGrowth(
        first=768 * length, last=4608 * length, by=768 * length, over=50_000_000_000
    )
    sizes = [growth.tokens(step) for step in range(0, 6 * growth.updates, growth.updates)]
    assert sizes == [768 * length * times for times in (1, 2, 3, 4, 5, 6)]
    assert growth.tokens(growth.updates - 1) == 768 * length
    before = growth.tokens_before(5 * growth.updates)
    assert before == pytest.approx(50e9, rel=1e-3)


@given(
    first=st.integers(1, 9),
    times=st.integers(1, 5),
    by=st.integers(1, 4),
    extra=st.integers(0, 200),
    tokens=st.integers(1, 1000),
)
def test_growth_counts_its_own_tokens(
    first: int, times: int, by: int, extra: int, tokens: int
) -> None:
    last = first + times * by
    growth = BatchGrowth(first=first, last=last, by=by, over=sum(range(first, last, by)) + extra)
    seen = 0
    for step in range(100):
        assert growth.tokens_before(step) == seen
        seen += growth.tokens(step)
    steps = growth.steps_for(tokens)
    assert growth.tokens_before(steps) >= tokens > growth.tokens_before(steps - 1)


def test_contradictions_are_refused() -> None:
    with refuses(ConfigError, "warmup must be at least 0, got -1"):
        Stable(warmup=-1)
    with refuses(ConfigError, "floor must be in [0, 1], got 2.0: use a fraction of the peak."):
        Cosine(floor=2.0)
    with refuses(ConfigError, "decay must be at least 1, got 0: use 1 or more, or Stable."):
        WarmupStableDecay(decay=0)
    with refuses(
        ConfigError,
        "warmup=5 and decay=6 do not fit in 10 steps: use more "
        "steps, or a shorter warmup and decay.",
    ):
        WarmupStableDecay(warmup=5, decay=6).check(10)
    with refuses(ConfigError, "warmup must be at least 1, got 0"):
        InverseSqrt(warmup=0)
    with refuses(ConfigError, "first=4 and last=4 do not grow: use 0 < first < last."):
        BatchGrowth(first=4, last=4, by=1, over=10)
    with refuses(ConfigError, "by=3 does not lead from 4 to 8: use a divisor of 4."):
        BatchGrowth(first=4, last=8, by=3, over=100)
    with refuses(
        ConfigError, "over=9 tokens are too few for one step at each size: use 10 or more."
    ):
        BatchGrowth(first=4, last=8, by=2, over=9)
