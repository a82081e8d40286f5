"""Take the pictures of the studio again: python docs/images/studio.py, with Chromium installed."""

import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import expect, sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from manyheads import load  # noqa: E402
from tests.studio.live_server import live_server  # noqa: E402

TEXT = "Trondheim lies on a fjord in Norway. In 1921 the harbour of Trond"
SHARED = {"m": "house-gpt", "h": "L2H6,L2H7,L1H0", "c": "induction", "t": TEXT}
PICTURES = {
    "light": SHARED | {"v": "lines"},
    "dark": SHARED | {"v": "map", "o": "L2H7,L2H6"},
}
HEIGHT = {"light": 1300, "dark": 1130}
# Milliseconds: kinds are found on a few hundred random texts.
PATIENCE = 120_000


def main() -> None:
    models = [(name, load(name)) for name in ("house-gpt", "house-gpt-gated")]
    with live_server(models) as studio, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for look, state in PICTURES.items():
            last = len(models[0][1].tokenizer.encode(state["t"]).ids) - 1
            context = browser.new_context(
                viewport={"width": 1280, "height": HEIGHT[look]},
                color_scheme=look,
                device_scale_factor=1.25,
            )
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{studio.endpoint.port}/#{urlencode(state | {'at': last})}")
            expect(page.locator(".bars li").first).to_contain_text("%", timeout=PATIENCE)
            expect(page.locator(".kind").first).to_contain_text("induction", timeout=PATIENCE)
            page.wait_for_timeout(1000)
            page.screenshot(path=HERE / f"studio-{look}.png")
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.25)
        page.goto(f"http://127.0.0.1:{studio.endpoint.port}/explain.html#s=mix")
        expect(page.locator("#facts .good")).to_be_visible(timeout=PATIENCE)
        page.wait_for_timeout(1500)
        page.screenshot(path=HERE / "how-attention-works.png")
        browser.close()


if __name__ == "__main__":
    main()
