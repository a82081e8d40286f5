"""Film the first screen of the studio again: python docs/images/studio_animation.py, with Chromium.

Twenty seconds: where the heads look, both induction heads switched off, and on again. Frames are
screenshots; equal ones are one frame that stays longer.
"""

import io
import shutil
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from manyheads import load  # noqa: E402
from tests.studio.live_server import live_server  # noqa: E402

OUT = HERE / "studio-first-screen.webp"
SIZE = {"width": 1280, "height": 960}
WIDTH = 960
# Milliseconds: between two frames of a movement, of the whole film, and to wait for the kinds.
STEP, TOTAL, PATIENCE = 80, 20_000, 120_000
# A screenshot takes a while: what moves by itself moves that many times more slowly.
SLOW = 8
SLOWLY = f"""
  const now = performance.now.bind(performance), frame = requestAnimationFrame;
  performance.now = () => now() / {SLOW};
  window.requestAnimationFrame = (act) => frame(() => act(performance.now()));
"""
# A pointer, since screenshots have none; made by script, as the policy of the page wants.
POINTER = """() => {
  const pointer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  pointer.setAttribute("viewBox", "0 0 16 24");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", "M1 1 V19 L5.5 15 L8.5 22 L11.5 20.7 L8.6 14 H15 Z");
  path.setAttribute("fill", "#111");
  path.setAttribute("stroke", "#fff");
  pointer.append(path);
  Object.assign(pointer.style, { position: "fixed", width: "20px", zIndex: 9999,
    pointerEvents: "none", left: "640px", top: "480px" });
  pointer.id = "film-pointer";
  document.body.append(pointer);
  addEventListener("mousemove", (event) => {
    Object.assign(pointer.style, { left: `${event.clientX}px`, top: `${event.clientY}px` });
  });
}"""


class Film:
    """The frames so far, each with how long it stays in milliseconds."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.stays: list[int] = []

    def shoot(self, stay: int) -> None:
        image = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        image = image.resize(
            (WIDTH, WIDTH * SIZE["height"] // SIZE["width"]), Image.Resampling.LANCZOS
        )
        if self.frames and self.frames[-1].tobytes() == image.tobytes():
            self.stays[-1] += stay
            return
        self.frames.append(image)
        self.stays.append(stay)

    def move_to(self, selector: str, *, steps: int = 8) -> None:
        box = self.page.locator(selector).first.bounding_box()
        assert box is not None, f"{selector} is not on the first screen"
        goal = box["x"] + min(box["width"] / 2, 60), box["y"] + box["height"] / 2
        pointer = self.page.locator("#film-pointer").bounding_box()
        assert pointer is not None
        for step in range(1, steps + 1):
            part = step / steps
            self.page.mouse.move(
                pointer["x"] + (goal[0] - pointer["x"]) * part,
                pointer["y"] + (goal[1] - pointer["y"]) * part,
            )
            self.shoot(STEP)

    def watch(self, milliseconds: int) -> None:
        """Screenshots while something moves, for so long in the time of the page."""
        start = last = time.monotonic()
        while (last - start) * 1000 / SLOW < milliseconds:
            self.page.wait_for_timeout(STEP)
            now = time.monotonic()
            self.shoot(max(20, round((now - last) * 1000 / SLOW)))
            last = now

    def save(self, path: Path) -> None:
        self.stays[-1] += max(0, TOTAL - sum(self.stays))
        first, *rest = self.frames
        first.save(
            path,
            save_all=True,
            append_images=rest,
            duration=self.stays,
            loop=0,
            quality=62,
            method=6,
        )


def main() -> None:
    with live_server([("house-gpt", load("house-gpt"))]) as studio, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, locale="en", color_scheme="light")
        page.add_init_script(SLOWLY)
        session = page.context.new_cdp_session(page)
        session.send("Animation.enable")
        session.send("Animation.setPlaybackRate", {"playbackRate": 1 / SLOW})
        # With a view in its address the page opens without its tour.
        page.goto(f"http://127.0.0.1:{studio.endpoint.port}/#v=lines")
        expect(page.locator(".bars li").first).to_contain_text("82%", timeout=PATIENCE)
        expect(page.locator(".picks li").first).to_contain_text("induction", timeout=PATIENCE)
        page.wait_for_timeout(1000)
        page.evaluate(POINTER)
        film = Film(page)
        film.shoot(2000)
        last = page.locator("[role=option][aria-selected=true]").first
        number = int(last.get_attribute("data-index") or 0)
        for place in (number - 9, number - 1, number):
            film.move_to(f"[role=option][data-index='{max(0, place)}']")
            page.wait_for_timeout(400)
            film.shoot(1300)
        button = page.locator(".experiment")
        if button.count():
            for _ in range(2):
                film.move_to(".experiment")
                film.shoot(700)
                button.click()
                film.watch(1200)
                page.wait_for_timeout(1500)
                film.shoot(3000)
        film.save(OUT)
        browser.close()
    seconds, size = sum(film.stays) / 1000, OUT.stat().st_size / 1e6
    print(f"saved {OUT}: {seconds:.0f} s in {len(film.frames)} frames, {size:.2f} MB")


if __name__ == "__main__":
    main()
