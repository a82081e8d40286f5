"""The page in a browser: hover, lines, map, the way back, sorting, themes, and nothing else."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyheads import show
from manyheads.report import compare_reports, render_comparison
from manyheads.report.page import render_report, write_report
from tests.chromium import needs_chromium, open_browser
from tests.report.small import EVIL, circuit, decoder, english_words, pairs_report, report

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    content = render_report(report(), model_path="it", text_file="text.txt", circuit=circuit())
    write_report(content, path)
    opened: Any = open_browser().new_page(viewport={"width": 1280, "height": 900})
    opened.trouble = []
    opened.on("console", lambda said: opened.trouble.append(said.text))
    opened.on("pageerror", lambda error: opened.trouble.append(str(error)))
    opened.on("dialog", lambda dialog: opened.trouble.append(dialog.message))
    opened.on("request", lambda arguments: opened.trouble.extend(_elsewhere(arguments.url)))
    opened.goto(path.as_uri())
    opened.wait_for_selector(".token.at")
    yield opened
    opened.close()


def _elsewhere(address: str) -> list[str]:
    return [] if address.startswith(("file:", "data:", "blob:")) else [address]


def test_hovering_over_a_token_shows_what_it_attends_to(page: Any) -> None:
    page.hover(".token >> nth=20")
    page.wait_for_function("document.querySelector('#summary').textContent.includes('token 20')")
    assert "attends to" in page.text_content("#summary")
    assert page.evaluate("document.querySelectorAll('.token[style*=background]').length") > 0


def test_lines_the_map_and_the_way_back(page: Any) -> None:
    page.click("[data-view=lines]")
    page.wait_for_selector("#view-lines path.strong", state="attached")
    page.check("#incoming")
    page.wait_for_function(
        "document.querySelector('#summary').textContent.includes('attended to by')"
    )
    page.uncheck("#incoming")
    page.click("[data-view=map]")
    page.wait_for_function("document.querySelector('#map').width === 64")
    page.click("[data-view=text]")


def test_another_head_another_measure_another_theme(page: Any) -> None:
    page.click("#atlas button >> nth=2")
    page.wait_for_function("document.querySelector('#title').textContent.startsWith('L1H0')")
    page.select_option("#measure", "pattern")
    page.wait_for_selector("#atlas canvas:visible")
    page.select_option("#measure", "1")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_circuit_is_explored_by_slider_filter_pointer_and_keyboard(page: Any) -> None:
    edges = "document.querySelectorAll('.circuit-graph .circuit-edge').length"
    assert page.evaluate(edges) == 40
    page.focus("[aria-label='Number of edges']")
    page.keyboard.press("Home")
    assert page.evaluate(edges) == 5
    assert page.text_content(".circuit-tools output") == "5 of 190"
    page.keyboard.press("End")
    page.uncheck(".circuit-tools label:has-text('key') input")
    keys = sum(edge.reader.endswith(" key") for edge, _, _ in circuit().ranked()[:160])
    assert page.evaluate(edges) == 160 - keys
    page.check(".circuit-tools label:has-text('key') input")
    page.hover("[data-node='logits']")
    assert page.text_content(".circuit-side h3") == "logits reads"
    lit = "[...document.querySelectorAll('.circuit-edge.lit')].map(line => line.dataset.reader)"
    assert {*page.evaluate(lit)} == {"logits"}
    page.focus("[data-node='logits']")
    page.keyboard.press("ArrowDown")
    node = page.evaluate("document.activeElement.dataset.node")
    assert node == "L2 mlp"
    page.keyboard.press("Enter")
    assert page.get_attribute(f"[data-node='{node}']", "aria-pressed") == "true"
    page.hover("[data-node='L2H0']")
    assert page.text_content(".circuit-side h3") == f"{node} reads"
    page.keyboard.press("Escape")
    assert page.text_content(".circuit-side h3") != f"{node} reads"


def test_the_table_sorts_by_what_is_clicked(page: Any) -> None:
    page.click("#heads thead button >> nth=2")
    read = (
        "[...document.querySelectorAll('#heads tbody tr')].map(row => +row.cells[2].dataset.value)"
    )
    values = page.evaluate(read)
    assert values == sorted(values, reverse=True)
    page.click("#heads thead button >> nth=2")
    assert page.evaluate(read) == sorted(values)


def test_a_share_stands_behind_its_word_whichever_way_that_is_written(
    page: Any, tmp_path: Path
) -> None:
    result, path = report(), tmp_path / "hebrew.html"
    hebrew = replace(result.input, tokens=(" שלום",) * len(result.input))
    write_report(
        render_report(replace(result, input=hebrew), model_path="it", text_file="text.txt"), path
    )
    other = page.context.browser.new_page()
    other.goto(path.as_uri())
    other.hover(".token >> nth=20")
    other.wait_for_function("document.querySelector('#summary').textContent.includes('token 20')")
    # Where a word ends and what follows it begins, in pixels from the left.
    edges = """words => words.map((word) => {
      const range = document.createRange();
      range.selectNode(word.nextSibling);
      return [word.getBoundingClientRect().right, range.getBoundingClientRect().right];
    })"""
    said = other.eval_on_selector_all("#summary bdi", edges)
    assert len(said) == 5
    other.click("[data-view=lines]")
    other.wait_for_selector("#view-lines text.seen")
    drawn = other.eval_on_selector_all("#view-lines text.seen tspan", edges)
    assert all(word < share for word, share in said + drawn)
    other.close()


def test_predictions_follow_the_pointer_and_the_arrow_keys(page: Any) -> None:
    page.hover("#predicted-text .token >> nth=12")
    page.wait_for_function(
        "document.querySelector('#predicted-after').textContent.includes('token 12')"
    )
    page.focus("#predicted-text")
    page.keyboard.press("ArrowRight")
    assert "token 13" in page.text_content("#predicted-after")
    assert page.locator("#predicted-top li").count() >= 5


def test_examples_and_the_graph_of_compositions_open_heads(page: Any) -> None:
    assert page.locator("[data-examples] article").count() >= 4
    assert page.locator(".graph path").count() == len(report().compositions)
    page.locator(".graph a").last.click()
    name = page.locator(".graph a").last.locator("text").first.text_content()
    page.wait_for_function(f"document.querySelector('#title').textContent.startsWith('{name}')")


def test_an_encoder_decoder_has_three_maps_and_cross_attention_two_texts(
    page: Any, tmp_path: Path
) -> None:
    path, trouble = tmp_path / "pairs.html", []
    write_report(render_report(pairs_report(), model_path="it", text_file="text.txt"), path)
    opened = page.context.browser.new_page(viewport={"width": 390, "height": 800})
    opened.on("console", lambda message: trouble.append(message.text))
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.goto(path.as_uri())
    opened.wait_for_selector(".token.at")
    assert opened.locator(".map-name").count() == 3
    opened.locator("#atlas button").nth(4).click()
    opened.wait_for_function("document.querySelector('#title').textContent.includes('cross')")
    assert opened.locator("#view-text h4").all_text_contents() == [
        "The decoder writes",
        "The encoder reads",
    ]
    opened.hover("#view-text [data-side=keys] >> nth=5")
    opened.wait_for_function(
        "document.querySelector('#summary').textContent.includes('attended to by')"
    )
    for view in ("lines", "map"):
        opened.click(f"[data-view={view}]")
    opened.wait_for_selector("#map:visible")
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    assert trouble == []
    opened.close()


def test_two_models_are_compared_in_maps_and_squares(page: Any, tmp_path: Path) -> None:
    path, trouble = tmp_path / "both.html", []
    other = replace(report(), name="<i>other</i>")
    comparison = compare_reports(report(), other)
    pairs = tuple(replace(pair, distance=1.0) for pair in comparison.pairs)
    comparison.__dict__["pairs"] = pairs
    write_report(render_comparison(comparison), path)
    opened = page.context.browser.new_page(viewport={"width": 390, "height": 800})
    opened.on("console", lambda message: trouble.append(message.text))
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.goto(path.as_uri())
    opened.wait_for_function("document.querySelector('[data-map]').width === 64")
    assert opened.locator(".square").count() == 8
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    opened.click("#theme")
    assert trouble == []
    opened.close()


def test_the_cards_of_a_row_share_their_lines(page: Any) -> None:
    tops = page.eval_on_selector_all(
        ".card", "cards => cards.map((card) => [...card.children].map((each) => each.offsetTop))"
    )
    assert len(tops) > 3
    assert all(each == tops[0] for each in tops), tops


def test_print_fits_a4(page: Any) -> None:
    page.emulate_media(media="print")
    # 210 mm less two margins of 14 mm, at 96 dots an inch.
    page.set_viewport_size({"width": 688, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    page.emulate_media(media="screen")


def test_a_phone_has_a_theme_button_of_full_size(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.locator("#theme").bounding_box()
    assert (box["width"], box["height"]) == (44, 44)
    page.set_viewport_size({"width": 1280, "height": 900})


def test_the_report_is_read_in_russian_and_remembers_it(page: Any, tmp_path: Path) -> None:
    page.click("#language")
    page.wait_for_selector("h2:has-text('Куда смотрит голова')")
    page.wait_for_selector(".token.at")
    assert english_words(page) == []
    assert page.get_attribute("#language", "aria-label") == "Read in English"
    assert page.text_content(".circuit-tools legend") == "Кем читается"
    # Tokens, names and commands are not translated, and numbers have their comma.
    assert page.locator("pre code").first.text_content().startswith("manyheads ")
    assert re.search(r"\d,\d", page.text_content("#heads tbody"))
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    other = tmp_path / "pairs.html"
    write_report(render_report(pairs_report(), model_path="it", text_file="text.txt"), other)
    address = page.url
    page.goto(other.as_uri())
    page.wait_for_selector(".token.at")
    assert english_words(page) == []
    page.goto(address)
    page.click("#language")
    page.wait_for_selector("h2:has-text('Where a head looks')")


def test_only_the_page_itself_runs_and_nothing_is_requested(page: Any) -> None:
    assert page.trouble == []


def test_a_frame_in_a_notebook_shows_the_same(page: Any, tmp_path: Path) -> None:
    """Without kinds the squares show the patterns themselves."""
    view = show(decoder(), EVIL, name="small", progress=False)
    (tmp_path / "notebook.html").write_text(view._repr_html_(), encoding="utf-8")
    notebook = page.context.browser.new_page()
    trouble: list[str] = []
    notebook.on("console", lambda said: trouble.append(said.text))
    notebook.on("dialog", lambda dialog: trouble.append(dialog.message))
    notebook.goto((tmp_path / "notebook.html").as_uri())
    frame = notebook.frames[1]
    frame.wait_for_selector(".token.at")
    assert frame.input_value("#measure") == "pattern"
    frame.hover(".token >> nth=9")
    frame.wait_for_function("document.querySelector('#summary').textContent.includes('token 9')")
    assert trouble == []
    notebook.close()
