// Patching: heads take their output from another prompt with the same number of tokens.

import { wasAborted } from "./api.js";
import { h, announce } from "./dom.js";
import { percent } from "./format.js";

export class Patching {
  constructor(side) {
    this.side = side;
    this.source = h("textarea", { "aria-label": "Other prompt", placeholder: "The same text with one word changed", spellcheck: "false" });
    this.result = h("p", { class: "quiet" });
    this.every = h("button", { type: "button", on: { click: () => this.#patchEach() } }, "Patch each head in turn");
    this.selected = h("button", { type: "button", "aria-pressed": "false", on: { click: () => this.#patchSelected() } }, "Patch the selected heads");
    this.element = h(
      "details",
      { class: "card patch place-patch" },
      h("summary", {}, "Patching"),
      h("p", { class: "quiet" }, "Which heads make the difference between two prompts? Each head in turn takes its output from the other prompt, and the heads are coloured by how much of the other answer that restores."),
      h("div", { class: "row" }, this.source),
      h("div", { class: "row" }, this.every, this.selected),
      h("div", { class: "row" }, this.result),
    );
  }

  show(able) {
    this.element.hidden = !able;
  }

  draw() {
    const on = this.side.patched.size > 0;
    this.selected.setAttribute("aria-pressed", String(on));
    this.selected.textContent = on ? "Remove the patch" : "Patch the selected heads";
  }

  async #patchEach() {
    const { side } = this;
    this.result.textContent = "Patching each head…";
    try {
      const response = await side.api.ask("patching", { model: side.model.name, text: side.text, source: this.source.value });
      side.addStatistic("patching", response.heads, response.recovered);
      const best = response.heads.map((head, place) => [head, response.recovered[place]]).sort((one, other) => other[1] - one[1]).slice(0, 3);
      const list = best.map(([head, fraction]) => `${head} ${percent(fraction)}`).join(", ");
      this.result.textContent = `From “${response.distractor.trim()}” to “${response.answer.trim()}”: the answer is restored most by ${list}.`;
      announce(this.result.textContent);
    } catch (error) {
      this.result.textContent = "";
      if (!wasAborted(error)) side.failed(error);
    }
  }

  #patchSelected() {
    const { side } = this;
    side.patch(side.patched.size ? [] : side.selected, this.source.value);
  }
}
