"""The first minute: the page opens on something to see, and says what is wrong where it is."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from manyheads import load
from manyheads.studio.examples import BUNDLED
from tests.chromium import needs_chromium
from tests.studio.browsing import TEXT, visit, wait_until
from tests.studio.live_server import LiveServer, live_server

pytestmark = needs_chromium

# No token occurs twice.
UNREPEATED = "The dog sat on it"


@pytest.fixture(scope="module")
def house() -> Iterator[LiveServer]:
    with live_server([(name, load(name)) for name in ("house-gpt", "house-bert")]) as result:
        yield result


def exported(page: Page, kind: str, path: Path) -> str:
    page.locator("#export").click()
    with page.expect_download() as waiting:
        page.get_by_role("menuitem", name=kind).click()
    waiting.value.save_as(path)
    return path.read_text("utf-8")


def test_it_opens_on_two_induction_heads_and_their_partner(page: Page, house: LiveServer) -> None:
    page.goto(f"http://127.0.0.1:{house.endpoint.port}/#v=lines")
    example = BUNDLED["house-gpt"][0]
    expect(page.get_by_label("Text", exact=True)).to_have_value(example.text)
    expect(page.locator(".picks b")).to_have_text(["L2H6", "L2H7", "L1H0"])
    expect(page.locator(".bars li").first).to_contain_text("he82%")
    expect(page.locator(".model .explained")).to_have_attribute("title", re.compile("Wikipedia"))
    # A full bar is 100%.
    filled = "bar => bar.offsetWidth / bar.parentElement.offsetWidth"
    wait_until(page, f"0.8 < ({filled})(document.querySelector('.bars i'))")
    assert page.locator(".bars i").first.evaluate(filled) < 0.85
    expect(page.locator(".shows")).to_have_text(example.about)
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("d")
    expect(page.get_by_label("Measure that colors the heads")).to_have_value("induction")
    # One button shows what both are for: the number runs down, and up again.
    experiment = page.locator(".experiment")
    page.evaluate(
        """() => {
          window.seen = new Set();
          const value = () => document.querySelector(".bars li .value");
          const look = () => (window.seen.add(value()?.textContent), requestAnimationFrame(look));
          look();
        }"""
    )
    experiment.click()
    expect(page.locator(".cell.ablated")).to_have_count(2)
    expect(page.locator(".bars li").filter(has_text=re.compile(r"^he6\.0%"))).to_be_visible()
    expect(experiment).to_have_text("Switch them on again")
    experiment.click()
    expect(page.locator(".bars li").first).to_contain_text("he82%")
    expect(experiment).to_have_text("Switch off both induction heads")
    assert len(page.evaluate("[...window.seen]")) > 3
    # Another model opens its own example, and a masked one its mask.
    page.get_by_label("Model", exact=True).select_option("house-bert")
    expect(page.get_by_label("Text", exact=True)).to_have_value(BUNDLED["house-bert"][0].text)
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("[MASK]")
    expect(page.locator(".bars li").first).to_contain_text("he100%")
    expect(page.get_by_role("button", name="Generate")).to_be_hidden()
    # The same view in Russian, with its numbers.
    page.get_by_role("button", name="Читать по-русски").click()
    expect(page.locator(".place-predictions h2")).to_have_text("Предсказанный токен")
    expect(page.locator(".bars li").first).to_contain_text("he100\u00a0%")
    expect(page.get_by_label("Метрика, задающая цвет голов")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "ru")


def test_a_tour_of_four_steps_ends_in_an_experiment(page: Page, house: LiveServer) -> None:
    """By keyboard alone; on a phone its card is at the bottom of the screen."""
    page.goto(f"http://127.0.0.1:{house.endpoint.port}/")
    card = page.get_by_role("dialog", name="What a head is")
    expect(card).to_contain_text("1 of 4")
    expect(card.get_by_role("button", name="Next")).to_be_focused()
    expect(page.locator(".atlas")).to_have_class(re.compile("toured"))
    # What is in sight already stays where it is.
    assert page.evaluate("scrollY") == 0
    expect(page.locator(".atlas")).to_be_in_viewport(ratio=0.9)
    for title in ("Where it looks", "What it is for", "What happens without it"):
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name=title)).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".tour")).to_contain_text("“he” fell from 82% to 6.0%")
    page.keyboard.press("Enter")
    expect(page.locator(".tour")).to_have_count(0)
    # It comes by itself once, and again from the help.
    page.goto("about:blank")
    page.goto(f"http://127.0.0.1:{house.endpoint.port}/")
    expect(page.locator(".bars li").first).to_contain_text("he82%")
    expect(page.locator(".tour")).to_have_count(0)
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#help").click()
    page.get_by_role("button", name="Take the tour").click()
    box = page.locator(".tour").bounding_box()
    assert box is not None
    assert (box["x"], box["width"], box["y"] + box["height"]) == (0, 390, 844)
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Back").click()
    page.keyboard.press("Escape")
    expect(page.locator(".tour")).to_have_count(0)
    wait_until(page, "scrollY === 0")


def test_an_example_brings_its_heads_and_a_pair_that_can_be_patched(
    page: Page, house: LiveServer
) -> None:
    page.goto(f"http://127.0.0.1:{house.endpoint.port}/#v=lines")
    page.get_by_label("Switch L2H6 off").click()
    page.get_by_role("button", name="Repeated treaty").click()
    expect(page.locator(".bars li").first).to_contain_text("a99%")
    expect(page.locator(".cell.ablated")).to_have_count(0)
    page.get_by_text("Patching", exact=True).press("Enter")
    expect(page.locator(".counts")).to_have_text("23 tokens here, 23 in the text: ready.")
    page.get_by_role("button", name="Patch each head in turn").click()
    expect(page.locator(".result")).to_contain_text(re.compile("restored most by L2H[67]"))


def test_a_measure_that_the_text_does_not_define_is_replaced_and_explained(
    page: Page, studio: LiveServer
) -> None:
    visit(page, studio, t=UNREPEATED)
    measure, why = page.get_by_label("Measure that colors the heads"), page.locator(".instead")
    expect(measure).to_have_value("previous_token")
    expect(why).to_contain_text("Induction is undefined on this text")
    expect(why).to_contain_text("“Previous token” instead")
    # Colors fade in.
    wait_until(
        page,
        """() => new Set([...document.querySelectorAll(".cell")]
          .map((cell) => getComputedStyle(cell).backgroundColor)).size > 2""",
    )
    expect(measure.locator('option[value="induction"]')).to_be_disabled()
    brackets = measure.locator('option[value="on_brackets"]')
    expect(brackets).to_have_text("On brackets: none in this text")
    expect(brackets).to_be_disabled()
    # What was selected comes back with a text that has it.
    page.get_by_label("Text", exact=True).fill(TEXT)
    expect(measure).to_have_value("induction")
    expect(why).to_be_hidden()
    expect(page).to_have_url(re.compile("c=induction"))


def test_a_single_token_has_a_measure_too(page: Page, studio: LiveServer) -> None:
    visit(page, studio, t="The")
    expect(page.locator(".instead")).to_contain_text("instead")
    assert page.get_by_label("Measure that colors the heads").input_value() != ""


def test_nothing_moves_while_somebody_types_or_points(page: Page, studio: LiveServer) -> None:
    # Kinds that take longer than a second have a line that says so, which comes and goes.
    page.route("**/api/kinds", lambda route: route.fulfill(json={"heads": {}, "nearest": {}}))
    visit(page, studio, t=UNREPEATED)
    page.evaluate(
        """() => {
          window.seen = new Set();
          const parts = ".run, .generate, .place-tokens, .place-heads .atlas";
          const look = () => {
            for (const each of document.querySelectorAll(parts)) {
              const box = each.getBoundingClientRect();
              window.seen.add([each.className, box.x, box.y + scrollY].join(" "));
            }
            requestAnimationFrame(look);
          };
          look();
        }"""
    )
    page.get_by_label("Text", exact=True).press_sequentially(" and on", delay=20)
    expect(page.locator(".token")).to_have_count(7)
    # The note about induction goes away with the second "on", and may take its room along.
    expect(page.locator(".instead")).to_be_hidden()
    expect(page.locator(".side")).to_have_attribute("aria-busy", "false")
    moved = [each for each in page.evaluate("[...window.seen]") if not each.startswith("atlas")]
    assert len(moved) == 3, moved
    tall = page.locator(".place-heads").evaluate("card => card.offsetHeight")
    page.locator('.cell[data-head="L0H0"]').hover()
    expect(page.locator(".head-tip")).to_contain_text("L0H0")
    assert page.locator(".place-heads").evaluate("card => card.offsetHeight") == tall


def test_the_loss_is_shown_once_whichever_heads_are_off(
    page: Page, studio: LiveServer, tmp_path: Path
) -> None:
    visit(page, studio)
    expect(page.locator(".place-tokens header")).not_to_contain_text("loss")
    with page.expect_response("**/api/tokens"):
        page.get_by_label("Switch L0H1 off").click()
    expect(page.locator(".loss")).to_contain_text("from")
    page.wait_for_timeout(100)
    side: Any = json.loads(exported(page, "JSON", tmp_path / "view.json"))["sides"][0]
    losses = side["losses"][1:]
    assert sum(losses) / len(losses) == pytest.approx(side["predictions"]["loss"], abs=1e-3)


def test_a_masked_model_selects_the_mask(page: Page, studio: LiveServer) -> None:
    visit(page, studio, m="fills", t="The cat sat on[MASK] mat. The cat sat", h="L0H0")
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("[MASK]")
    expect(page.locator(".place-predictions header")).to_contain_text("in place of [MASK]")
    for text in page.locator(".examples button").all_text_contents():
        page.get_by_role("button", name=text).click()
        expect(page.locator('.token[aria-selected="true"]')).to_have_text("[MASK]")


def test_token_counts_are_live_and_a_patch_that_cannot_work_is_not_offered(
    page: Page, studio: LiveServer
) -> None:
    visit(page, studio)
    page.get_by_text("Patching", exact=True).press("Enter")
    every = page.get_by_role("button", name="Patch each head in turn")
    expect(page.locator(".counts")).to_contain_text("type the other prompt")
    expect(every).to_be_disabled()
    page.get_by_label("Other prompt").fill("The dog sat on the mat.")
    expect(page.locator(".counts")).to_have_text("7 tokens here, 10 in the text: add 3 tokens.")
    expect(every).to_be_disabled()
    page.get_by_label("Text", exact=True).fill("The cat sat on the mat.")
    expect(page.locator(".counts")).to_have_text("7 tokens here, 7 in the text: ready.")
    expect(every).to_be_enabled()


def test_a_field_shows_its_limits(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    hint, button = page.locator(".hint"), page.get_by_role("button", name="Generate")
    expect(hint).to_be_hidden()
    for field, value, said in (
        ("Temperature", "99", "from 0, which always takes the most likely token, to 5"),
        ("Temperature", "", "to 5"),
        ("Tokens to generate", "", "from 1 to 512"),
        ("Tokens to generate", "2.5", "a whole number"),
        ("Tokens to generate", "0", "from 1 to 512"),
    ):
        before = page.get_by_label(field).input_value()
        page.get_by_label(field).fill(value)
        expect(hint).to_contain_text(said)
        expect(page.get_by_label(field)).to_have_attribute("aria-invalid", "true")
        expect(button).to_be_disabled()
        page.get_by_label(field).fill(before)
        expect(hint).to_be_hidden()
        expect(button).to_be_enabled()


def test_an_exported_picture_can_be_read_alone(
    page: Page, studio: LiveServer, tmp_path: Path
) -> None:
    """The PNG is drawn from the SVG."""
    visit(page, studio, at="4", c="previous_token")
    for view, title in (("Lines", "Attention from “the”"), ("Map", "queries down, keys across")):
        page.get_by_role("tab", name=view).click()
        drawing = exported(page, "SVG", tmp_path / "view.svg")
        words = re.findall(r"<text[^>]*>([^<]+)", drawing)
        # The text, its selected token, the heads by layer and number, both scales, the prediction.
        for token in ("The", "cat", "sat", "on", "the", "mat", "."):
            assert token in words
        assert any("selected: the, token 5" in word for word in words)
        assert {"H0", "H3", "L0", "L2", "0%", "Heads by previous token"} <= set(words)
        assert any(title in word for word in words)
        assert "Next token after “the”" in words
    assert words.count("0%") == 2


TINY = "button, select, summary, input"


def test_a_phone_has_large_targets_in_one_column(page: Page, studio: LiveServer) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, studio)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    small = page.locator(TINY).evaluate_all(
        """all => all.filter((each) => each.checkVisibility()).map((each) => {
          const { width, height } = each.getBoundingClientRect();
          return [each.textContent || each.ariaLabel, each.className, width, height];
        }).filter(([, name, wide, tall]) => tall < 44 || (wide < 44 && !name.includes("cell")))"""
    )
    assert small == []
    # The theme's button stays in the first row.
    rows = page.locator(".top h1, #theme").evaluate_all(
        "all => all.map((each) => each.getBoundingClientRect()).map((box) => box.y + box.bottom)"
    )
    assert rows[0] == pytest.approx(rows[1], abs=2)


LETTERS = {
    "Ж, мир": ["Ж", "м"],
    "مرحبا": ["م", "ر", "ح", "ب", "ا"],
    "👨‍👩‍👧 🇫🇷": ["👨‍👩‍👧", "🇫🇷"],
    "cafe\u0301": ["e\u0301"],
    "a\u200bb": ["ZWSP"],
}


def test_letters_stand_over_their_tokens(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    letters, parts = page.locator(".letter"), page.locator(".token.part")
    for text, expected in LETTERS.items():
        page.get_by_label("Text", exact=True).fill(text)
        expect(letters).to_have_text(expected)
        expect(page.locator(".attention-list li").first).to_contain_text("%")
        assert "\ufffd" not in page.locator("body").inner_text()
        # Every part of a letter is a byte, or a letter before its mark.
        shown = parts.all_text_contents()
        assert all(re.fullmatch(r"[0-9A-F]{2}( [0-9A-F]{2})*|e", each) for each in shown), shown
        widths = "all => all.reduce((sum, each) => sum + each.getBoundingClientRect().width, 0)"
        over, under = letters.evaluate_all(widths), parts.evaluate_all(widths)
        assert over == pytest.approx(under, abs=1)
        expect(parts.first).to_have_attribute("aria-label", re.compile(r"^\S+ ‹[0-9A-Fe ]+›$"))
