"""Effects with their intervals, and random heads to compare with."""

import numpy as np

from manyheads.lens.task_heads.task_heads import HeldOutEffect, InductionScores, random_sets


def test_the_interval_of_equal_values_is_one_value() -> None:
    assert HeldOutEffect.of([0.5] * 4) == HeldOutEffect(mean=0.5, low=0.5, high=0.5, samples=4)


def test_intervals_of_means_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(3)
    effects = [HeldOutEffect.of(draw.normal(0.3, 1.0, 40)) for _ in range(200)]
    held = np.mean([effect.low <= 0.3 <= effect.high for effect in effects])
    assert 0.88 < held < 0.99


def test_random_heads_are_others_and_differ() -> None:
    sets = random_sets(40, 5, [1, 2, 3], seed=1)
    assert all(len(set(members)) == 5 and not {1, 2, 3} & set(members) for members in sets)
    assert len({tuple(sorted(members)) for members in sets}) > 1
    assert sets == random_sets(40, 5, [1, 2, 3], seed=1)
    assert random_sets(4, 3, [0, 1, 2], seed=0) == [[3]] * len(sets)


def test_the_strongest_induction_heads_come_first() -> None:
    induction = InductionScores(np.array([0.1, np.nan, 0.9, 0.5]), np.array([0, 0, 1, 1], bool))
    assert induction.strongest(2, []) == [2, 3]
    assert induction.strongest(2, [2]) == [3, 0]
