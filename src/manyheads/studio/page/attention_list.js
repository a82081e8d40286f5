// The tokens that the current one attends to, by selected head, and those that attend to it.

import { h, announce } from "./dom.js";
import { percent } from "./format.js";
import { say, sayParts } from "./language.js";

const TOP_K = 3;

export class AttentionList {
  constructor(side) {
    this.side = side;
    this.element = h("div", { class: "attention-list" });
  }

  clear() {
    this.element.replaceChildren();
  }

  show(at, from, to) {
    const { side } = this;
    if (!side.selected.length) {
      this.clear();
      return;
    }
    const word = () => h("span", { class: "word" }, side.label(at, 24));
    const told = at >= side.strip.fresh ? side.strip.probability(at) : null;
    this.element.replaceChildren(...(told ? [h("p", { class: "quiet told" }, word(), " ", told)] : []), this.#list(sayParts`${word()} attends to`, from), this.#list(sayParts`${word()} is attended to by`, to));
    announce(`${say`Token ${at + 1}, ${side.label(at)}`}. ${this.#spoken(from)}`);
  }

  #list(title, found) {
    const lines = this.side.selected.map((head) => {
      const off = this.side.ablated.has(head);
      const mark = off ? h("span", { class: "bad", title: say`The head still computes these weights, but the model goes on without what it finds there.` }, say`switched off`) : null;
      return h("li", {}, h("span", { class: "swatch", vars: { "--color": this.side.colorOf(head) } }), h("span", { class: "who" }, head), h("span", { class: off ? "what off" : "what" }, this.#tokens(found[head])), mark);
    });
    return h("div", {}, h("h3", {}, title), h("ul", {}, lines));
  }

  #tokens(found) {
    if (!found) return "…";
    if (!found.positions.length) return "–";
    return found.positions.slice(0, TOP_K).flatMap((place, index) => [
      index ? "  " : "",
      h("span", { class: "word", title: say`token ${place + 1}` }, this.side.label(place, 14)),
      ` ${percent(found.weights[index])}`,
    ]);
  }

  #spoken(found) {
    return this.side.selected
      .filter((head) => found[head]?.positions.length)
      .map((head) => `${say`${head} attends to ${this.side.label(found[head].positions[0])}, ${percent(found[head].weights[0])}`}${this.side.ablated.has(head) ? `, ${say`switched off`}` : ""}`)
      .join(". ");
  }
}
