"""The page in a browser, as a person uses it."""

import json
import re
import statistics
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from manyheads.studio.generation import WatchedGeneration
from tests.chromium import needs_chromium
from tests.studio import models
from tests.studio.browsing import PATIENCE, TEXT, visit
from tests.studio.live_server import LiveServer, live_server

pytestmark = needs_chromium


def loss(page: Page, side: int = 0) -> float:
    return float(page.locator("[data-loss]").nth(side).get_attribute("data-loss") or "nan")


def test_typing_shows_tokens(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    expect(page.locator(".token")).to_have_count(10)
    page.get_by_label("Text", exact=True).fill("the dog sat on the log")
    expect(page.locator(".token")).to_have_count(6)
    expect(page.locator(".place-tokens header")).to_contain_text("6 tokens")
    expect(page).to_have_url(re.compile("t=the.dog"))


def test_pointing_at_a_token_tells_where_heads_look(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.locator(".token").nth(3).hover()
    attention = page.locator(".attention-list > div")
    expect(attention.nth(0)).to_contain_text("on attends to")
    expect(attention.nth(1)).to_contain_text("on is attended to by")
    expect(attention.nth(0).locator("li")).to_have_count(2)
    # A token sees no later one, so that the first of the text looks at itself alone.
    page.locator(".token").nth(0).hover()
    expect(attention.nth(0).locator("li").first).to_contain_text("The 100%")


def test_the_keyboard_is_enough(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.locator(".strip").focus()
    page.keyboard.press("Home")
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("The")
    page.keyboard.press("ArrowRight")
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("cat")
    expect(page.locator("#live")).to_contain_text("Token 2, cat")
    page.locator('.cell[data-head="L0H0"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    expect(page.locator('.cell[data-head="L1H0"]')).to_have_attribute("aria-selected", "true")
    page.keyboard.press("o")
    expect(page.locator('.cell[data-head="L1H0"]')).to_have_class(re.compile("ablated"))
    expect(page.locator('.cell[data-head="L1H0"]')).to_have_attribute(
        "aria-label", re.compile("Layer 1, head 0.*switched off")
    )


def test_switching_a_head_off_moves_the_answer(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    before = loss(page)
    page.get_by_label("Switch L0H1 off").click()
    expect(page.locator(".loss")).to_contain_text(f"from {before:.3f}")
    zero = loss(page)
    assert zero != before
    listed = page.locator(".attention-list li", has_text="switched off")
    expect(listed.locator(".who").first).to_have_text("L0H1")
    page.get_by_role("button", name="Mean").click()
    expect(page.locator(f'[data-loss="{zero}"]')).to_have_count(0)
    expect(page).to_have_url(re.compile("o=L0H1"))
    page.get_by_role("button", name="Restore all heads").click()
    expect(page.locator(f'[data-loss="{before}"]')).to_have_count(1)


def test_two_sides_are_compared(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side")).to_have_count(2)
    difference = page.locator("#difference")
    expect(difference).to_contain_text("overlap")
    expect(difference.locator("tbody")).to_contain_text("other")
    # It starts from the head that differs most, above both sides.
    most = difference.locator(".changes .head-link").first.text_content() or ""
    for place in range(2):
        picks = page.locator(".side").nth(place).locator(".picks b")
        expect(picks.first).to_have_text(most)
    expect(difference.locator("tbody tr", has_text="Head")).to_contain_text(most + most)
    box, below = (page.locator(part).bounding_box() for part in ("#difference", "#sides"))
    assert box is not None
    assert below is not None
    assert box["y"] + box["height"] <= below["y"]
    expect(difference.locator("figure")).to_contain_text("Rows are queries, columns are keys.")
    # The same model with the same head on the same text is no different.
    page.get_by_label("Model", exact=True).nth(1).select_option("tiny")
    side = page.locator(".side").nth(1)
    expect(side.locator(".picks li").first).to_contain_text("L")
    for head in side.locator(".picks b").all_text_contents():
        side.get_by_label(f"Deselect {head}").click()
    side.locator(f'.cell[data-head="{most}"]').click()
    expect(difference.locator("[data-overlap]")).to_have_attribute(
        "data-overlap", re.compile("^1.0|^0.99")
    )
    # Two texts.
    side.get_by_label("Text", exact=True).fill("The dog sat on the mat. The dog sat")
    expect(difference.locator("[data-overlap]")).not_to_have_attribute(
        "data-overlap", re.compile("^1.0|^0.99")
    )


def test_a_single_model_is_compared_with_its_unchanged_self(page: Page) -> None:
    with live_server([("tiny", models.decoder())]) as alone:
        visit(page, alone, o="L0H1")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator(".side").nth(1).locator(".cell.ablated")).to_have_count(0)
        links = page.locator("#difference .changes .head-link")
        # Heads of the first layer cannot differ.
        expect(links.first).to_have_text(re.compile("L[12]H"))
        second = links.nth(1).text_content() or ""
        links.nth(1).click()
        for place in range(2):
            expect(page.locator(".side").nth(place).locator(".picks b").first).to_have_text(second)
        page.goto("about:blank")


def test_the_predictions_are_beside_the_text_and_stay_in_sight(page: Page) -> None:
    with live_server([("deep", models.decoder(layers=30, heads=2, width=16))]) as deep:
        visit(page, deep, m="deep", h="L29H1")
        bars, prompt = page.locator(".bars"), page.get_by_label("Text", exact=True)
        first, text = bars.bounding_box(), prompt.bounding_box()
        assert first is not None
        assert text is not None
        assert first["x"] > text["x"] + text["width"]
        assert first["y"] < text["y"] + text["height"]
        page.evaluate("scrollTo(0, 300)")
        expect(bars).to_be_in_viewport()
        # Where the column is higher than the window it scrolls, and nothing covers the heads.
        page.locator(".picks").scroll_into_view_if_needed()
        expect(page.locator(".summary.beside")).to_be_in_viewport()
        above, below = (
            page.locator(f".place-{name}").bounding_box() for name in ("predictions", "heads")
        )
        assert above is not None
        assert below is not None
        assert above["y"] + above["height"] < below["y"]
        expect(page.locator(".head-number")).to_have_text(["H0", "H1"])
        # On a phone the first prediction stays at the bottom.
        page.set_viewport_size({"width": 390, "height": 844})
        for part in (".place-text", ".picks", ".place-views"):
            page.locator(part).scroll_into_view_if_needed()
            summary = page.locator(".summary:not(.beside)")
            expect(summary).to_be_in_viewport()
            expect(summary).to_contain_text("Next token: ")
        page.goto("about:blank")


def test_lines_and_ticks_have_legends(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    expect(page.locator(".place-predictions .legend")).to_be_empty()
    page.get_by_label("Switch L0H1 off").click()
    expect(page.locator(".place-predictions .legend")).to_contain_text("before the change")
    wavy = page.locator(".place-tokens .legend .wavy")
    expect(wavy).to_have_count(1 if page.locator(".token.surprise").count() else 0)
    page.locator("#help").click()
    expect(page.locator("#guide")).to_contain_text("Copy the URL to return to this view")


def test_a_head_in_a_result_is_selected_by_a_click(page: Page, studio: LiveServer) -> None:
    visit(page, studio, h="L0H1", o="L2H3")
    page.locator(".place-predictions .head-link").click()
    expect(page.locator(".picks b")).to_have_text(["L0H1", "L2H3"])
    # By key, since the page may still move under a pointer.
    page.get_by_text("Patching", exact=True).press("Enter")
    page.get_by_label("Other prompt").fill("The dog sat on the mat. The dog sat")
    page.get_by_role("button", name="Patch each head in turn").click()
    best = page.locator(".result .head-link").first
    name = best.text_content() or ""
    best.click()
    expect(page.locator(f'.cell[data-head="{name}"]')).to_have_class(re.compile("selected"))


def test_vectors_move_when_heads_are_off(page: Page) -> None:
    with live_server([("vectors", models.vectors())]) as studio:
        page.goto(f"http://127.0.0.1:{studio.endpoint.port}/#v=lines")
        expect(page.locator('.token[aria-selected="true"]')).to_have_text("it")
        expect(page.locator(".bars")).to_contain_text("Switch heads off")
        page.locator(".picks button").first.click()
        expect(page.locator(".bars li").first).to_contain_text(re.compile(r"whole text0\.\d{3}"))
        expect(page.locator(".place-predictions .legend")).to_contain_text("unchanged vector")
        page.goto("about:blank")


def test_a_wait_for_kinds_shows_how_far_they_are(page: Page, studio: LiveServer) -> None:
    running = {"model": "tiny", "label": "reading", "fraction": 0.25, "seconds": 7}
    page.route("**/api/kinds_progress", lambda route: route.fulfill(json=running))
    # They come when the page has shown that it waits, however long that takes here.
    waiting: list[Any] = []
    page.route("**/api/kinds", lambda route: waiting.append(route))
    visit(page, studio)
    says = "Kinds of 12 heads: reading 25%; 7 seconds so far."
    expect(page.locator(".measuring")).to_have_text(says)
    # The line has a place of its own, so that the card does not jump.
    for width in (390, 1400):
        page.set_viewport_size({"width": width, "height": 1000})
        with_line, without = page.locator(".place-heads").evaluate(
            """card => {
              const line = card.querySelector(".measuring"), text = line.textContent;
              const tall = card.offsetHeight;
              line.textContent = "";
              const empty = card.offsetHeight;
              line.textContent = text;
              return [tall, empty];
            }"""
        )
        assert with_line == without
    assert len(waiting) == 1
    waiting[0].fulfill(json={"heads": {}, "nearest": {}})
    expect(page.locator(".measuring")).to_be_empty()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 tokens are never all there: from the fourth on, each waits until the page lets go."""
    step = WatchedGeneration.step

    def held(self: WatchedGeneration, cancelled: Any) -> Any:
        end = time.monotonic() + PATIENCE / 1000
        if self._request.config.max_new_tokens == 500 and self._step == 3:
            while not cancelled() and time.monotonic() < end:
                time.sleep(0.02)
        return step(self, cancelled)

    monkeypatch.setattr(WatchedGeneration, "step", held)


@pytest.mark.usefixtures("endless")
def test_writing_shows_tokens_as_they_come(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.get_by_label("Tokens to generate").fill("6")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Text", exact=True)).not_to_have_value(TEXT)
    assert page.get_by_label("Text", exact=True).input_value().startswith(TEXT)
    # What was generated is marked, with its probability, and can be taken back.
    expect(page.locator(".token.new").first).to_have_attribute(
        "aria-label", re.compile(r"generated, probability [\d.]+%$")
    )
    expect(page.locator(".token").first).not_to_have_class(re.compile("new"))
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Text", exact=True)).to_have_value(TEXT)
    expect(page.locator(".token.new")).to_have_count(0)
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()
    page.get_by_label("Tokens to generate").fill("500")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".token.new").first).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Generate")).to_be_visible()
    assert studio.quiet_within(20)


def test_text_with_line_ends_of_any_kind_is_undone(page: Page, studio: LiveServer) -> None:
    def with_line_ends(route: Route) -> None:
        response = route.fetch()
        lines = [json.loads(line) for line in response.text().strip().split("\n")]
        lines[0]["text"] = "\r\nso\rit sat\n"
        route.fulfill(response=response, body="".join(json.dumps(line) + "\n" for line in lines))

    page.route("**/api/generate", with_line_ends)
    visit(page, studio)
    page.get_by_label("Tokens to generate").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Text", exact=True)).to_have_value(re.compile(r"\nso\nit sat\n"))
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Text", exact=True)).to_have_value(TEXT)


@pytest.mark.usefixtures("endless")
def test_what_is_typed_while_it_writes_is_kept(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.get_by_label("Tokens to generate").fill("500")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".token.new").first).to_be_visible()
    page.get_by_label("Text", exact=True).fill("the dog sat on the log")
    expect(page.locator(".token")).to_have_count(6)
    expect(page.get_by_label("Text", exact=True)).to_have_value("the dog sat on the log")
    assert studio.quiet_within(20)


def test_a_view_is_exported(page: Page, studio: LiveServer, tmp_path: Path) -> None:
    visit(page, studio)
    result = {}
    for kind in ("PNG", "SVG", "JSON"):
        page.locator("#export").click()
        with page.expect_download() as waiting:
            page.get_by_role("menuitem", name=kind).click()
        result[kind] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(result[kind])
    assert result["PNG"].read_bytes().startswith(b"\x89PNG")
    drawing = result["SVG"].read_text("utf-8")
    assert drawing.startswith("<svg")
    assert "L0H1" in drawing
    numbers: dict[str, Any] = json.loads(result["JSON"].read_text("utf-8"))["sides"][0]
    assert numbers["tokens"][:2] == ["The", " cat"]
    assert len(numbers["rows"]["heads"]["L1H2"]) == 10


def test_the_address_brings_the_view_back(page: Page, studio: LiveServer) -> None:
    visit(page, studio, h="L2H0", o="L0H3", w="mean", at="4", v="map", c="entropy")
    expect(page.locator(".cell.selected")).to_have_attribute("data-head", "L2H0")
    expect(page.locator(".cell.ablated")).to_have_attribute("data-head", "L0H3")
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("the")
    expect(page.locator("canvas.map")).to_be_visible()
    expect(page.get_by_role("button", name="Mean")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_label("Measure that colors the heads")).to_have_value("entropy")


def test_heads_are_patched_from_another_prompt(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    # By key, since the page may still move under a pointer.
    page.get_by_text("Patching", exact=True).press("Enter")
    page.get_by_label("Other prompt").fill("The dog sat on the mat. The dog sat")
    page.get_by_role("button", name="Patch each head in turn").click()
    expect(page.locator(".patch")).to_contain_text("restored most by L")
    expect(page.get_by_label("Measure that colors the heads")).to_have_value("patching")
    page.get_by_role("button", name="Patch the selected heads").click()
    expect(page.locator(".cell.patched")).to_have_count(2)
    expect(page.locator(".loss")).to_contain_text("KL divergence")


def test_heads_are_colored_by_kind_and_by_their_worth(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    measure = page.get_by_label("Measure that colors the heads")
    measure.select_option("kind")
    expect(page.locator(".place-heads .scale")).to_be_hidden()
    measure.select_option("worth")
    expect(page.locator(".worth")).to_contain_text("these values are exact")
    expect(page.locator(".cell.estimate")).to_have_count(0)
    expect(page.locator('.cell[data-head="L0H1"]')).to_have_attribute(
        "aria-label", re.compile(r"Worth for this prediction −?[\d.]+")
    )
    # The pattern of every head in its square, and out again.
    page.get_by_role("button", name="Patterns", exact=True).click()
    expect(page.locator(".cell canvas")).to_have_count(12)
    page.get_by_role("button", name="Patterns", exact=True).click()
    expect(page.locator(".cell canvas")).to_have_count(0)
    # Another prediction has its own, also from a link.
    before = page.locator('.cell[data-head="L0H1"]').get_attribute("aria-label") or ""
    page.locator(".token").nth(4).click()
    expect(page.locator('.cell[data-head="L0H1"]')).not_to_have_attribute("aria-label", before)
    expect(page).to_have_url(re.compile("c=worth"))
    page.reload()
    expect(page.locator(".worth")).to_contain_text("these values are exact")


def test_eight_thousand_tokens_stay_fluid(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.get_by_label("Text", exact=True).fill(models.WORDS * 385)
    expect(page.locator(".place-tokens header")).to_contain_text(re.compile(r"8,\d{3} tokens"))
    # Only tokens in sight are there, wherever one scrolls.
    assert page.locator(".token").count() < 1000
    page.locator(".strip").evaluate("strip => strip.scrollTo(0, strip.scrollHeight / 2)")
    middle = page.locator(".token").nth(300)
    # The strip is drawn anew at the next frame.
    expect(middle).to_have_attribute("data-index", re.compile(r"^[2-5]\d{3}$"))
    assert page.locator(".token").count() < 1000
    middle.click()
    expect(page.locator(".attention-list > div").first).to_contain_text("%")
    expect(page.locator(".pager")).to_contain_text("of 8,")
    # A frame is drawn while the model is at work: the page itself never waits, and draws only what
    # comes into sight. The machine may be busy in a few of the frames.
    steps = page.evaluate(
        """async () => {
          const strip = document.querySelector(".strip");
          const steps = [];
          for (let step = 0; step < 21; step += 1) {
            const before = new Set(strip.querySelectorAll(".token"));
            const begun = performance.now();
            strip.scrollTop += 90;
            await new Promise(requestAnimationFrame);
            const milliseconds = performance.now() - begun;
            const tokens = [...strip.querySelectorAll(".token")];
            steps.push([milliseconds, tokens.filter((token) => !before.has(token)).length]);
          }
          return steps;
        }"""
    )
    milliseconds, drawn = zip(*steps, strict=True)
    assert statistics.median(milliseconds) < 500
    assert 0 < max(drawn) < 100


def test_a_model_that_sees_is_shown_an_image(page: Page, studio: LiveServer) -> None:
    visit(page, studio, m="sees", t="", h="L0H0,L1H1")
    page.get_by_role("button", name="Use an example image").click()
    expect(page.locator(".image-views canvas")).to_have_count(3)
    expect(page.locator(".bars li")).to_have_count(5)
    page.locator(".image-views canvas").first.hover(position={"x": 20, "y": 20})
    expect(page.locator(".image-views canvas").nth(1)).to_have_attribute(
        "aria-label", re.compile("L0H0 from row 1, column 1")
    )
    page.locator("#export").click()
    with page.expect_download() as waiting:
        page.get_by_role("menuitem", name="PNG").click()
    assert Path(waiting.value.path()).read_bytes().startswith(b"\x89PNG")


def test_a_dropped_image_is_read(page: Page, studio: LiveServer, tmp_path: Path) -> None:
    from PIL import Image

    visit(page, studio, m="sees", t="", h="L0H0")
    Image.new("RGB", (90, 40), (200, 30, 60)).save(tmp_path / "red.png")
    page.get_by_label("Choose an image").set_input_files(tmp_path / "red.png")
    expect(page.locator(".image-views canvas")).to_have_count(2)


def test_all_of_an_image_is_read_in_the_size_of_the_model(page: Page, tmp_path: Path) -> None:
    from PIL import Image

    shown = Image.new("RGB", (64, 32), (200, 0, 0))
    shown.paste((0, 200, 0), (0, 0, 12, 32))
    shown.save(tmp_path / "edge.png")
    images: list[dict[str, Any]] = []

    def keep(request: Any) -> None:
        sent = request.post_data_json if request.method == "POST" else {}
        if sent and sent.get("image"):
            images.append(sent["image"])

    page.on("request", keep)
    with live_server([("sees", models.vision()), ("large", models.vision(image=48))]) as studio:
        visit(page, studio, m="sees", t="", h="L0H0")
        page.get_by_label("Choose an image").set_input_files(tmp_path / "edge.png")
        expect(page.locator(".image-views canvas")).to_have_count(2)
        assert {(each["width"], each["height"]) for each in images} == {(32, 32)}
        pixels = b64decode(images[-1]["data"])
        assert pixels[1] > 150 > pixels[0], "the edge was cut off"
        with page.expect_request(lambda request: '"width":48' in (request.post_data or "")):
            page.get_by_label("Model", exact=True).select_option("large")
        # Leave the page before the studio ends.
        page.goto("about:blank")


def test_a_bad_request_shows_its_error(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    # By key, since the page may still move under a pointer.
    page.get_by_text("Patching", exact=True).press("Enter")
    page.get_by_label("Other prompt").fill(TEXT)
    page.get_by_role("button", name="Patch each head in turn").click()
    expect(page.locator("#error")).to_contain_text("for both prompts")
    # The page goes on.
    page.get_by_label("Text", exact=True).fill("the dog")
    expect(page.locator(".token")).to_have_count(2)


def test_a_link_with_nonsense_opens_all_the_same(page: Page, studio: LiveServer) -> None:
    visit(page, studio, m="none", h="L99H99,<b>,L0H0", o="L0H99", at="99999", v="cube", c="nothing")
    expect(page.locator(".cell.selected")).to_have_count(1)
    expect(page.locator('.token[aria-selected="true"]')).to_have_text("sat")


def test_the_page_asks_nobody_else(page: Page, studio: LiveServer) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    visit(page, studio)
    assert urls
    assert all(
        url.startswith((f"http://127.0.0.1:{studio.endpoint.port}/", "blob:")) for url in urls
    )
