"""The study of learning rates: which rates count as borne, and what follows."""

import math

from studies.learning_rates.study import (
    VARIANTS,
    arm_name,
    borne,
    judge_best,
    judge_higher,
    judge_norms,
    judge_spikes,
)
from studies.study import Arm, Result, Verdict

RATES = [0.001, 0.002, 0.004, 0.008]
PLAIN, NORMS, GATED = VARIANTS


def result_of(ends: dict[str, list[float]], spikes: dict[str, int]) -> Result:
    """Bits per byte by rate, infinite where a run diverged."""
    result = Result("learning_rates", "test", {"rates": RATES}, "")
    for variant, bits in ends.items():
        for rate, value in zip(RATES, bits, strict=True):
            diverged = math.isinf(value)
            values = {"bits": None if diverged else value, "diverged": diverged}
            count = spikes.get(variant, 0)
            result.add(Arm(arm_name(variant, rate)), {**values, "spikes": count}, 0.0)
    return result


PUBLISHED = result_of(
    {
        PLAIN: [2.2, 2.1, 2.6, math.inf],
        NORMS: [2.2, 2.12, 2.09, math.inf],
        GATED: [2.2, 2.1, 2.05, 2.06],
    },
    {PLAIN: 4, GATED: 1},
)


def test_a_slow_rate_is_borne_and_one_that_falls_back_is_not() -> None:
    assert [borne(PUBLISHED, variant) for variant in VARIANTS] == [2, 3, 4]


def test_what_was_published_holds() -> None:
    for judge in (judge_higher, judge_best, judge_norms, judge_spikes):
        assert judge(PUBLISHED)[0] is Verdict.HOLDS


def test_variants_that_are_alike_show_nothing() -> None:
    alike = result_of({name: [2.2, 2.1, 2.1, math.inf] for name in VARIANTS}, {})
    for judge in (judge_higher, judge_best, judge_norms, judge_spikes):
        assert judge(alike)[0] is Verdict.NOT_HERE


def test_runs_that_all_diverge_show_nothing() -> None:
    lost = result_of({name: [math.inf] * 4 for name in VARIANTS}, {})
    for judge in (judge_higher, judge_best, judge_norms, judge_spikes):
        assert judge(lost)[0] is Verdict.NOT_HERE


def test_a_gate_that_bears_less_contradicts() -> None:
    ends = {PLAIN: [2.2, 2.1, 2.1, 2.1], NORMS: [2.2] * 4, GATED: [2.2, 2.1, 3.0, math.inf]}
    assert judge_higher(result_of(ends, {}))[0] is Verdict.CONTRADICTED
