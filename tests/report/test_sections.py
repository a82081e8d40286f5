"""Labels have their score, interval and sample; sentences count pieces and heads correctly."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.head_kinds.kinds import BIAS, Kinds
from manyheads.lens.results.tables import ByHead
from manyheads.report import collect_report, render_report, sections
from manyheads.report.data import ReportData
from manyheads.report.sections import head_table
from tests.report.small import EVIL, WORDS, decoder, quick_kinds, report, with_importance

LABEL = Label(
    kind="duplicate-token",
    score=0.46,
    threshold=0.4,
    evidence="puts 46% of its weight there",
    error=0.05,
    interval=(0.36, 0.56),
    samples=64,
    unit="sequences",
    draws=(5, 5),
)


def labeled() -> ReportData:
    """The first head with a label, the second without, and the bias of all."""
    result = report()
    heads = result.statistics.addresses
    scores = ByHead(
        kind="scores of kinds",
        blocks=result.statistics.blocks,
        means={BIAS: np.linspace(-0.4, 0.4, len(heads))},
        errors={BIAS: np.full(len(heads), 0.03)},
    )
    near = replace(LABEL, score=0.31, draws=(0, 5), evidence="puts 31% there; it needs 0.40")
    kinds = Kinds(
        labels={head: (LABEL,) if head == heads[0] else () for head in heads},
        scores=scores,
        nearest=dict.fromkeys(heads[1:], near),
    )
    return replace(result, inspection=replace(result.inspection, kinds=kinds))


def data_of(page: str) -> Any:
    result = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert result is not None
    return json.loads(result[1])


def test_the_table_has_score_interval_and_sample_or_the_nearest_kind() -> None:
    result = labeled()
    _, body = head_table(result, result.measures())
    first, second, *_ = body.splitlines()
    assert "0.46 [0.36, 0.56],</span>" in first
    assert ">5 of 5 draws" in first
    assert "closest: duplicate-token, 0.31 of the 0.40 it needs" in second
    assert "it needs 0.40" in second


def test_the_page_gets_the_same_as_data_and_the_bias_as_a_measure() -> None:
    result = labeled()
    data = data_of(render_report(result, model_path="it", text_file="text.txt", made="now"))
    (label,) = data["heads"][0]["kinds"]
    assert (label["score"], label["interval"], label["sample"]) == (
        0.46,
        [0.36, 0.56],
        "5 of 5 draws, near the threshold 0.40",
    )
    assert data["heads"][1]["nearest"]["score"] == 0.31
    assert data["heads"][1]["why"].endswith("it needs 0.40")
    (bias,) = [each for each in data["measures"] if each["name"] == BIAS]
    assert bias["values"][0] == -0.4


def test_the_inspection_shows_labels_and_bias_in_its_table_and_rows() -> None:
    inspection = labeled().inspection
    rows = inspection.rows()
    label = "duplicate-token 0.46 ± 0.05 (5 of 5 draws, near the threshold 0.40)"
    assert rows[0]["kinds"] == label
    assert rows[1]["nearest_kind"].startswith("duplicate-token 0.31")
    assert (rows[0][BIAS], rows[0]["bias_error"]) == (-0.4, 0.03)
    table = inspection.table()
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["Kinds"][0] == label
    assert cells["Kinds"][1] == "mixed, nearest duplicate-token 0.31"
    assert cells["Bias"][0] == "−0.400 ±0.03"


def test_one_text_is_one_text() -> None:
    said: list[str] = []
    with quick_kinds():
        result = collect_report(
            decoder(layers=1), WORDS, name="it", on_progress=said.append, progress=False
        )
    assert result.statistics.metadata["texts"] == 1
    message = sections.about_model(result) + sections.importance(result) + sections.overview(result)
    assert "on 1 text, " in message
    assert "1 layer of 2 attention heads" in message
    assert "Means over 1 text, so the standard error is unknown." in message
    assert len(said) == 6


def test_several_texts_have_errors() -> None:
    message = sections.importance(report())
    assert "texts; whiskers are two standard errors." in message


def test_every_whisker_is_drawn_whole() -> None:
    result = with_importance(change=np.array([1.0, 0.1, 0.1, -0.2]), errors=np.full(4, 0.25))
    bars = re.findall(
        r'class="value" width="([\d.]+)%".*?x="([\d.]+)%" y="7" width="([\d.]+)%"',
        sections.importance(result),
    )
    width, start, spread = map(float, bars[0])
    # Two standard errors on each side of 1.0, of which 1.5 is the whole width.
    assert width == pytest.approx(100 / 1.5, abs=0.01)
    assert (start, spread) == pytest.approx((50 / 1.5, 100 / 1.5), abs=0.02)


def test_predictions_and_examples_have_a_place_and_hostile_names_stay_text() -> None:
    result = report()
    evil = dict.fromkeys(result.predictions.names, EVIL)
    page = sections.predictions(
        replace(result, predictions=replace(result.predictions, names=evil))
    )
    assert "<script" not in page
    assert "&lt;script" in page
    assert "the right token is" in page
    assert sections.examples(result).count("data-examples=") == 4
    unknown = replace(result.predictions, rows=(), unknown="it <b>outputs</b> vectors")
    page = sections.predictions(replace(result, predictions=unknown))
    assert page == "<p>No prediction: it &lt;b&gt;outputs&lt;/b&gt; vectors.</p>"


def test_every_line_of_the_picture_is_a_row_of_the_table() -> None:
    page = sections.compositions(report())
    edges = len(report().compositions)
    assert edges
    assert page.count("<title>") - page.count("<rect") == edges == page.count("</tr>") - 1
    none = replace(report(), compositions=(), unknown_compositions="it has one layer")
    assert sections.compositions(none) == "<p>Not measured: it has one layer.</p>"


def test_one_head_is_one_head() -> None:
    with quick_kinds():
        result = collect_report(decoder(heads=1), WORDS * 4, name="it", by="none", progress=False)
    assert "2 layers of 1 attention head, 2 in all" in sections.about_model(result)
    assert "Not measured: it was switched off." in sections.importance(result)
