// In words: where the token looks by each picked head, and who looks at it.

import { clipped, h, say } from "./dom.js";
import { percent } from "./format.js";

const MOST = 3;

export class Looks {
  constructor(side) {
    this.side = side;
    this.element = h("div", { class: "looks" });
  }

  clear() {
    this.element.replaceChildren();
  }

  show(at, from, to) {
    const { side } = this;
    if (!side.picked.length) {
      this.clear();
      return;
    }
    const word = h("span", { class: "word" }, clipped(side.tokens[at] ?? "", 24));
    this.element.replaceChildren(this.#list(["From ", word, " heads look at"], from), this.#list([word.cloneNode(true), " is looked at from"], to));
    say(`Token ${at + 1}, ${clipped(side.tokens[at] ?? "")}. ${this.#told(from)}`);
  }

  #list(title, found) {
    const lines = this.side.picked.map((head) => {
      const words = this.#words(found[head]);
      return h("li", {}, h("span", { class: "swatch", vars: { "--colour": this.side.colourOf(head) } }), h("span", { class: "who" }, head), h("span", { class: "what" }, words));
    });
    return h("div", {}, h("h3", {}, title), h("ul", {}, lines));
  }

  #words(found) {
    if (!found) return "…";
    if (!found.places.length) return "nothing";
    return found.places.slice(0, MOST).flatMap((place, index) => [
      index ? "  " : "",
      h("span", { class: "word", title: `token ${place + 1}` }, clipped(this.side.tokens[place] ?? "", 14)),
      ` ${percent(found.weights[index])}`,
    ]);
  }

  #told(found) {
    return this.side.picked
      .filter((head) => found[head]?.places.length)
      .map((head) => `${head} looks at ${clipped(this.side.tokens[found[head].places[0]] ?? "")}, ${percent(found[head].weights[0])}`)
      .join(". ");
  }
}
