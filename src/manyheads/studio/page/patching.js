// Patching: heads take their output from another prompt with the same number of tokens.

import { wasAborted } from "./api.js";
import { headLink } from "./atlas.js";
import { announce, debounce, h } from "./dom.js";
import { counted, percent } from "./format.js";
import { say, sayParts } from "./language.js";

export class Patching {
  constructor(side) {
    this.side = side;
    this.countSoon = debounce(200, () => this.#count());
    this.source = h("textarea", { "aria-label": say`Other prompt`, placeholder: say`The same text with one word changed`, spellcheck: "false", on: { input: () => this.countSoon() } });
    this.counts = h("p", { class: "counts quiet", role: "status" });
    this.result = h("p", { class: "result" });
    this.every = h("button", { type: "button", class: "primary", on: { click: () => this.#patchEach() } }, say`Patch each head in turn`);
    this.selected = h("button", { type: "button", "aria-pressed": "false", on: { click: () => this.#patchSelected() } }, say`Patch the selected heads`);
    this.element = h(
      "details",
      { class: "card patch place-patch" },
      h("summary", {}, say`Patching`),
      h("p", { class: "quiet" }, say`Which heads make the difference between two prompts? Each head in turn takes its output from the other prompt, and the heads are colored by how much of the other answer that restores.`),
      this.source,
      this.counts,
      h("div", { class: "row" }, this.every, this.selected),
      this.result,
    );
    this.element.addEventListener("toggle", () => this.#count());
  }

  show(able) {
    this.element.hidden = !able;
    this.result.textContent = "";
  }

  draw() {
    const on = this.side.patched.size > 0;
    this.selected.setAttribute("aria-pressed", String(on));
    this.selected.textContent = on ? say`Remove the patch` : say`Patch the selected heads`;
    this.countSoon();
  }

  // How many tokens both prompts have, before anything is run.
  async #count() {
    const { side } = this;
    if (!this.element.open) return;
    const source = this.source.value;
    let other = 0;
    try {
      if (source) other = (await side.api.ask("token_count", { model: side.model.name, text: source })).tokens;
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
      return;
    }
    const own = side.tokens.length;
    const most = side.limits.patching_tokens;
    const equal = source !== "" && own === other;
    const fits = Math.max(own, other) <= most;
    this.counts.classList.toggle("bad", source !== "" && !(equal && fits));
    this.counts.textContent = say`${counted(other)} {0|token|tokens} here, ${counted(own)} in the text: ${verdict(source, own - other, fits, most)}`;
    this.every.disabled = !equal || !fits;
    this.selected.disabled = !side.patched.size && (!equal || !side.selected.length);
  }

  async #patchEach() {
    const { side } = this;
    this.result.textContent = say`Patching each head…`;
    try {
      const response = await side.api.ask("patching", { model: side.model.name, text: side.text, source: this.source.value });
      side.addStatistic("patching", response.heads, response.recovered);
      const best = response.heads.map((head, place) => [head, response.recovered[place]]).sort((one, other) => other[1] - one[1]).slice(0, 3);
      const list = best.flatMap(([head, fraction], place) => [place ? ", " : "", headLink(side, head), ` ${percent(fraction)}`]);
      this.result.replaceChildren(...sayParts`From “${response.distractor.trim()}” to “${response.answer.trim()}”: the answer is restored most by ${h("span", {}, list)}.`);
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

function verdict(source, missing, fits, most) {
  if (source === "") return say`type the other prompt.`;
  if (missing > 0) return say`add ${counted(missing)} {0|token|tokens}.`;
  if (missing) return say`remove ${counted(-missing)} {0|token|tokens}.`;
  return fits ? say`ready.` : say`use at most ${counted(most)}.`;
}
