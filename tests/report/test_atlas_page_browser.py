"""The page of an atlas in a browser, from disk and from a server."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from manyheads.report.atlas_folder import atlas_files, write_atlas
from tests.chromium import needs_chromium, open_browser
from tests.report.small import atlas, english_words

pytestmark = needs_chromium
HOSTILE = ["</script><img src=x onerror=alert(1)>", "a\u202eb\x07", " שלום", "\ufeff"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two atlases: the second of them with other values, and with hostile tokens."""
    path = tmp_path_factory.mktemp("atlas")
    first = atlas_files(atlas(), name="first", corpus="<i>words</i>")
    heads = [
        head | {"values": [None if value is None else 2 * value for value in head["values"]]}
        for head in first.index["heads"]
    ]
    index = first.index | {"name": "second", "heads": heads}
    tokens = [
        HOSTILE[place % 4] if place % 3 else token for place, token in enumerate(first.tokens)
    ]
    write_atlas([first, replace(first, index=index, tokens=tokens)], path)
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Any]:
    # Points move at once.
    opened: Any = open_browser().new_page(
        viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
    )
    opened.trouble = []
    opened.on("console", lambda message: opened.trouble.append(message.text))
    opened.on("pageerror", lambda error: opened.trouble.append(str(error)))
    opened.on("dialog", lambda dialog: opened.trouble.append(dialog.message))
    opened.on("requestfailed", lambda request: opened.trouble.append(request.url))
    opened.goto((folder / "index.html").as_uri())
    opened.wait_for_selector("#heads tbody tr")
    yield opened
    opened.close()


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all(
        "#heads tbody a", "links => links.map((link) => link.textContent)"
    )


def home(page: Any) -> None:
    page.evaluate("location.hash = ''")
    page.wait_for_selector("#finder:not([hidden])")


def test_the_finder_filters_points_and_table_alike(page: Any) -> None:
    assert names(page) == ["L0H0", "L0H1", "L1H0", "L1H1"]
    page.click("[data-kind=induction]")
    assert names(page) == ["L0H0", "L1H0"]
    assert page.locator(".plot circle").count() == 2
    assert page.locator(".cell.out").count() == 2
    page.select_option("#from", "1")
    assert names(page) == ["L1H0"]
    page.select_option("#from", "0")
    page.click("[data-kind=induction]")
    # The most valuable head is L1H1.
    page.locator("#most").fill("1")
    assert names(page) == ["L1H1"]
    page.locator("#most").fill("4")
    page.fill("#words", "L0 induction")
    assert names(page) == ["L0H0"]
    # A kind in plain words, and the nearest kind of heads that have none.
    page.fill("#words", "copy")
    assert names(page) == ["L0H0", "L1H0"]
    page.fill("#words", "sink")
    assert names(page) == ["L0H1", "L1H1"]
    page.fill("#words", "zebra")
    assert page.locator("#finder").inner_text().count("No head matches “zebra”") == 1
    assert not page.locator(".plot").is_visible()
    page.fill("#words", "")
    assert page.locator(".plot circle").count() == 4


def test_axes_colors_and_the_order_of_the_table(page: Any) -> None:
    page.select_option("#across", "entropy")
    assert page.locator(".tick").count() == 10
    page.select_option("#color", "loss_change")
    page.click("[data-sort=loss_change]")
    assert names(page) == ["L1H1", "L0H0", "L1H0", "L0H1"]
    assert page.get_attribute("th:has([data-sort=loss_change])", "aria-sort") == "descending"
    page.click("[data-sort=name]")
    page.select_option("#across", "map")
    assert page.locator(".tick").count() == 0
    page.select_option("#color", "kind")


def test_a_point_opens_its_head_and_the_way_back_leads_to_the_finder(page: Any) -> None:
    box = page.locator(".plot [data-head=L1H1]").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    assert "L1H1" in page.text_content(".pointed")
    page.mouse.click(*middle)
    page.wait_for_selector("#head .example")
    assert page.url.endswith("#L1H1")
    assert page.title().startswith("L1H1")
    page.go_back()
    page.wait_for_selector("#finder:not([hidden])")


