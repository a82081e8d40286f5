"""Verdicts follow from numbers, and means carry their errors."""

import math

import pytest

from studies.pages import verdict_page
from studies.study import Arm, Result, Verdict, compare
from tests.studies.planted import Planted


def result_of(**losses: list[float]) -> Result:
    result = Result("planted", "full", {}, "a machine")
    for arm, values in losses.items():
        for seed, value in enumerate(values):
            result.add(Arm(arm, seed), {"loss": value, "by": {"head": [value]}}, 1.0)
    return result


@pytest.mark.parametrize(
    ("difference", "error", "least", "verdict"),
    [
        (0.1, 0.04, 0.0, Verdict.HOLDS),
        (0.1, 0.06, 0.0, Verdict.WEAKLY),
        (0.1, 0.2, 0.0, Verdict.NOT_HERE),
        (-0.1, 0.2, 0.0, Verdict.NOT_HERE),
        (-0.1, 0.04, 0.0, Verdict.CONTRADICTED),
        (math.nan, 0.04, 0.0, Verdict.OPEN),
        # Of single seeds the error is unknown, and `least` decides.
        (0.1, math.nan, 0.05, Verdict.HOLDS),
        (0.04, math.nan, 0.05, Verdict.WEAKLY),
        (0.02, math.nan, 0.05, Verdict.NOT_HERE),
        (-0.06, math.nan, 0.05, Verdict.CONTRADICTED),
    ],
)
def test_a_verdict_follows_from_difference_and_error(
    difference: float, error: float, least: float, verdict: Verdict
) -> None:
    assert compare(difference, error, least=least) is verdict


def test_means_and_errors_are_those_of_the_seeds() -> None:
    result = result_of(plain=[1.0, 2.0, 3.0], gated=[1.0], diverged=[1.0, math.inf])
    assert result.mean("plain", "loss") == 2.0
    assert result.error("plain", "loss") == pytest.approx(1 / math.sqrt(3))
    assert result.text("plain", "loss", digits=1) == "2.0 ± 0.6"
    assert result.text("gated", "loss", digits=1) == "1.0"
    assert result.text("absent", "loss") == "not measured"
    assert result.mean("diverged", "loss") == 1.0
    assert result.each("plain", "by", "head") == []
    difference, error = result.difference("plain", "gated", "loss")
    assert difference == 1.0
    # A single seed takes the spread of the arms that have several.
    assert error == pytest.approx(math.sqrt(1 / 3 + 1))
    assert math.isnan(result.difference("plain", "absent", "loss")[0])


def test_settings_are_as_a_file_has_them() -> None:
    assert Planted().settings("quick") == {"arms": ["narrow", "wide"], "seeds": [0], "steps": 20000}


def test_the_page_of_verdicts_has_every_study_and_may_be_empty() -> None:
    page = verdict_page([(Planted(), result_of(narrow=[2.0], wide=[1.0]))])
    assert "| [planted](#planted) | Wide models lose less than narrow ones | ✔ holds |" in page
    assert "\n\n- Wide models lose less than narrow ones (Nobody 2026) ✔ holds: 2.000" in page
    assert "](images/studies/planted.png)" in page
    assert "No study has a result yet." in verdict_page([])
