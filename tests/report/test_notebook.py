"""What a notebook displays: a frame with a page of its own, small, and safe with any text."""

import re
from html import unescape
from pathlib import Path

import pytest

import manyheads
from manyheads.models.build import build
from manyheads.report.notebook import HeadView
from tests.report.small import EVIL, decoder


@pytest.fixture(scope="module")
def view() -> HeadView:
    return manyheads.show(decoder(), EVIL * 2, name="a <b>model</b>", progress=False)


def test_the_frame_holds_the_page(view: HeadView) -> None:
    frame = view._repr_html_()
    match = re.search(r'srcdoc="([^"]*)"', frame)
    assert match is not None
    assert unescape(match[1]) == view.page
    assert 'sandbox="allow-scripts"' in frame
    assert "://" not in view.page.replace("http://www.w3.org/2000/svg", "")


def test_text_and_names_stay_text(view: HeadView) -> None:
    assert view.page.count("<script") == 2
    assert "<b>model" not in view.page
    assert "onerror=alert" not in view.page.split("<script")[0]


def test_large_models_stay_below_a_megabyte() -> None:
    model = build("gpt2", layers=12, width=48, heads=12, vocabulary=200, seed=0)
    view = manyheads.show(model, [*range(5, 133)], progress=False)
    assert len(view._repr_html_()) < 1_000_000


def test_it_can_be_saved(view: HeadView, tmp_path: Path) -> None:
    view.save(tmp_path / "view.html")
    assert (tmp_path / "view.html").read_text("utf-8") == view.page
    assert "save() it" in repr(view)