def test_pointing_at_a_query_shades_its_keys(page: Any) -> None:
    page.evaluate("location.hash = 'L0H0'")
    page.wait_for_selector("#head .example")
    text = page.text_content("#head")
    assert "induction 0.800 (95% interval 0.700 to 0.900)" in text
    assert "looks after <b>copies</b>" in text
    assert "Measured on <i>words</i>; kinds on texts made to test them" in text
    example = page.locator(".example").first
    # The title and the line below have the same number.
    largest = example.locator("p").first.text_content().split("largest weight ")[1].split()[0]
    assert f" {largest}" in example.locator(".said").text_content()
    query = example.locator(".query").nth(3)
    query.hover()
    assert "at" in query.get_attribute("class").split()
    at = query.get_attribute("data-index")
    assert f" at {at} looks at " in example.locator(".said").text_content()
    shaded = example.locator(".token[style*=background]")
    assert 1 <= shaded.count() <= 4
    page.click(".tabs button >> nth=1")
    assert page.locator(".tabs [aria-pressed=true]").count() == 1
    home(page)


def test_the_keyboard_is_enough(page: Any) -> None:
    page.focus("#navigator .cell[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#head .example")
    assert page.url.endswith("#L1H1")
    assert page.evaluate("document.activeElement.id") == "title"
    passage = page.locator(".passage").first
    passage.focus()
    before = passage.locator(".at").get_attribute("data-index")
    page.keyboard.press("ArrowLeft")
    assert int(passage.locator(".at").get_attribute("data-index")) == int(before) - 1
    home(page)
    page.focus("#heads tbody a >> nth=2")
    page.keyboard.press("Enter")
    page.wait_for_selector("#head .example")
    assert page.url.endswith("#L1H0")
    home(page)


def test_every_control_has_a_name(page: Any) -> None:
    for address in ("", "L0H0"):
        page.evaluate(f"location.hash = '{address}'")
        page.wait_for_selector("#head .example" if address else "#finder:not([hidden])")
        nameless = page.eval_on_selector_all(
            "a, button, select, input, [tabindex='0']",
            """all => all.filter((each) => each.checkVisibility())
              .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.length))
              .map((each) => each.outerHTML)""",
        )
        assert nameless == []
    home(page)


def test_the_slider_moves_the_points_and_hostile_text_is_text(page: Any) -> None:
    page.select_option("#across", "entropy")
    place = "getComputedStyle(document.querySelector('.plot circle')).transform"
    before = page.evaluate(place)
    page.locator("#step").fill("1")
    assert page.text_content("#step-name") == "second"
    assert page.evaluate(place) != before
    page.click("#heads tbody a >> nth=0")
    page.wait_for_selector("#head .example")
    assert page.url.endswith("#L0H0@1")
    text = page.text_content("#head")
    assert HOSTILE[0] in text
    assert "aU+202EbU+0007" in text
    assert "BOM" in text
    assert page.locator("img").count() == 0
    isolated = "getComputedStyle(document.querySelector('.token')).unicodeBidi"
    assert page.evaluate(isolated) == "isolate"
    page.click("#title ~ .steps a:has-text('first')")
    page.wait_for_function("location.hash === '#L0H0'")
    home(page)


def test_it_fits_a_phone_and_a_desk_in_both_themes(page: Any) -> None:
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        for address in ("", "L1H0"):
            page.evaluate(f"location.hash = '{address}'")
            page.wait_for_selector("#head .example" if address else "#finder:not([hidden])")
            page.click("#theme")
            assert page.evaluate("document.documentElement.scrollWidth") == width
    home(page)


def test_an_unknown_head_is_named(page: Any) -> None:
    page.evaluate("location.hash = 'L9H9'")
    page.wait_for_selector("#missing:not([hidden])")
    assert "There is no head L9H9" in page.text_content("#missing")
    home(page)


def test_the_page_is_read_in_russian_and_remembers_it(page: Any) -> None:
    page.click("#language")
    for address in ("", "L1H0"):
        page.evaluate(f"location.hash = '{address}'")
        page.wait_for_selector("#head .example" if address else "#heads tbody tr")
        assert english_words(page, "first", "second") == []
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
    page.reload()
    assert page.get_attribute("#language", "aria-label") == "Read in English"
    assert page.text_content("#title ~ .steps a") == "Все головы"
    page.click("#language")
    page.wait_for_selector("#title ~ .steps a:has-text('All heads')")
    home(page)


def test_nothing_but_the_page_ran_from_disk(page: Any) -> None:
    assert page.trouble == []


def test_a_web_server_serves_the_same_page(page: Any, folder: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.func.log_message = lambda *_: None  # type: ignore[method-assign]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html#L1H0")
        page.wait_for_selector("#head .example")
        # A script from elsewhere, or inline, does not run.
        page.evaluate(
            """() => { const script = document.createElement("script");
            script.textContent = "window.intruder = 1"; document.body.append(script); }"""
        )
        assert page.evaluate("window.intruder") is None
        server.shutdown()
    unexpected = [line for line in page.trouble if "Content Security Policy" not in line]
    assert [line for line in unexpected if "favicon" not in line and "404" not in line] == []
