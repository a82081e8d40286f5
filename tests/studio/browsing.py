"""The page in a browser, opened on a short text."""

import time

from playwright.sync_api import Page, expect

from tests.studio.live_server import LiveServer

TEXT = "The cat sat on the mat. The cat sat"
# The machine that runs the tests may have other things to do.
PATIENCE = 30_000


def visit(page: Page, studio: LiveServer, **state: str) -> None:
    fields = {"m": "tiny", "t": TEXT, "h": "L0H1,L1H2"} | state
    said = "&".join(f"{key}={value}" for key, value in fields.items())
    page.goto(f"http://127.0.0.1:{studio.endpoint.port}/#{said}")
    if fields["m"] != "sees":
        expect(page.locator(".token").first).to_be_visible()
        expect(page.locator(".attention-list li").first).to_contain_text("%")
        expect(page.locator(".bars li").first).to_contain_text("%")


def wait_until(page: Page, condition: str) -> None:
    """Evaluate a condition until it holds.

    `Page.wait_for_function` asks again from inside the page, where the policy forbids `eval`.
    """
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came to hold: {condition}"
        page.wait_for_timeout(50)
