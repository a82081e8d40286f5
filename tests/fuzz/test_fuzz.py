"""A small share of `make fuzz`: the same cases in every run."""

import pytest

from tests.fuzz.attack import ACCEPTED, Case, attacks, run_case

CASES = 4
ATTACKS = attacks()


@pytest.mark.parametrize("name", [name for name, (_, slow) in ATTACKS.items() if not slow])
def test_a_few_cases_of_every_attack_end_well(name: str) -> None:
    for number in range(CASES):
        verdict = run_case(ATTACKS[name][0], Case(name, number, seed=0))
        assert verdict.outcome in ACCEPTED, f"{verdict.outcome}: {verdict.detail}"
