"""A studio that listens, and a browser to visit it: where Debian's Chromium is installed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from manyheads.studio.security import SecurityMiddleware
from tests.chromium import open_browser
from tests.studio import models
from tests.studio.live_server import LiveServer, live_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


HEADERS = SecurityMiddleware._headers


def let_scripts_be_cached(self: SecurityMiddleware, scope: Any, headers: Any) -> Any:
    """Else every page asks for its sixty scripts anew."""
    result = HEADERS(self, scope, headers)
    if not scope["path"].endswith((".js", ".css")):
        return result
    return [(name, b"max-age=600" if name == b"cache-control" else value) for name, value in result]


@pytest.fixture(scope="module")
def studio() -> Iterator[LiveServer]:
    store = [
        ("tiny", models.decoder()),
        ("other", models.decoder(seed=5)),
        ("sees", models.vision()),
        ("fills", models.masked()),
    ]
    with live_server(store) as result:
        yield result


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import expect

    from tests.studio.browsing import PATIENCE

    expect.set_options(timeout=PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecurityMiddleware, "_headers", let_scripts_be_cached)
        yield open_browser()


@pytest.fixture(scope="module")
def context(browser: "Browser") -> Iterator["BrowserContext"]:
    """One for all pages of a file: each would start a process of its own, with empty caches."""
    from tests.studio.browsing import PATIENCE

    result = browser.new_context(viewport={"width": 1400, "height": 1000}, accept_downloads=True)
    result.set_default_timeout(PATIENCE)
    yield result
    result.close()


@pytest.fixture(scope="module")
def first_page(context: "BrowserContext") -> "Page":
    """An empty page of this machine, which keeps the process that draws all others alive."""
    result = context.new_page()
    result.route("**/*", lambda route: route.fulfill(body=""))
    result.goto("http://127.0.0.1/")
    return result


@pytest.fixture
def page(context: "BrowserContext", first_page: "Page") -> Iterator["Page"]:
    """A page on a short text; whatever it complains of in its console is a fault."""
    with context.expect_page() as opening:
        first_page.evaluate("() => void window.open()")
    result = opening.value
    faults: list[str] = []
    result.on("pageerror", lambda error: faults.append(str(error)))
    result.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    yield result
    # The next page starts as the first did.
    if result.url.startswith("http"):
        result.evaluate("localStorage.clear()")
    result.close()
    # A refused request is reported in the console by the browser itself.
    assert [each for each in faults if "status of 422" not in each] == []
