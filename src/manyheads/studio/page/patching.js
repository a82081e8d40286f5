// Patching: heads take what they would say on another prompt of as many tokens.

import { dropped } from "./api.js";
import { h, say } from "./dom.js";
import { percent } from "./format.js";

export class Patching {
  constructor(side) {
    this.side = side;
    this.source = h("textarea", { "aria-label": "The other prompt", placeholder: "The same text with one word changed", spellcheck: "false" });
    this.result = h("p", { class: "quiet" });
    this.every = h("button", { type: "button", on: { click: () => this.#every() } }, "Try every head");
    this.picked = h("button", { type: "button", "aria-pressed": "false", on: { click: () => this.#put() } }, "Put the picked heads in");
    this.element = h(
      "details",
      { class: "card patch place-patch" },
      h("summary", {}, "Patch from another prompt"),
      h("p", { class: "quiet" }, "Which heads carry the difference? Each head alone takes its output from the other prompt, and the atlas shows how much of the other answer it brings in."),
      h("div", { class: "row" }, this.source),
      h("div", { class: "row" }, this.every, this.picked),
      h("div", { class: "row" }, this.result),
    );
  }

  show(able) {
    this.element.hidden = !able;
  }

  draw() {
    const on = this.side.patched.size > 0;
    this.picked.setAttribute("aria-pressed", String(on));
    this.picked.textContent = on ? "Take the patch away" : "Put the picked heads in";
  }

  async #every() {
    const { side } = this;
    this.result.textContent = "Every head is tried…";
    try {
      const told = await side.api.ask("patch", { model: side.model.name, text: side.text, source: this.source.value });
      side.addStatistic("patching", told.heads, told.shares);
      const best = told.heads.map((head, place) => [head, told.shares[place]]).sort((one, other) => other[1] - one[1]).slice(0, 3);
      const list = best.map(([head, share]) => `${head} ${percent(share)}`).join(", ");
      this.result.textContent = `From “${told.wrong.trim()}” towards “${told.right.trim()}”: most is brought in by ${list}.`;
      say(this.result.textContent);
    } catch (error) {
      this.result.textContent = "";
      if (!dropped(error)) side.failed(error);
    }
  }

  #put() {
    const { side } = this;
    side.patch(side.patched.size ? [] : side.picked, this.source.value);
  }
}
