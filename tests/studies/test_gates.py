"""The gates study: its models, and verdicts that follow from the numbers."""

import pytest

from studies.gates.study import (
    ATTENTION,
    WIDER,
    Judged,
    judge_controls,
    judge_gain,
    judge_head,
    judge_place,
    judge_sinks,
    make_model,
)
from studies.small_models import count_parameters
from studies.study import Arm, Result, Verdict

SHAPE = {"width": 48, "layers": 1, "heads": 4}
PLACES = {f"G{number} channel": bits for number, bits in enumerate((1.8, 1.85, 2.0, 1.99, 2.0), 1)}


def result_of(measure: str, values: dict[str, float], spread: float = 0.001) -> Result:
    """One value per arm; the plain one has three seeds around it."""
    result = Result("gates", "test", {}, "")
    for name, value in values.items():
        for seed in range(3 if name == "plain" else 1):
            shifted = value + (seed - 1) * spread * (name == "plain")
            result.add(Arm(name, seed), {measure: shifted, "sink_share": 0.5}, 0.0)
    return result


def verdict(judged: Judged) -> Verdict:
    return judged[0]


@pytest.mark.parametrize("name", WIDER)
def test_wider_models_have_the_weights_of_a_gate(name: str) -> None:
    gated = count_parameters(make_model("G1 channel", SHAPE, seed=0))
    assert count_parameters(make_model(name, SHAPE, seed=0)) == pytest.approx(gated, rel=0.01)


def test_no_two_arms_have_the_same_model() -> None:
    configs = [make_model(name, SHAPE, seed=0).config for name in (*ATTENTION, *WIDER)]
    assert len(set(configs)) == len(configs)


def test_an_arm_of_one_seed_takes_the_spread_of_the_others() -> None:
    values = {"plain": 2.0, "G1 channel": 1.9}
    assert verdict(judge_gain(result_of("bits", values))) is Verdict.HOLDS
    assert verdict(judge_gain(result_of("bits", values, spread=0.08))) is Verdict.WEAKLY
    assert verdict(judge_gain(result_of("bits", values, spread=0.5))) is Verdict.NOT_HERE


def test_the_place_matters_if_the_worse_of_the_good_places_is_better() -> None:
    assert verdict(judge_place(result_of("bits", {"plain": 2.0, **PLACES}))) is Verdict.HOLDS
    better = {"plain": 2.0, **PLACES, "G4 channel": 1.82}
    assert verdict(judge_place(result_of("bits", better))) is Verdict.CONTRADICTED
    fewer = {"plain": 2.0, "G1 channel": 1.8, "G3 channel": 2.0}
    assert verdict(judge_place(result_of("bits", fewer))) is Verdict.OPEN


def test_a_gate_per_head_needs_half_of_the_gain() -> None:
    values = {"plain": 2.0, "G1 channel": 1.8}
    assert verdict(judge_head(result_of("bits", values | {"G1 head": 1.85}))) is Verdict.HOLDS
    less = judge_head(result_of("bits", values | {"G1 head": 1.95}))
    assert verdict(less) is Verdict.CONTRADICTED
    assert "25% of the gain" in less[1]


def test_sinks_must_be_halved_and_controls_keep_them() -> None:
    values = {"plain": 0.4, "G1 channel": 0.1, "reads nothing": 0.3, "not sparse": 0.35}
    assert verdict(judge_sinks(result_of("first_token", values))) is Verdict.HOLDS
    assert verdict(judge_controls(result_of("first_token", values))) is Verdict.HOLDS
    lower = values | {"G1 channel": 0.25}
    assert verdict(judge_sinks(result_of("first_token", lower))) is Verdict.WEAKLY


def test_without_sinks_a_gate_cannot_remove_them() -> None:
    result = Result("gates", "test", {}, "")
    for name in ("plain", "G1 channel"):
        result.add(Arm(name), {"first_token": 0.02, "sink_share": 0.0}, 0.0)
    assert verdict(judge_sinks(result)) is Verdict.NOT_HERE
