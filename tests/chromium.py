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


def launch(playwright: Any) -> Any:
    return playwright.chromium.launch(executable_path=PATH, args=list(FLAGS))
