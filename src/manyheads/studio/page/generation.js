// Generate token by token, and show the attention of the selected heads.

import { wasAborted } from "./api.js";
import { h, announce } from "./dom.js";
import { counted } from "./format.js";
import { say } from "./language.js";

let hints = 0;

export class Generation {
  constructor(side) {
    const { max_new_tokens: most, temperature: hottest } = side.limits;
    const [id, on] = [`generation-hint-${(hints += 1)}`, { input: () => this.#check() }];
    this.side = side;
    this.running = false;
    // For each generation the text before and after it.
    this.past = [];
    this.undo = h("button", { type: "button", hidden: true, on: { click: () => this.#undo() } }, say`Undo`);
    this.count = h("input", { type: "number", min: 1, max: most, step: 1, value: 24, required: true, "aria-label": say`Tokens to generate`, "aria-describedby": id, on });
    this.temperature = h("input", {
      type: "number", min: 0, max: hottest, step: "any", value: 0.8, required: true, "aria-label": say`Temperature`, title: say`0 always takes the most likely token`, "aria-describedby": id, on,
    });
    this.button = h("button", { type: "button", class: "generate", on: { click: () => (this.running ? this.stop() : this.start()) } }, say`Generate`);
    this.element = h("span", { class: "row generation" }, this.button, this.undo, h("label", {}, this.count, say`tokens`), h("label", {}, say`temperature`, this.temperature));
    this.hint = h("p", { class: "hint", id, role: "status", hidden: true });
    this.limits = [
      [this.count, say`The number of tokens must be a whole number from 1 to ${most}.`],
      [this.temperature, say`The temperature must be from 0, which always takes the most likely token, to ${hottest}.`],
    ];
  }

  show(able) {
    this.element.hidden = !able;
    this.#check();
  }

  // What is wrong with a field is said below it.
  #check() {
    const wrong = this.limits.filter(([input]) => !input.checkValidity());
    for (const [input] of this.limits) input.setAttribute("aria-invalid", String(!input.checkValidity()));
    this.hint.textContent = wrong.map(([, sentence]) => sentence).join(" ");
    this.hint.hidden = this.element.hidden || !wrong.length;
    this.button.disabled = wrong.length > 0 && !this.running;
  }

  // The first token of the text that was generated; also forgets what a typed text has replaced.
  firstGenerated(letters) {
    if (this.past.at(-1)?.after !== this.side.text) this.past = [];
    this.undo.hidden = !this.past.length;
    if (!this.past.length) return undefined;
    let [place, rest] = [0, this.past[0].before.trimEnd().length];
    while (place < (letters?.length ?? 0) && rest > 0) rest -= letters[place++]?.length ?? 0;
    return place;
  }

  #undo() {
    const { before } = this.past.pop();
    this.side.setText(before);
    announce(say`The last generation is undone`);
    this.button.focus();
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
    const body = {
      model: side.model.name,
      text,
      heads: side.selected,
      max_new_tokens: Number(this.count.value),
      temperature: Number(this.temperature.value),
      seed: Math.floor(Math.random() * 2 ** 31),
      edits: side.base.edits,
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
    announce(say`${counted(tokens.length - begin)} {0|token|tokens} generated`);
    // Text typed meanwhile is kept.
    if (tokens.length === begin || side.frame.prompt.value !== typed) return;
    // The other prompt has fewer tokens than the text now has.
    if (side.patched.size) side.endPatch(say`The text was continued with the patch. It is removed now, because the other prompt has fewer tokens.`);
    side.setText(text, tokens.length - 1);
    // A text field makes one kind of all line ends.
    this.past.push({ before: typed, after: side.text });
  }

  #setRunning(running) {
    this.running = running;
    this.button.textContent = running ? say`Stop` : say`Generate`;
    this.button.setAttribute("aria-pressed", String(running));
    this.#check();
  }
}
