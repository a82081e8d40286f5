"""Results in a notebook: plain HTML with their numbers, whatever their texts contain."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.lens.results.html_tables import html_pattern, html_table
from manyheads.models.build import Model, build

TEXTS = [[5, 6, 7, 5, 6], [8, 9, 10]]


@pytest.fixture(scope="module")
def model() -> Model:
    return build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)


def cells(html: str) -> list[str]:
    return re.findall(r"<td[^>]*>([^<]*)</td>", html)


def test_a_table_has_one_row_per_record() -> None:
    rows = [{"head": f"L0H{index}", "entropy": index / 3} for index in range(50)]
    html = html_table(rows, max_rows=5)
    assert html.count("<tr>") == 6
    assert cells(html)[:4] == ["L0H0", "0", "L0H1", "0.3333"]
    assert "and 45 more rows" in html


def test_texts_stay_texts() -> None:
    evil = "</td><script>alert(1)</script>"
    html = html_table([{evil: evil}])
    assert "<script" not in html
    assert cells(html) == ["&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;"]


def test_columns_without_values_are_left_out() -> None:
    html = html_table([{"a": 1, "b": None, "c": ""}, {"a": 1234567, "b": float("nan"), "c": ""}])
    assert html.count("<th ") == 1
    assert cells(html) == ["1", "1,234,567"]


def test_a_pattern_is_drawn_where_it_is_small() -> None:
    html = html_pattern(np.array([[1.0, 0.0], [0.25, 0.75]]), "L0H0 <b>")
    assert html.count("<rect") == 3
    assert "query 1, key 0: 0.250" in html
    assert "<b>" not in html
    assert "<rect" not in html_pattern(np.ones((65, 65)) / 65, "large")


def test_every_result_shows_itself(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    results: list[Any] = [
        lens.statistics(model, TEXTS, progress=False),
        lens.ablate(model, TEXTS, progress=False),
        lens.patterns(model, TEXTS).each[0],
        lens.ablate_together(model, TEXTS, ["L0H0"], progress=False),
        lens.top_keys(model, TEXTS)[0],
    ]
    for result in results:
        html = result._repr_html_()
        assert "<script" not in html
        assert html.startswith(("<div", "<pre"))
        result.show()
        assert str(result) in capsys.readouterr().out
    assert "<th" in results[1]._repr_html_()


def test_a_notebook_displays_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    notebook = SimpleNamespace(
        get_ipython=lambda: object(), display=SimpleNamespace(display=displayed.append)
    )
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    result = lens.statistics(model, TEXTS, progress=False)
    result.show()
    assert displayed == [result]
