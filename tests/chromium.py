"""The browser that pages are tested in, where the system has one."""

import shutil
from typing import Any

import pytest

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PATH is None, reason="there is no Chromium here")

# Only the page itself: no graphics card to imitate, and nothing to look up outside.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    # One process for the pages of a site: each would start the engine and read the scripts anew.
    "--process-per-site",
)


# Playwright and its browser, while they run.
RUNNING: list[Any] = []


def open_browser() -> Any:
    """The browser of this process, for all files that follow one another and open pages in it."""
    from playwright.sync_api import sync_playwright

    if not RUNNING:
        playwright = sync_playwright().start()
        browser = playwright.chromium.launch(executable_path=PATH, args=list(FLAGS))
        RUNNING.extend((playwright, browser))
    return RUNNING[1]


def close_browser() -> None:
    """Before other tests: Playwright's event loop counts as running in this thread."""
    if RUNNING:
        playwright, browser = RUNNING
        RUNNING.clear()
        browser.close()
        playwright.stop()


def opens_pages(item: pytest.Item | None) -> bool:
    """Whether the file of a test has pages opened in the browser."""
    return hasattr(getattr(item, "module", None), "needs_chromium")
