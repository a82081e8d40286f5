"""Two models on one page: matched by place, or by measures where their shapes differ."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from manyheads.errors import InputError
from manyheads.report import compare_reports, comparison_json, render_comparison
from manyheads.report.data import ReportData, collect_report
from manyheads.report.model_comparison import ModelComparison
from tests.report.small import EVIL, WORDS, decoder, pairs_report, quick_kinds


@cache
def measured(heads: int = 2, scale: float = 1.0) -> ReportData:
    model = decoder(heads=heads)
    for parameter in model.stacks()["main"].layers[1].parameters():
        parameter.data.mul_(scale)
    with quick_kinds():
        return collect_report(
            model, [EVIL + WORDS, WORDS], name=f"<i>{heads}</i>", by="gradient", progress=False
        )


@cache
def same_shape() -> ModelComparison:
    return compare_reports(measured(), measured(scale=0.5))


@cache
def other_shape() -> ModelComparison:
    return compare_reports(measured(), measured(heads=4))


def test_a_model_differs_nowhere_from_itself() -> None:
    comparison = compare_reports(measured(), measured())
    assert [pair.distance for pair in comparison.pairs] == [0.0] * 4
    assert all(pair.first == pair.second for pair in comparison.pairs)
    assert comparison.nearest == comparison.matches
    assert "No head differs" in render_comparison(comparison)


def test_the_distance_is_that_of_all_measures_in_standard_deviations() -> None:
    comparison = same_shape()
    assert comparison.reason == ""
    first, second = comparison.reports
    squares = []
    for one in first.measures():
        two = next(measure for measure in second.measures() if measure.name == one.name)
        spread = np.nanstd(np.concatenate([one.values, two.values]))
        if spread > 1e-12:
            squares.append(np.square((one.values - two.values) / spread))
    expected = np.sqrt(np.nanmean(squares, axis=0))
    by_head = {pair.first: pair.distance for pair in comparison.pairs}
    mine = [by_head[head] for head in first.inspection.addresses]
    assert mine == pytest.approx(expected.tolist(), rel=1e-6)
    # The first layer of both reads the same.
    assert [pair.first.head.layer for pair in comparison.pairs][:2] == [1, 1]


def test_other_shapes_are_matched_by_measures_and_the_page_has_the_reason() -> None:
    comparison = other_shape()
    assert "2 heads" in comparison.reason or "size" in comparison.reason
    assert all(pair.second is not None for pair in comparison.pairs)
    page = render_comparison(comparison)
    assert "have no common places" in page
    assert "without a partner" in page


def test_the_page_is_safe_and_both_texts_are_compared() -> None:
    page = render_comparison(same_shape(), origin="Today <b>")
    assert page.count("<script") == 2
    assert "<i>" not in page
    assert "onerror=alert" not in page.split("<script")[0].replace("onerror=alert(2)&gt;", "")
    assert " style=" not in page
    assert not re.search(r"(src|href)=", page)
    assert "Where the two differ most" in page
    assert "{{" not in re.sub(r"(?s)<script.*|\{\{script\}\}", "", page)


def test_different_tokens_are_compared_at_the_end_only() -> None:
    first, second = same_shape().reports
    shifted = replace(second, input=replace(second.input, ids=second.input.ids[1:]))
    page = render_comparison(ModelComparison(first, shifted, same_shape().matches))
    assert "different tokens" in page


def test_json_has_both_reports_and_every_pair() -> None:
    message: Any = json.loads(json.dumps(comparison_json(other_shape()), allow_nan=False))
    assert message["matched_by"] == "measures"
    assert len(message["pairs"]) == 4
    assert len(message["second"]["rows"]) == 8


def test_models_that_read_other_things_are_refused() -> None:
    with pytest.raises(InputError, match="reads texts and pairs pairs"):
        compare_reports(measured(), pairs_report())
