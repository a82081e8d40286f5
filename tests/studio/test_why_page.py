"""The card "Why this word?" in a browser, and links that are cut with a click."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from tests.chromium import needs_chromium
from tests.studio import models
from tests.studio.browsing import visit
from tests.studio.live_server import LiveServer, live_server

pytestmark = needs_chromium

OTHER = "The dog sat on the mat. The dog sat"
QUESTIONS = [
    "When did the model know?",
    "Which heads spoke for it?",
    "From which words did it come?",
    "Which place matters?",
]
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def studio() -> Iterator[LiveServer]:
    store = [("tiny", models.decoder()), ("fills", models.masked()), ("sees", models.vision())]
    with live_server([*store, ("points", models.vectors())]) as result:
        yield result


def numbers(page: Page, selector: str) -> list[float]:
    texts = page.locator(selector).all_text_contents()
    return [float(text.replace("−", "-")) for text in texts]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_card_answers_four_questions(page: Page, studio: LiveServer, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, studio)
    first = page.locator(".bars .word").first.text_content()
    button = page.get_by_role("button", name="Why this word?")
    button.focus()
    page.keyboard.press("Enter")
    card = page.locator(".why")
    expect(card.locator("h3")).to_have_text(QUESTIONS)
    expect(card.get_by_role("heading", level=2)).to_be_focused()
    expect(card.get_by_role("heading", level=2)).to_have_text(re.compile(f"Why “{first.strip()}”"))
    # The logit lens, the waterfall and its sum.
    expect(card.locator(".layer-rows .layer-row")).to_have_count(4)
    expect(card.locator(".waterfall li")).to_have_count(9)
    parts = numbers(page, ".waterfall li:not(.is-sum) .number")
    [total] = numbers(page, ".waterfall .is-sum .number")
    assert sum(parts) == pytest.approx(total, abs=0.05)
    expect(card.locator(".strongest li")).to_have_count(10)
    # A layer opens to its heads by keyboard, and keeps the focus.
    fold = card.locator(".fold").nth(1)
    fold.focus()
    page.keyboard.press("Enter")
    expect(card.locator(".fold").nth(1)).to_be_focused()
    expect(card.locator(".waterfall .is-head")).to_have_count(4)
    # Lines begin at words and end at the prediction, inside the drawing.
    expect(card.locator(".route-word")).to_have_count(10)
    room = card.locator(".routes").evaluate("room => room.clientWidth")
    ends = card.locator(".route-lines path").evaluate_all(
        "all => all.map((path) => path.getBBox()).map((box) => [box.x, box.x + box.width])"
    )
    assert len(ends) > 6
    assert all(left >= 0 and right <= room for left, right in ends)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Another word, and none to compare with.
    card.get_by_label("The word to compare it with", exact=True).select_option("alone")
    expect(card.locator(".is-sum .part-name")).to_have_text("Logit")
    card.get_by_label("The word to explain", exact=True).select_option("another")
    typed = card.get_by_label("The word to explain, typed")
    expect(typed).to_be_focused()
    typed.fill("dog")
    page.keyboard.press("Enter")
    expect(card.get_by_role("heading", level=2)).to_have_text("Why “dog”?")
    card.get_by_role("button", name="Close").click()
    expect(card).to_be_hidden()
    expect(button).to_be_focused()


def test_kinds_that_arrive_late_leave_the_focus_where_it_is(page: Page, studio: LiveServer) -> None:
    waiting: list[Route] = []
    page.route("**/api/kinds", lambda route: waiting.append(route))
    visit(page, studio)
    page.get_by_role("button", name="Why this word?").click()
    card = page.locator(".why")
    fold, cut = card.locator(".fold").nth(1), card.locator(".route-list .plain").nth(2)
    fold.focus()
    page.keyboard.press("Enter")
    expect(card.locator(".waterfall .is-head")).to_have_count(4)
    expect(fold).to_be_focused()
    cut.focus()
    [route] = waiting
    kinds = route.fetch().json()
    kinds["heads"]["L1H0"] = [{"name": "induction", "score": 0.9}]
    route.fulfill(json=kinds)
    expect(card.locator(".waterfall .is-head small").first).to_have_text("induction")
    expect(cut).to_be_focused()


def test_places_are_measured_layer_by_layer_and_can_be_stopped(
    page: Page, studio: LiveServer
) -> None:
    visit(page, studio)
    page.get_by_role("button", name="Why this word?").click()
    card = page.locator(".why")
    start, counts = card.locator(".places-source .primary"), card.locator(".why-counts")
    source = card.get_by_label("Prompt to compare with")
    expect(counts).to_contain_text("Type another prompt with 10 tokens")
    expect(start).to_be_disabled()
    source.fill("The dog sat")
    expect(counts).to_contain_text("It has 3 tokens and the text 10")
    source.fill(OTHER)
    expect(counts).to_contain_text("ready")
    start.click()
    expect(card.locator(".places tbody td[data-layer='2']").first).to_be_visible()
    expect(start).to_have_text("Measure each place")
    expect(card.locator(".places .differs")).to_have_text(["cat → dog"] * 2)
    expect(card.locator(".places")).to_contain_text("1 token at the start is the same")
    expect(card.locator(".why-summary").last).to_contain_text("the difference is at")
    # Cells are reached by arrows, and said.
    card.locator("td[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(card.locator("td[data-row='0'][data-layer='1']")).to_be_focused()
    expect(card.locator(".place-tip")).to_contain_text("“cat”, layer 1:")
    # A run that is stopped keeps what it has.
    page.route(
        "**/api/why_places",
        lambda route: None if 'layer":1' in (route.request.post_data or "") else route.continue_(),
    )
    card.get_by_role("button", name="Attention", exact=True).click()
    start.click()
    expect(start).to_contain_text("Stop (layer 1 of 3)")
    start.click()
    expect(start).to_have_text("Measure each place")
    expect(card.locator(".places td.is-waiting").first).to_be_visible()
    expect(card.locator(".why-summary").last).to_contain_text("most is restored at")


def test_a_link_is_explained_by_a_click_cut_and_restored(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    before = page.locator(".bars li").first.text_content()
    target = page.locator(".link-target").first
    name = target.get_attribute("aria-label") or ""
    assert re.match(r"Explain the link of L\dH\d from “sat” to “.+”, weight \d", name)
    count = page.locator(".link-target").count()
    target.focus()
    page.keyboard.press("Enter")
    reasons = page.locator(".link-reasons")
    expect(reasons.locator("h3")).to_have_text(re.compile(r"Why does L\dH\d look from “sat” at"))
    expect(reasons.locator("h3")).to_be_focused()
    expect(reasons.locator(".why-summary")).to_contain_text("the mean of all tokens")
    expect(reasons.locator(".reasons")).to_have_count(3)
    expect(reasons.locator(".reasons li").first).to_be_visible()
    reasons.get_by_role("button", name="Cut this link").click()
    chip = page.locator(".cut-link")
    expect(chip).to_have_count(1)
    expect(reasons.get_by_role("button", name="Restore this link")).to_be_visible()
    expect(page.locator(".bars li").first).to_contain_text("pp")
    expect(page.locator(".link-target")).not_to_have_count(count)
    expect(page).to_have_url(re.compile(r"k=L0H1\.9\.\d"))
    # The address brings it back, another text takes it away.
    page.reload()
    expect(chip).to_have_count(1)
    page.get_by_role("tab", name="Map").click()
    expect(page.locator(".cut-hint")).to_be_hidden()
    page.keyboard.press("Tab")
    chip.click()
    expect(chip).to_have_count(0)
    expect(page.locator(".bars li").first).to_have_text(before or "")
    # In the map: the first cell of the selected token's row.
    expect(page.locator(".cut-hint")).to_contain_text("Click a cell")
    canvas = page.locator("canvas.map")
    expect(canvas).to_have_attribute("aria-label", re.compile("Map of L1H2"))
    box = canvas.bounding_box()
    assert box is not None
    cell = min(
        30, (min(760, page.locator(".map-frame > div").first.bounding_box()["width"]) - 118) // 10
    )  # type: ignore[index]
    canvas.click(position={"x": 110 + cell / 2, "y": 76 + 9.5 * cell})
    reasons.get_by_role("button", name="Cut this link").click()
    expect(chip).to_have_text(re.compile(r"L1H2 sat → The"))
    page.get_by_label("Text", exact=True).fill("The cat sat on the log")
    expect(page.locator(".token")).to_have_count(6)
    expect(chip).to_have_count(0)
    expect(reasons).to_be_hidden()


def test_a_route_can_be_cut_and_the_word_stays(page: Page, studio: LiveServer) -> None:
    visit(page, studio)
    page.get_by_role("button", name="Why this word?").click()
    title = page.locator(".why h2")
    expect(page.locator(".route-list li").first).to_be_visible()
    word, total = title.text_content(), page.locator(".is-sum .number").text_content()
    page.locator(".route-list button", has_text="Cut").first.click()
    expect(page.locator(".is-sum .number")).not_to_have_text(total or "")
    expect(title).to_have_text(word or "")
    expect(page.locator(".why-column > .quiet")).to_contain_text("that you changed")
    page.locator(".cut-link").click()
    expect(page.locator(".is-sum .number")).to_have_text(total or "")


def test_what_has_no_meaning_for_a_model_is_said(page: Page, studio: LiveServer) -> None:
    visit(page, studio, m="fills", t="The cat sat on[MASK] mat.", h="L0H0")
    page.get_by_role("button", name="Why this word?").click()
    reasons = page.locator(".why-reason:visible")
    expect(page.locator(".layer-rows .layer-row")).to_have_count(3)
    expect(reasons).to_have_count(2)
    expect(reasons.first).to_contain_text("The readout of this model is not linear")
    page.get_by_label("Model", exact=True).select_option("points")
    expect(page.locator(".why")).to_be_hidden()
    expect(page.locator(".why-open")).to_be_hidden()


def test_a_circuit_is_found_and_evaluated(page: Page, studio: LiveServer) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    visit(page, studio)
    page.get_by_role("button", name="Which circuit?").click()
    card = page.locator(".circuit-card")
    expect(card.get_by_role("heading", level=2)).to_be_focused()
    start, reason = card.locator(".circuit-run .primary"), card.locator(".why-reason").first
    expect(start).to_be_disabled()
    source = card.get_by_label("Corrupted text")
    source.fill("The dog sat")
    expect(reason).to_contain_text("do not align")
    card.get_by_role("button", name="Suggest one").click()
    expect(start).to_be_enabled()
    expect(source).not_to_have_value("The dog sat")
    # A search that is stopped leaves nothing behind.
    page.route("**/api/circuit", lambda _: None)
    start.click()
    expect(start).to_have_text("Stop")
    start.click()
    expect(start).to_have_text("Find the circuit")
    page.unroute("**/api/circuit")
    source.fill(OTHER)
    expect(card.get_by_label("The answer", exact=True)).to_be_visible()
    start.click()
    expect(card.locator(".circuit-edge[data-writer]")).to_have_count(20)
    expect(card.locator(".circuit-result > .why-reason")).to_contain_text("no standard error")
    slider = card.get_by_label("Number of edges")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(card.locator(".circuit-edge[data-writer]")).to_have_count(10)
    card.get_by_role("button", name="Keep only these edges").click()
    verdict = card.locator(".circuit-verdict")
    expect(verdict).to_contain_text(re.compile(r"Faithfulness −?\d.*With 10 edges", re.DOTALL))
    expect(verdict).to_contain_text("random edges")
    # A head that is picked by keyboard is selected in the whole page.
    node = card.locator(".circuit-node[data-node*='H']:not([data-node*='-'])").first
    head = node.get_attribute("data-node") or ""
    node.focus()
    page.keyboard.press("Enter")
    expect(card.locator(".circuit-result > .quiet")).to_contain_text(f"{head} is selected")
    expect(page).to_have_url(re.compile(f"h={head}"))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # Other edges have another verdict, and another text another circuit.
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(verdict).to_be_empty()
    page.get_by_label("Text", exact=True).fill("The cat sat on the log")
    expect(card.locator(".circuit-result")).to_be_hidden()
