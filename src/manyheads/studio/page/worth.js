// What the heads are worth for the predicted token: an estimate of all of them at once, then each head
// exactly, as the server measures it.

import { wasAborted } from "./api.js";
import { h } from "./dom.js";
import { counted } from "./format.js";
import { say } from "./language.js";

export class Worth {
  constructor(side) {
    this.side = side;
    this.exact = new Set();
    this.bar = h("progress", { max: 1, value: 0, "aria-label": say`Heads measured exactly` });
    this.text = h("span", { role: "status" });
    this.button = h("button", { type: "button", on: { click: () => this.stop() } }, say`Stop`);
    this.element = h("div", { class: "worth quiet", hidden: true }, this.bar, this.text, this.button);
  }

  // Whether the model predicts tokens.
  get able() {
    return ["next token", "masked token"].includes(this.side.model.output);
  }

  stop() {
    this.side.api.stop("worth");
  }

  // The same question is asked once.
  async start() {
    const { side } = this;
    const key = JSON.stringify([side.model.name, side.text, side.at]);
    if (!side.statistics || side.at === null || (key === this.key && side.statistics.worth)) return;
    this.key = key;
    this.exact = new Set();
    const values = new Map();
    this.#tell(0, side.atlas.cells.size, true);
    try {
      await side.api.stream("worth", { model: side.model.name, text: side.text, position: side.at }, (line) => {
        if (line.done || key !== this.key || !side.statistics) return;
        line.heads.forEach((head, place) => values.set(head, line.worth[place]));
        if (line.by === "ablation") for (const head of line.heads) this.exact.add(head);
        this.token = line.token;
        side.statistics = { ...side.statistics, worth: [...side.atlas.cells.keys()].map((head) => values.get(head) ?? null) };
        this.#tell(line.measured, line.total, true);
        side.atlas.draw();
      });
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    }
    if (key === this.key) this.#tell(this.exact.size, side.atlas.cells.size, false);
    side.onChange();
  }

  // Only while the heads are colored by it.
  draw() {
    this.element.hidden = this.side.measure !== "worth" || this.key === undefined;
  }

  #tell(measured, total, running) {
    this.bar.value = measured / total;
    this.bar.hidden = this.button.hidden = !running;
    this.text.textContent = measured === total ? say`Every head was switched off once: these values are exact.` : say`Exact for ${counted(measured)} of ${counted(total)} {1|head|heads}; the pale ones are estimated by attribution.`;
    this.draw();
  }
}
