// A tour of four steps: what a head is, where it looks, what it is for, what happens without it. A card
// beside the place that it speaks of; the page can be used meanwhile.

import { h } from "./dom.js";
import { percent } from "./format.js";
import { say, translate } from "./language.js";
import { visibleToken } from "./token_text.js";

const SEEN = "manyheads-tour";
const WIDE = 340;
const GAP = 16;
// Of a target in sight: it stays where it is.
const MOSTLY = 0.6;
const PHONE = window.matchMedia("(max-width: 600px)");
const CALM = window.matchMedia("(prefers-reduced-motion: reduce)");

export function tourWasSeen() {
  try {
    return localStorage.getItem(SEEN) !== null;
  } catch {
    // Without storage nobody is asked twice.
    return true;
  }
}

export class Tour {
  constructor() {
    this.step = null;
    this.title = h("h2", { id: "tour-title" });
    this.count = h("span", { class: "quiet" });
    this.text = h("p", { id: "tour-text", "aria-live": "polite" });
    this.skip = this.#button(() => this.end(), "plain");
    this.back = this.#button(() => this.#go(this.step - 1));
    this.next = this.#button(() => this.#advance(), "primary");
    this.element = h(
      "section",
      { class: "tour card", role: "dialog", "aria-modal": "false", "aria-labelledby": "tour-title", "aria-describedby": "tour-text" },
      h("header", {}, this.title, this.count),
      this.text,
      h("div", { class: "row" }, this.skip, this.back, this.next),
    );
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.step !== null) this.end();
    });
    window.addEventListener("resize", () => this.#place());
    document.addEventListener("scroll", () => this.#place(), { capture: true, passive: true });
  }

  #button(act, name) {
    return h("button", { type: "button", class: name, on: { click: act } });
  }

  start(side) {
    this.side = side;
    this.begun = { top: window.scrollY, column: this.#column.scrollTop };
    if (this.#ablated()) side.switchHeads(side.example.ablate, true);
    document.body.append(this.element);
    this.#go(0);
  }

  end() {
    this.#leave();
    this.step = null;
    this.element.remove();
    try {
      localStorage.setItem(SEEN, "seen");
    } catch {
      // It starts by itself in no later visit either.
    }
    document.getElementById("sides").focus({ preventScroll: true });
    this.#column.scrollTo({ top: this.begun.column, behavior: "instant" });
    // After what still scrolls to the last step.
    requestAnimationFrame(() => window.scrollTo({ top: this.begun.top, behavior: "instant" }));
  }

  // Predictions and heads, which scroll together where they are higher than the window.
  get #column() {
    return this.side.predictions.element.parentElement;
  }

  // Whether the heads of the example are off.
  #ablated() {
    const { example, ablated } = this.side;
    return Boolean(example?.ablate?.length) && example.ablate.every((head) => ablated.has(head));
  }

  // For each step its title, its text and the place it speaks of.
  #steps() {
    const { side } = this;
    const word = side.at === null ? "" : side.label(side.at);
    return [
      [say`What a head is`, say`Each square is an attention head, each row a layer of the model. At every token a head decides which tokens to look at, and passes on what it finds there.`, side.atlas.grid],
      [say`Where it looks`, say`“${word}” is selected. The bars below the words show where the selected heads look from it; each head has its own color.`, side.strip.element],
      [say`What it is for`, translate(side.example?.about ?? "") || say`What the heads have found becomes the prediction: here you see what the model expects.`, side.predictions.bars],
      [say`What happens without it`, this.#outcome(), side.predictions.experiment.hidden ? side.atlas.picks : side.predictions.element],
    ];
  }

  #outcome() {
    const { side } = this;
    if (!side.example?.ablate?.length) return say`Switch a head off in this list, and see how the prediction changes.`;
    if (!this.#ablated()) return say`Is it really these heads? Switch them off and watch the prediction.`;
    const expected = [...(side.prediction?.top ?? [])].sort((one, other) => (other.before ?? 0) - (one.before ?? 0))[0];
    if (!expected?.before) return say`The heads are off: compare the prediction with the one before.`;
    return say`“${visibleToken(expected.text).trim()}” fell from ${percent(expected.before)} to ${percent(expected.probability)}: these heads had found it. Now select other heads, or type a text of your own.`;
  }

  // After the predictions have changed.
  update() {
    if (this.step !== null) this.#draw();
  }

  #advance() {
    const last = this.step === this.#steps().length - 1;
    if (!last) this.#go(this.step + 1);
    else if (this.#switches()) this.side.predictions.experiment.click();
    else this.end();
  }

  // Whether the button of the last step switches the heads of the example off.
  #switches() {
    return Boolean(this.side.example?.ablate?.length) && !this.#ablated();
  }

  #go(step) {
    this.#leave();
    this.step = step;
    this.target = this.#steps()[step][2];
    this.target.classList.add("toured");
    this.#draw();
    this.#reveal();
    this.next.focus({ preventScroll: true });
  }

  // The page itself scrolls only to a target that is out of sight.
  #reveal() {
    const column = this.#column, box = () => this.target.getBoundingClientRect();
    if (column.contains(this.target) && column.scrollHeight > column.clientHeight) {
      const frame = column.getBoundingClientRect();
      const above = box().top - Math.max(frame.top, 0) - GAP, below = box().bottom - Math.min(frame.bottom, window.innerHeight) + GAP;
      column.scrollTop += above < 0 ? above : Math.max(0, Math.min(above, below));
    }
    const { top, bottom, height } = box();
    const visible = Math.min(bottom, window.innerHeight) - Math.max(top, 0);
    if (!PHONE.matches && visible >= MOSTLY * Math.min(height, window.innerHeight)) this.#place();
    else this.target.scrollIntoView({ block: PHONE.matches ? "start" : "center", behavior: CALM.matches ? "auto" : "smooth" });
  }

  #leave() {
    this.target?.classList.remove("toured");
  }

  #draw() {
    const steps = this.#steps();
    const [title, text] = steps[this.step];
    const last = this.step === steps.length - 1;
    this.title.textContent = title;
    this.count.textContent = say`${this.step + 1} of ${steps.length}`;
    this.text.textContent = text;
    this.skip.textContent = say`Skip`;
    this.back.textContent = say`Back`;
    this.skip.hidden = last && !this.#switches();
    this.back.hidden = this.step === 0;
    this.next.textContent = !last ? say`Next` : this.#switches() ? translate(this.side.example.button) : say`Done`;
    this.#place();
  }

  // Beside the target where there is room, else below it; a phone has it at the bottom of the screen.
  #place() {
    if (this.step === null) return;
    const box = this.target.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    let [left, top, side] = [box.left, box.bottom + GAP, "below"];
    if (box.left > WIDE + 2 * GAP) [left, top, side] = [box.left - WIDE - GAP, box.top, "left"];
    else if (wide - box.right > WIDE + 2 * GAP) [left, top, side] = [box.right + GAP, box.top, "right"];
    this.element.dataset.side = side;
    const tall = this.element.offsetHeight;
    // The card stays in the window beside a target at its edge, and its arrow at the target.
    const wanted = top;
    if (side !== "below") top = Math.max(GAP, Math.min(top, window.innerHeight - tall - GAP));
    this.element.style.setProperty("--arrow", `${Math.max(24, Math.min(24 + wanted - top, tall - 36))}px`);
    this.element.style.setProperty("--left", `${Math.max(GAP, Math.min(left, wide - WIDE - GAP)) + window.scrollX}px`);
    this.element.style.setProperty("--top", `${top + window.scrollY}px`);
  }
}
