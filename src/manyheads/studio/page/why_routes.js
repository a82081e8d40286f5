// From which words did it come? What heads add by reading each word: lines run from the words of the text through
// heads to the prediction, and each of these links can be cut.

import { headLink } from "./atlas.js";
import { h, renew, s } from "./dom.js";
import { percent } from "./format.js";
import { kindName } from "./head_words.js";
import { say } from "./language.js";
import { visibleToken } from "./token_text.js";
import { added, namedWords, Question, quoted } from "./why_question.js";

const MOST_LINES = 14;
const MOST_HEADS = 6;
const LISTED = 8;
// A longer text is shown around the words that matter.
const WHOLE_TEXT = 90;
const AROUND = 4;

export class Routes {
  constructor(side) {
    this.side = side;
    this.question = new Question(
      "",
      say`A head's part is divided among the words it reads: attention weight times what the head writes for that word. Over all words this sums to the head's part. What reached those words through earlier layers counts for them; MLPs, embedding and biases have no route.`,
    );
    this.element = this.question.element;
    this.room = h("div", { class: "routes" });
    this.list = h("ol", { class: "route-list" });
    this.question.body.append(this.room, this.list);
    new ResizeObserver(() => this.#lines()).observe(this.room);
  }

  show(response) {
    this.question.title = this.side.isVision ? say`From which patches did it come?` : say`From which words did it come?`;
    this.response = this.question.answered(response) ? response : null;
    this.draw();
  }

  draw() {
    const { response } = this;
    if (!response) return;
    const strongest = response.routes.toSorted((one, other) => Math.abs(other.value) - Math.abs(one.value));
    const heads = [...new Set(strongest.slice(0, MOST_LINES).map((each) => each.head))].slice(0, MOST_HEADS);
    this.drawn = strongest.slice(0, MOST_LINES).filter((each) => heads.includes(each.head));
    const parts = new Map(response.layers.flatMap((layer) => layer.heads).map((each) => [each.head, each.value]));
    // Heads in the order of their first words, so that lines cross little.
    const first = (head) => Math.min(...this.drawn.filter((each) => each.head === head).map((each) => each.token));
    heads.sort((one, other) => first(one) - first(other));
    const [word, rival] = namedWords(...[response.target, response.foil].filter(Boolean));
    this.words = new Map();
    this.chips = new Map(heads.map((head) => [head, h("span", { class: "route-head" }, head, h("small", {}, added(parts.get(head))))]));
    this.parts = parts;
    this.target = h("span", { class: "route-target" }, word, rival ? h("small", {}, say`rather than “${rival}”`) : null);
    const text = h("p", { class: "route-text", dir: "auto" }, ...this.#text(response));
    this.ink = s("svg", { class: "route-lines", "aria-hidden": "true" });
    this.room.replaceChildren(this.ink, text, h("div", { class: "route-heads" }, ...this.chips.values()), h("div", { class: "route-end" }, this.target));
    renew(this.list, ...strongest.slice(0, LISTED).map((each) => this.#item(each)));
    this.#summary(response);
    this.#lines();
  }

  // Tokens, shaded by what heads read from them; of a long text those around the routes.
  #text({ tokens }) {
    const { side } = this;
    const ends = new Set([...this.drawn.map((each) => each.token), side.at]);
    const near = (place) => tokens.length <= WHOLE_TEXT || [...ends].some((end) => Math.abs(end - place) <= AROUND);
    const most = Math.max(...tokens.map(Math.abs)) || 1;
    const shown = [];
    let skipped = 0;
    tokens.forEach((value, place) => {
      // What comes later cannot be read.
      if (!near(place) || (side.model.output === "next token" && place > side.at)) {
        skipped += 1;
        return;
      }
      if (skipped) shown.push(h("span", { class: "quiet" }, " … "));
      skipped = 0;
      const word = h("span", { class: `route-word${side.isVision ? " is-patch" : ""} ${value < 0 ? "against" : "for"}${place === side.at ? " is-at" : ""}`, title: added(value), vars: { "--strong": `${Math.round((55 * Math.abs(value)) / most)}%` } }, visibleToken(side.tokens[place] ?? ""));
      this.words.set(place, word);
      // Patches of an image are no letters of a word.
      if (side.isVision && shown.length) shown.push(" ");
      shown.push(word);
    });
    return shown;
  }

  #lines() {
    if (!this.response || !this.ink || !this.room.clientWidth) return;
    const box = this.room.getBoundingClientRect();
    const place = (element, edge) => {
      const own = element.getBoundingClientRect();
      return [own.left + own.width / 2 - box.left, own[edge] - box.top];
    };
    this.ink.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const most = Math.max(...this.drawn.map((each) => Math.abs(each.value))) || 1;
    const paths = [];
    const line = ([x, y], [toX, toY], value, head) => {
      const middle = (y + toY) / 2;
      const size = Math.min(1, Math.abs(value) / most);
      paths.push(s("path", { d: `M${x} ${y}C${x} ${middle} ${toX} ${middle} ${toX} ${toY}`, class: value < 0 ? "against" : "for", "data-head": head, "stroke-width": (1 + 6 * size).toFixed(2), "stroke-opacity": (0.3 + 0.5 * size).toFixed(2) }));
    };
    for (const { token, head, value } of this.drawn) {
      const word = this.words.get(token);
      if (word) line(place(word, "bottom"), place(this.chips.get(head), "top"), value, head);
    }
    for (const [head, chip] of this.chips) line(place(chip, "bottom"), place(this.target, "top"), this.parts.get(head), head);
    this.ink.replaceChildren(...paths);
  }

  #item({ token, head, value, weight }) {
    const { side } = this;
    const [label] = side.kinds[head] ?? [];
    const query = this.#query();
    const cut = query === null ? null : h("button", { type: "button", class: "plain", "aria-label": say`Cut the link of ${head} to “${side.label(token)}”`, on: { click: () => side.toggleLink(head, query, token) } }, say`Cut`);
    return h(
      "li",
      { class: value < 0 ? "against" : "for" },
      h("span", { class: "word", title: say`token ${token + 1}` }, side.label(token)),
      h("span", { class: "quiet", "aria-hidden": "true" }, "→"),
      h("span", {}, headLink(side, head), label ? h("small", { class: "quiet" }, ` ${kindName(label.name)}`) : null),
      h("span", { class: "quiet number" }, say`weight ${percent(weight)}`),
      h("span", { class: "number" }, added(value)),
      cut,
    );
  }

  // The token that reads, where it is one: the class of a text or an image may be read from all of them.
  #query() {
    const { side } = this;
    if (side.model.output === "classes") return null;
    return side.at;
  }

  #summary({ tokens, rest }) {
    const { side, question } = this;
    const ranked = tokens.map((value, place) => [place, value]).sort((one, other) => other[1] - one[1]);
    const named = (pairs) => pairs.map(([place, value]) => `${quoted(side.label(place))} ${added(value)}`).join(", ");
    const backers = ranked.filter((pair) => pair[1] >= 0.005).slice(0, 2);
    const others = ranked.filter((pair) => pair[1] <= -0.005).slice(-2).reverse();
    const sum = tokens.reduce((sum, value) => sum + value, 0) + rest;
    const parts = [say`Heads add ${added(sum)} in all.`, backers.length ? say`Most for it: ${named(backers)}.` : "", others.length ? say`Most against it: ${named(others)}.` : ""];
    question.summary.textContent = parts.filter(Boolean).join(" ");
  }
}
