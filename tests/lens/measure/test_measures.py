"""Every measure on patterns written by hand, where the answer is known beforehand."""

import math

import pytest
import torch

from manyheads.lens.attention_maps.typology import (
    detect,
    duplicate_ideal,
    induction_ideal,
    offset_ideal,
)
from manyheads.lens.measure.measures import has_earlier_copy
from manyheads.ragged import Lengths
from tests.lens.handmade import column_head, even_head, induction_head, measured, offset_head

NEAR = 1e-5


def near(value: float) -> object:
    return pytest.approx(value, abs=NEAR)


def test_a_head_that_looks_at_all_alike() -> None:
    result = measured(even_head(8))
    assert result["entropy"] == near(sum(math.log(n) for n in range(1, 9)) / 8)
    assert result["normalized_entropy"] == near(1.0)
    assert result["effective_keys"] == near(4.5)
    assert result["max_weight"] == near(sum(1 / n for n in range(1, 9)) / 8)
    assert result["distance"] == near(sum((n - 1) / 2 for n in range(1, 9)) / 8)
    assert result["spread"] == near(sum(math.sqrt((n * n - 1) / 12) for n in range(1, 9)) / 8)
    assert result["first_token"] == near(result["max_weight"])


def test_a_head_that_looks_at_the_previous_token() -> None:
    result = measured(offset_head(10, -1))
    assert result["previous_token"] == near(1.0)
    # The first query has no previous token: Clark counts it, and it is lost.
    assert result["previous_token_all_queries"] == near(0.9)
    assert result["self"] == near(0.1)
    assert result["entropy"] == near(0.0)
    assert result["effective_keys"] == near(1.0)
    assert result["max_weight"] == near(1.0)
    assert result["distance"] == near(0.9)
    assert result["spread"] == near(0.0)
    assert result["first_token"] == near(0.2)


@pytest.mark.parametrize("offset", [-7, -2, 2, 5])
def test_a_head_at_any_offset_of_a_long_text(offset: int) -> None:
    result = measured(offset_head(300, offset), offsets=(offset,), causal=False)
    assert result[f"offset{offset:+d}"] == near(1.0)
    # Those near an end look at the first token instead.
    lost = range(-offset) if offset < 0 else range(300 - offset, 300)
    away = sum(lost) + abs(offset) * (300 - len(lost))
    assert result["distance"] == pytest.approx(away / 300, rel=1e-6)
    assert result["spread"] == near(0.0)


def test_a_head_that_looks_ahead() -> None:
    result = measured(offset_head(10, 1), causal=False)
    assert result["next_token"] == near(1.0)
    assert result["distance"] == near((9 + 9) / 10)


def test_a_head_that_looks_evenly_both_ways() -> None:
    pattern = torch.full((6, 6), 1 / 6)
    result = measured(pattern, causal=False)
    away = sum(abs(i - j) for i in range(6) for j in range(6)) / 36
    assert result["distance"] == near(away)
    assert result["spread"] == near(math.sqrt(35 / 12))
    assert result["normalized_entropy"] == near(1.0)


def test_a_sink_is_a_first_token_above_three_tenths_on_average() -> None:
    sink, mild = column_head(10), column_head(10) * 0.2 + torch.eye(10) * 0.8
    result = measured(sink, mild, sink, sink)
    assert result["sink"] == near(0.75)
    # The first query of the mild head sees nothing but the first token.
    assert result["first_token"] == near((3 + (1 + 9 * 0.2) / 10) / 4)


def test_the_share_of_sinks_is_of_texts_and_not_of_queries() -> None:
    result = measured(column_head(20), torch.eye(10))
    assert result["sink"] == near(0.5)
    assert result["first_token"] == near(21 / 30)


def test_mass_on_chosen_tokens() -> None:
    pattern = torch.zeros(4, 4)
    pattern[torch.arange(4), torch.tensor([0, 1, 1, 0])] = 1.0
    result = measured(pattern, ids=[5, 6, 7, 8], classes={"six": [6], "even": [6, 8], "none": []})
    assert (result["on_six"], result["on_even"], result["on_none"]) == (
        near(0.5),
        near(0.5),
        near(0),
    )


def test_earlier_copies_and_what_comes_after_them() -> None:
    ids = [1, 2, 1, 3, 1]
    pattern = torch.eye(5)
    pattern[2] = torch.tensor([0.5, 0.25, 0.25, 0, 0])
    pattern[4] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    result = measured(pattern, ids=ids)
    # Only the third and the fifth token were there before.
    assert result["duplicate_token"] == near((0.5 + 0.4) / 2)
    assert result["induction"] == near((0.25 + 0.6) / 2)
    assert result["induction_score"] == near(0.85 / 5)
    assert result["induction_score_without_first"] == near(0.85 / (5 - 1.6))


def test_a_text_without_repeats_has_no_induction() -> None:
    result = measured(even_head(5), ids=[1, 2, 3, 4, 5])
    assert math.isnan(result["duplicate_token"])
    assert math.isnan(result["induction"])
    assert result["induction_score"] == near(0.0)


def test_the_perfect_induction_head_scores_as_published() -> None:
    pattern, ids = induction_head(50)
    result = measured(pattern, ids=ids)
    assert result["induction"] == near(1.0)
    assert result["induction_score"] == near(50 / 101)
    assert result["induction_score"] == pytest.approx(0.495, abs=5e-4)
    assert result["induction_score_without_first"] == near(1.0)


def test_detectors_of_the_perfect_induction_head() -> None:
    pattern, ids = induction_head(50)
    ideal = induction_ideal(ids)
    assert detect(pattern, ideal) == pytest.approx(0.495, abs=5e-4)
    assert detect(pattern, ideal, exclude_first=True) == near(1.0)
    # 51 queries look at the first token, where the ideal has nothing.
    assert detect(pattern, ideal, error_measure="abs") == near(1 - 51 / 101)
    assert detect(pattern, ideal, error_measure="abs", exclude_first=True) == near(1.0)


def test_detectors_of_plain_heads() -> None:
    assert detect(offset_head(10, -1), offset_ideal(10, -1)) == near(0.9)
    assert detect(torch.eye(10), offset_ideal(10, 0)) == near(1.0)
    assert detect(torch.eye(10), offset_ideal(10, -1)) == near(0.0)
    assert detect(column_head(3), duplicate_ideal([7, 8, 7])) == near(1 / 3)
    assert detect(column_head(3), duplicate_ideal([7, 7, 7]), error_measure="abs") == near(1 / 3)


def test_texts_never_share_their_words() -> None:
    lengths = Lengths.of([3, 0, 3, 1])
    ids = torch.tensor([4, 5, 4, 5, 5, 4, 4])
    expected = [False, False, True, False, True, False, False]
    assert has_earlier_copy(ids, lengths).tolist() == expected


def test_far_away_keys_lose_no_digits() -> None:
    pattern = torch.zeros(3000, 3000)
    rows = torch.arange(3000)
    pattern[rows, (rows - 2900).clamp(min=0)] = 0.5
    pattern[rows, (rows - 2899).clamp(min=0)] += 0.5
    result = measured(pattern)
    # Rows from 2900 on halve their weight between neighbors; row 2899 and above of it do not.
    assert result["spread"] == pytest.approx(100 * 0.5 / 3000, abs=1e-6)
