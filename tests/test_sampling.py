"""A sample of a product meets every pair of its values, and is the same in every process."""

from itertools import product

from tests.sampling import cover, pairs_of

CASES = list(product("abcde", range(4), ("u", "v", "w"), (True, False)))


def test_every_pair_of_values_is_met() -> None:
    result = cover(CASES)
    assert pairs_of(result) == pairs_of(CASES)
    assert set(result) < set(CASES)
    assert len(result) <= len(CASES) // 3


def test_the_named_columns_are_met_in_every_combination() -> None:
    result = cover(CASES, every=(0, 1))
    assert {case[:2] for case in result} == {case[:2] for case in CASES}
    assert pairs_of(result) == pairs_of(CASES)


def test_a_case_that_is_left_out_of_the_product_is_left_out_of_the_sample() -> None:
    allowed = [case for case in CASES if case[0] != "a" or case[1] == 0]
    result = cover(allowed)
    assert set(result) <= set(allowed)
    assert pairs_of(result) == pairs_of(allowed)


def test_the_sample_is_a_matter_of_its_seed() -> None:
    assert cover(CASES) == cover(CASES)
    assert cover(CASES, seed=1) != cover(CASES)
