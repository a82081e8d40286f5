// "Why this word?": a card about one predicted word, opened by a button at the predictions. It asks four
// questions: when the model knew, which heads spoke for the word, from which words it came, which place matters.

import { wasAborted } from "./api.js";
import { announce, debounce, h } from "./dom.js";
import { percent } from "./format.js";
import { say, sayParts } from "./language.js";
import { listedToken } from "./token_text.js";
import { LayerCurve } from "./why_layers.js";
import { Waterfall } from "./why_parts.js";
import { Places } from "./why_places.js";
import { namedWords, quoted } from "./why_question.js";
import { Routes } from "./why_routes.js";
import "./russian_why.js";

const ANOTHER = "another";
const ALONE = "alone";

export class Why {
  constructor(side) {
    this.side = side;
    this.turn = 0;
    this.button = h("button", { type: "button", class: "why-open", "aria-expanded": "false", on: { click: () => this.toggle() } });
    this.title = h("h2", { tabindex: -1 });
    this.about = h("p", { class: "quiet" });
    this.target = new WordChoice(say`The word to explain`, () => this.#load());
    this.foil = new WordChoice(say`The word to compare it with`, () => this.#load());
    const close = h("button", { type: "button", class: "plain", on: { click: () => this.toggle() } }, say`Close`);
    this.layers = new LayerCurve(side);
    this.parts = new Waterfall(side);
    this.routes = new Routes(side);
    this.places = new Places(side, () => this.target.id);
    this.choices = h("p", { class: "why-choices" }, ...this.#asks(true));
    this.element = h(
      "section",
      { class: "card why", hidden: true },
      h("div", { class: "why-column" }, h("header", {}, this.title, close), this.about, this.choices, this.layers.element, this.parts.element, this.routes.element, this.places.element),
    );
    this.loadSoon = debounce(120, () => this.#load());
  }

  get isOpen() {
    return !this.element.hidden;
  }

  toggle() {
    this.element.hidden = this.isOpen;
    this.button.setAttribute("aria-expanded", String(this.isOpen));
    if (!this.isOpen) {
      this.#stop();
      this.button.focus();
      return;
    }
    this.#load();
    this.title.focus({ preventScroll: true });
    this.element.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  // The prediction has changed: another text, token or edit.
  update() {
    const { side } = this;
    const able = side.prediction !== null && side.model.output !== "none";
    const isClass = side.model.output === "classes" || side.model.output === "token classes";
    this.button.textContent = isClass ? say`Why this class?` : say`Why this word?`;
    this.button.hidden = !able;
    if (!able && this.isOpen) this.toggle();
    if (this.isOpen) this.loadSoon();
  }

  // The kinds of heads have arrived.
  named() {
    if (!this.isOpen) return;
    this.parts.draw();
    this.routes.draw();
  }

  // The theme or the selection has changed.
  draw() {
    if (!this.isOpen) return;
    for (const part of [this.parts, this.routes, this.places]) part.draw();
  }

  #stop() {
    this.turn += 1;
    this.places.stop();
    for (const kind of ["why_parts", "why_lens"]) this.side.api.stop(kind);
  }

  // A word that was chosen stays through edits; another text or token has words of its own.
  async #load() {
    const { side } = this;
    if (!this.isOpen || side.at === null) return;
    const question = JSON.stringify([side.model.name, side.text, side.at]);
    if (question !== this.question) {
      this.question = question;
      this.target.reset();
      this.foil.reset();
      this.places.reset();
    }
    const turn = ++this.turn;
    const body = { ...side.base, position: side.at, ...this.target.field("target") };
    const foil = this.foil.value === ALONE ? { alone: true } : this.foil.field("foil");
    this.element.setAttribute("aria-busy", "true");
    try {
      const [parts, lens] = await Promise.all([side.api.ask("why_parts", { ...body, ...foil }), side.api.ask("why_lens", body)]);
      if (turn !== this.turn) return;
      this.#show(parts, lens);
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    } finally {
      if (turn === this.turn) this.element.setAttribute("aria-busy", "false");
    }
  }

  #show(parts, lens) {
    const { side } = this;
    const target = parts.target ?? lens.target;
    // A model whose logits are no sums has its words from the predictions.
    const candidates = parts.candidates ?? side.prediction.top;
    const probability = candidates.find((each) => each.id === target?.id)?.probability ?? lens.steps?.at(-1).probability;
    const [word] = target ? namedWords(target) : [""];
    this.title.textContent = word ? say`Why “${word}”?` : this.button.textContent;
    this.element.setAttribute("aria-label", this.title.textContent);
    this.about.replaceChildren(...(probability === undefined ? [] : [this.#saidAbout(word, percent(probability))]));
    this.target.show(candidates, target, []);
    this.foil.show(candidates.filter((each) => each.id !== target?.id), parts.foil, [[ALONE, say`no other word`]]);
    // Without sums of logits there is nothing to compare.
    if (this.foil.element.isConnected === Boolean(parts.reason)) this.choices.replaceChildren(...this.#asks(!parts.reason));
    this.layers.show(lens);
    this.parts.show(parts);
    this.routes.show(parts);
    this.places.show();
    if (!parts.reason) announce(this.parts.summary.textContent);
  }

  #asks(compares) {
    return compares ? sayParts`Why ${this.target.element} rather than ${this.foil.element}?` : sayParts`Why ${this.target.element}?`;
  }

  #saidAbout(word, probability) {
    const { side } = this;
    const edited = side.changed ? ` ${say`The heads and links that you changed stay changed here.`}` : "";
    const at = side.label(side.at);
    const about = { "next token": say`After “${at}” the model gives it ${probability}.`, "masked token": say`In place of “${at}” the model gives it ${probability}.` };
    return `${about[side.model.output] ?? say`The model gives it ${probability}.`}${edited}`;
  }
}

// A word among the most likely ones, or any other that is typed.
export class WordChoice {
  constructor(label, changed) {
    this.changed = changed;
    this.select = h("select", { "aria-label": label, on: { change: () => this.#picked() } });
    this.typed = h("input", { type: "text", "aria-label": say`${label}, typed`, placeholder: say`a word`, hidden: true, spellcheck: "false", autocomplete: "off" });
    this.typed.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.#enter();
      if (event.key === "Escape") this.#leave();
    });
    this.typed.addEventListener("change", () => this.#enter());
    this.element = h("span", { class: "word-choice" }, this.select, this.typed);
    this.reset();
  }

  // The number of the word, a typed word, ALONE, or null for the first that fits.
  reset() {
    Object.assign(this, { value: null, id: null });
  }

  field(name) {
    return this.value === null || this.value === ALONE ? {} : { [name]: this.value };
  }

  show(words, chosen, extra) {
    const listed = chosen && !words.some((each) => each.id === chosen.id) ? [...words, chosen] : words;
    const options = listed.map((each) => h("option", { value: each.id }, each.probability === undefined ? quoted(listedToken(each.text)) : `${quoted(listedToken(each.text))} ${percent(each.probability)}`));
    const more = [...extra, [ANOTHER, say`another word…`]].map(([value, label]) => h("option", { value }, label));
    this.select.replaceChildren(...options, ...more);
    this.id = chosen?.id ?? null;
    if (this.value !== ALONE) this.value = this.id;
    this.select.value = this.value === ALONE ? ALONE : String(this.id);
    this.#leave();
  }

  #picked() {
    if (this.select.value === ANOTHER) {
      this.typed.hidden = false;
      this.typed.focus();
      return;
    }
    this.value = this.select.value === ALONE ? ALONE : Number(this.select.value);
    this.changed();
  }

  #enter() {
    const word = this.typed.value.trim();
    if (!word) return;
    this.typed.value = "";
    this.value = word;
    this.changed();
  }

  #leave() {
    this.typed.hidden = true;
    this.typed.value = "";
    this.select.value = this.value === ALONE ? ALONE : String(this.id);
  }
}
