// The model writes on, token by token, and the picked heads are watched as it does.

import { dropped } from "./api.js";
import { counted, h, say } from "./dom.js";

export class Writing {
  constructor(side) {
    this.side = side;
    this.running = false;
    this.count = h("input", { type: "number", min: 1, max: 512, value: 24, "aria-label": "Tokens to write" });
    this.heat = h("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0.8, "aria-label": "Temperature; 0 takes the likeliest token", title: "0 takes the likeliest token every time" });
    this.button = h("button", { type: "button", on: { click: () => (this.running ? this.stop() : this.start()) } }, "Write on");
    this.element = h("span", { class: "row", vars: { "margin-top": "0" } }, this.button, h("label", {}, this.count, "tokens"), h("label", {}, "temperature", this.heat));
  }

  show(able) {
    this.element.hidden = !able;
    this.element.style.display = able ? "" : "none";
  }

  stop() {
    this.side.api.stop("write");
  }

  async start() {
    const { side } = this;
    if (!side.tokens.length) return;
    const begin = side.tokens.length;
    const tokens = [...side.tokens];
    const typed = side.frame.prompt.value;
    let text = side.text;
    this.#turn(true);
    this.count.value = Math.round(bounded(this.count, 24, 1, 512));
    const body = {
      model: side.model.name,
      text,
      heads: side.picked,
      max_new_tokens: Number(this.count.value),
      temperature: bounded(this.heat, 0, 0, 5),
      seed: Math.floor(Math.random() * 2 ** 31),
      edit: { off: [...side.off], how: side.how },
    };
    try {
      await side.api.stream("write", body, (told) => {
        text += told.letters;
        if (told.done) return;
        tokens.push(told.word);
        side.written(tokens, begin, told);
      });
    } catch (error) {
      if (!dropped(error)) side.failed(error);
    } finally {
      this.#turn(false);
    }
    say(`${counted(tokens.length - begin, "token")} written`);
    // Who has typed meanwhile keeps what was typed.
    if (tokens.length > begin && side.frame.prompt.value === typed) side.setText(text, tokens.length - 1);
  }

  #turn(running) {
    this.running = running;
    this.button.textContent = running ? "Stop" : "Write on";
    this.button.setAttribute("aria-pressed", String(running));
  }
}

function bounded(input, otherwise, least, most) {
  const value = Number(input.value);
  return input.value !== "" && Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : otherwise;
}
