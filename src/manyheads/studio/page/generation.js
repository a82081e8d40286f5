// Generate token by token, and show the attention of the selected heads.

import { wasAborted } from "./api.js";
import { pluralise, h, announce } from "./dom.js";

export class Generation {
  constructor(side) {
    this.side = side;
    this.running = false;
    this.count = h("input", { type: "number", min: 1, max: 512, value: 24, "aria-label": "Tokens to generate" });
    this.temperature = h("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0.8, "aria-label": "Temperature; 0 always takes the most likely token", title: "0 always takes the most likely token" });
    this.button = h("button", { type: "button", on: { click: () => (this.running ? this.stop() : this.start()) } }, "Generate");
    this.element = h("span", { class: "row", vars: { "margin-top": "0" } }, this.button, h("label", {}, this.count, "tokens"), h("label", {}, "temperature", this.temperature));
  }

  show(able) {
    this.element.hidden = !able;
    this.element.style.display = able ? "" : "none";
  }

  stop() {
    this.side.api.stop("generate");
  }

  async start() {
    const { side } = this;
    if (!side.tokens.length) return;
    const begin = side.tokens.length;
    const tokens = [...side.tokens];
    const typed = side.frame.prompt.value;
    let text = side.text;
    this.#setRunning(true);
    this.count.value = Math.round(bounded(this.count, 24, 1, 512));
    const body = {
      model: side.model.name,
      text,
      heads: side.selected,
      max_new_tokens: Number(this.count.value),
      temperature: bounded(this.temperature, 0, 0, 5),
      seed: Math.floor(Math.random() * 2 ** 31),
      edits: { ablated: [...side.ablated], replace_with: side.replaceWith },
    };
    try {
      await side.api.stream("generate", body, (response) => {
        text += response.text;
        if (response.done) return;
        tokens.push(response.token);
        side.addToken(tokens, begin, response);
      });
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    } finally {
      this.#setRunning(false);
    }
    announce(`${pluralise(tokens.length - begin, "token")} generated`);
    // Text typed meanwhile is kept.
    if (tokens.length > begin && side.frame.prompt.value === typed) side.setText(text, tokens.length - 1);
  }

  #setRunning(running) {
    this.running = running;
    this.button.textContent = running ? "Stop" : "Generate";
    this.button.setAttribute("aria-pressed", String(running));
  }
}

function bounded(input, otherwise, least, most) {
  const value = Number(input.value);
  return input.value !== "" && Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : otherwise;
}
