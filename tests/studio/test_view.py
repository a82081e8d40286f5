"""What the page tells is exact, and what it keeps is what is seen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

from manyheads.lens.attention_maps.patterns import patterns
from manyheads.taps import Head
from tests.chromium import needs_chromium
from tests.studio import models
from tests.studio.browsing import TEXT, visit, wait_until
from tests.studio.live_server import LiveServer

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def pattern() -> torch.Tensor:
    """Where L1H2 of the model that is visited looks."""
    return patterns(models.decoder(), TEXT, [Head(1, 2)]).of(Head(1, 2)).weights


def shares_shown(page: Page) -> list[float]:
    """The shares that are response of one head at the chosen token."""
    line = page.locator(".attention-list > div").first.locator("li").first
    return [float(each) for each in re.findall(r"([\d.]+)%", line.text_content() or "")]


def rounded(weight: float) -> float:
    """A share as the page says it: more digits of a small one."""
    return round(100 * weight, 0 if weight >= 0.0995 else 1 if weight >= 0.00995 else 2)


def exported(page: Page, path: Path) -> Any:
    page.locator("#export").click()
    with page.expect_download() as waiting:
        page.get_by_role("menuitem", name="JSON").click()
    waiting.value.save_as(path)
    return json.loads(path.read_text("utf-8"))["sides"][0]


def test_shares_are_those_of_the_pattern(
    page: Page, studio: LiveServer, pattern: torch.Tensor
) -> None:
    visit(page, studio, h="L1H2")
    for place in range(len(pattern)):
        page.locator(".token").nth(place).click()
        expect(page.locator("#live")).to_contain_text(f"Token {place + 1},")
        best = pattern[place].topk(min(3, place + 1)).values.tolist()
        assert shares_shown(page) == [rounded(weight) for weight in best if weight >= 5e-4]


def test_exported_weights_are_those_of_the_pattern(
    page: Page, studio: LiveServer, pattern: torch.Tensor, tmp_path: Path
) -> None:
    visit(page, studio, h="L1H2")
    result = exported(page, tmp_path / "view.json")["rows"]["heads"]["L1H2"]
    for row, weights in zip(result, pattern, strict=True):
        assert (
            row["positions"] == weights.argsort(descending=True).tolist()[: len(row["positions"])]
        )
        assert row["weights"] == pytest.approx(weights[row["positions"]].tolist(), rel=1e-4)


def test_the_map_tells_the_weight_under_the_pointer(
    page: Page, studio: LiveServer, pattern: torch.Tensor
) -> None:
    visit(page, studio, h="L1H2", v="map")
    chart, tip = page.locator("canvas.map"), page.locator(".tip")
    expect(tip).to_contain_text("The strongest color is 100%")
    for query, key in torch.tril_indices(len(pattern), len(pattern)).T.tolist():
        # Names have 110 pixels at the left and 76 above, a cell has 30.
        chart.hover(position={"x": 125 + 30 * key, "y": 91 + 30 * query})
        weight = float(pattern[query, key])
        digits = 0 if weight >= 0.0995 else 1 if weight >= 0.00995 else 2
        expect(tip).to_contain_text(f"with a weight of {100 * weight:.{digits}f}%")


def test_a_cleared_text_leaves_nothing_behind(page: Page, studio: LiveServer) -> None:
    visit(page, studio, t=models.WORDS * 4, o="L0H3")
    expect(page.locator(".pager input")).to_be_visible()
    page.get_by_label("Text", exact=True).fill("")
    expect(page.locator(".place-views")).to_contain_text("Type a text above to start.")
    for part in (
        ".token",
        ".attention-list li",
        ".bars li",
        ".pager *",
        "[data-loss]",
        "svg.lines",
    ):
        expect(page.locator(part)).to_have_count(0)
    ink = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((part) => part)"
    assert not page.locator(".strip canvas").evaluate(ink)
    expect(page.locator(".place-tokens header")).not_to_contain_text("tokens")
    expect(page.locator(".place-predictions header p")).to_be_empty()
    expect(page.get_by_label("Measure that colors the heads")).to_be_hidden()
    expect(page).to_have_url(re.compile("t=&"))
    expect(page).not_to_have_url(re.compile("at="))
    # Heads stay as they were, and are response from the next text on.
    expect(page.locator(".cell.ablated")).to_have_attribute("data-head", "L0H3")
    page.reload()
    expect(page.locator(".place-views")).to_contain_text("Type a text above to start.")
    expect(page.get_by_label("Text", exact=True)).to_have_value("")
    page.get_by_label("Text", exact=True).fill(TEXT)
    expect(page.locator(".attention-list li").first).to_contain_text("%")


def test_lines_are_drawn_anew_for_another_width(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    lines = page.locator("svg.lines")
    expect(page.locator(".patterns button")).to_have_count(2)
    expect(lines).to_have_attribute("viewBox", re.compile("^0 0 560 "))
    page.set_viewport_size({"width": 500, "height": 900})
    expect(lines).not_to_have_attribute("viewBox", re.compile("^0 0 560 "))
    drawn = float((lines.get_attribute("viewBox") or "").split()[2])
    box = lines.bounding_box()
    assert box is not None
    assert box["width"] == pytest.approx(drawn, abs=1)


def test_a_map_fits_a_window_made_narrower(page: Page, studio: LiveServer) -> None:
    visit(page, studio, v="map")
    shape = "canvas => canvas.offsetWidth / canvas.offsetHeight - canvas.width / canvas.height"
    page.set_viewport_size({"width": 380, "height": 900})
    wait_until(page, "document.querySelector('canvas.map').offsetWidth < 380")
    page.wait_for_timeout(100)
    assert abs(page.locator("canvas.map").evaluate(shape)) < 0.01


def test_a_drawing_that_is_exported_leaves_the_pointer_alone(
    page: Page, studio: LiveServer
) -> None:
    visit(page, studio)
    page.locator("#export").click()
    with page.expect_download():
        page.get_by_role("menuitem", name="SVG").click()
    page.get_by_text("key", exact=True).locator("xpath=..").locator("text").nth(-1).click()
    expect(page.locator('.token[aria-selected="true"]')).to_have_attribute("data-index", "9")


def test_one_token_is_one_token(page: Page, studio: LiveServer) -> None:
    visit(page, studio, t="The")
    expect(page.locator(".place-tokens header")).to_contain_text("1 token")
    expect(page.locator(".place-tokens header")).not_to_contain_text("1 tokens")


def test_heads_that_were_let_go_stay_so(page: Page, studio: LiveServer) -> None:
    visit(page, studio, h="L0H1")
    page.get_by_label("Deselect L0H1").click()
    expect(page).to_have_url(re.compile("h=&"))
    page.reload()
    expect(page.locator(".bars li").first).to_contain_text("%")
    expect(page.get_by_label("Measure that colors the heads")).to_be_enabled()
    expect(page.locator(".cell.selected")).to_have_count(0)


def test_the_menu_closes_once_focus_has_left_it(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.locator("#export").click()
    expect(page.get_by_role("menuitem", name="PNG")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("menuitem", name="SVG")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#help")).to_be_focused()
    expect(page.locator("#exports")).to_be_hidden()
    expect(page.locator("#export")).to_have_attribute("aria-expanded", "false")
