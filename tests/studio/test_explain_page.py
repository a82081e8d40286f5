"""The page How attention works: its steps, its numbers, and who can use it."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.chromium import needs_chromium
from tests.studio.live_server import LiveServer

pytestmark = needs_chromium

TEXT = "The cat sat on the mat. The cat sat"
LAYER = ["tokens", "embeddings", "qkv", "rotate", "scores", "matrix", "scaling", "mask", "softmax"]
LAYER += ["mix", "heads", "residual", "feedforward", "next"]
MEMORY, PACKING = ["row", "split", "transpose", "shared"], ["padded", "cost", "packed", "blocks"]
# Parts of the drawing without a name, and what is wider than the window.
FAULTS = """() => {
  const named = [...document.querySelectorAll("#stage [role]")];
  const nameless = named.filter((part) => !part.ariaLabel).map((part) => part.className);
  const wide = document.documentElement.scrollWidth - innerWidth;
  const texts = ["title", "words", "formula", "readout"];
  const empty = texts.filter((id) => !document.getElementById(id).textContent);
  const odd = document.body.innerText.match(/undefined|NaN|\\[object|null/g) ?? [];
  return [...nameless, ...(wide > 0 ? [`${wide} too wide`] : []), ...empty, ...odd];
}"""


@pytest.fixture(autouse=True)
def still(page: Page) -> None:
    """Nothing moves, as readers who dislike it may choose."""
    page.emulate_media(reduced_motion="reduce")


def visit(page: Page, studio: LiveServer, **state: str) -> None:
    fields = {"m": "tiny", "t": TEXT, "l": "1", "h": "2"} | state
    said = "&".join(f"{key}={value}" for key, value in fields.items())
    page.goto(f"http://127.0.0.1:{studio.endpoint.port}/explain.html#{said}")
    expect(page.locator("#title")).not_to_be_empty()


def steps(page: Page) -> list[str]:
    names: list[str] = page.locator("#progress button").evaluate_all(
        "all => all.map((each) => each.dataset.step)"
    )
    return names


def walk(page: Page) -> list[str]:
    """Every title from the first step to the last, by keyboard, each step without a fault."""
    titles: list[str] = []
    for number in range(len(steps(page))):
        expect(page.locator("#count")).to_have_text(re.compile(rf"^{number + 1} / "))
        assert page.evaluate(FAULTS) == [], titles
        titles.append(page.locator("#title").inner_text())
        page.keyboard.press("ArrowRight" if number % 2 else "PageDown")
    return titles


def test_a_decoder_is_walked_by_keyboard_at_both_widths_and_in_both_themes(
    page: Page, studio: LiveServer
) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    visit(page, studio)
    assert steps(page) == LAYER + MEMORY + PACKING
    titles = walk(page)
    assert len(set(titles)) == len(titles) == 22
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#progress [aria-current=step]")).to_have_attribute("data-step", "packed")
    # The address remembers the step.
    expect(page).to_have_url(re.compile("s=packed"))
    page.reload()
    expect(page.locator("#title")).to_have_text("Laid end to end")
    expect(page.locator("#facts")).to_contain_text("Measured")
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.locator("#progress button").first.click()
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("#present")).to_be_hidden()
    assert walk(page) == titles


def test_numbers_appear_where_the_pointer_or_the_focus_is(page: Page, studio: LiveServer) -> None:
    visit(page, studio, s="scores")
    readout, stage = page.locator("#readout"), page.locator("#stage")
    stage.locator("[data-key=bn0]").hover()
    expect(readout).to_have_text(re.compile(r"“sat” · “The” = .+ \+ … = −?\d"))
    # One stop of the Tab key; from there the arrows, while the step stays.
    assert stage.locator("[tabindex='0']").count() == 1
    stage.locator("[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text("key of")
    page.keyboard.press("Shift+ArrowRight")
    expect(readout).to_contain_text("channel 0")
    expect(page.locator("#progress [aria-current=step]")).to_have_attribute("data-step", "scores")
    # Another query, by click and by the list.
    stage.get_by_role("button", name="Query “mat”, token 5").click()
    expect(page.locator("#words")).to_contain_text("“mat”")
    page.get_by_role("combobox", name="Query").select_option("8")
    expect(page.locator("#words")).to_contain_text("“cat”")
    # The softmax is computed in the page, at 1 as in the model.
    page.locator("[data-step=softmax]").click()
    before = page.locator("[data-key=bn0]").inner_text()
    heat = page.get_by_role("slider", name=re.compile("Temperature"))
    expect(heat).to_have_attribute("aria-valuetext", "1, as the model has it")
    heat.press("End")
    expect(page.locator("#temperature-now")).to_have_text("10.0")
    flat = [page.locator(f"[data-key=bn{key}]").inner_text() for key in range(9)]
    assert all(5 < float(text.removesuffix("%")) < 20 for text in flat)
    assert flat[0] != before
    page.locator("[data-step=mix]").click()
    expect(page.locator("#facts")).to_contain_text("not the model's own")
    page.locator("[data-step=softmax]").click()
    heat.fill("0")
    page.locator("[data-step=mix]").click()
    expect(page.locator("#facts .good")).to_contain_text("differs by at most")
    # Layer and head by sliders, and another text.
    page.get_by_role("slider", name="Layer").fill("2")
    page.get_by_role("slider", name="Head").press("ArrowRight")
    expect(page).to_have_url(re.compile("l=2&h=3"))
    page.get_by_role("textbox", name="Text").fill(TEXT * 4)
    expect(page.locator("#cut")).to_contain_text("first 24 of")
    page.get_by_role("textbox", name="Text").fill("Rome")
    expect(page.locator("#stage .x-chip:not(.leaving)")).to_have_count(2)
    # Motion: what both steps have moves.
    page.emulate_media(reduced_motion="no-preference")
    page.locator("[data-step=embeddings]").click()
    assert page.evaluate("document.getAnimations().length") > 5


def test_an_encoder_an_image_and_a_class_in_russian(page: Page, studio: LiveServer) -> None:
    visit(page, studio, m="fills", l="0", h="1")
    assert "rotate" not in steps(page)
    page.locator("[data-step=mask]").click()
    expect(page.locator("#words")).to_contain_text("no mask")
    page.locator("[data-step=residual]").click()
    expect(page.locator("#formula")).to_have_text("x = norm(x + attention(x))")
    page.locator("#language").click()
    expect(page.locator("#title")).to_have_text("Прибавляется к потоку")
    page.locator("#present").click()
    expect(page.locator("html")).to_have_class("presenting")
    size = "e => parseFloat(getComputedStyle(e).fontSize)"
    assert page.locator("#words").evaluate(size) >= 22
    for step in ("matrix", "cost"):
        page.locator(f"[data-step={step}]").click()
        assert page.evaluate(FAULTS) == []
    page.keyboard.press("Escape")
    expect(page.locator("html")).not_to_have_class("presenting")
    page.locator("#language").click()
    expect(page.locator("#title")).to_have_text("What padding costs")
    # An image is shrunk, and has no sentences.
    visit(page, studio, m="sees", l="0", h="0", s="tokens")
    expect(page.locator("#stage .x-patch")).to_have_count(16)
    assert not set(PACKING) & set(steps(page))
    walk(page)


def test_a_mistake_is_explained(page: Page, studio: LiveServer) -> None:
    visit(page, studio, s="padded", m="none", l="99", h="99", at="77")
    expect(page.locator("#layer-now")).to_have_text("2 / 2")
    page.get_by_role("textbox", name="Sentences").fill("a\nb\nc\nd")
    expect(page.locator("#error")).to_contain_text("1 to 3")
    # The studio links to the page.
    page.goto(f"http://127.0.0.1:{studio.endpoint.port}/#m=tiny&t={TEXT}")
    page.locator("#explain-link").click()
    expect(page.locator("#title")).to_have_text("Tokens")
