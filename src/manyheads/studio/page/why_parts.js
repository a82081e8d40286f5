// Which heads spoke for it? What each part of the model adds to the logit, as a waterfall from the embedding to the
// sum: the heads of a layer are one row that opens, and the ten strongest heads have names.

import { headLink } from "./atlas.js";
import { h, renew } from "./dom.js";
import { fixed } from "./format.js";
import { kindName } from "./head_words.js";
import { say } from "./language.js";
import { added, namedWords, Question } from "./why_question.js";

const STRONGEST = 10;
// Of more rows those are joined that add little, beside the largest one.
const MOST_ROWS = 24;
const LITTLE = 0.08;

export class Waterfall {
  constructor(side) {
    this.side = side;
    this.open = new Set();
    this.question = new Question(
      say`Which heads spoke for it?`,
      say`Each part writes into the residual stream, and what it writes is read along the output direction of the word (minus that of the other word). All norms keep the divisor that they had in this run, so that the parts add up to the logits exactly. What a head adds through later heads and MLPs counts for those; the color “Worth for this prediction” counts it for the head, by switching it off, and so may name other heads.`,
    );
    this.summary = this.question.summary;
    this.element = this.question.element;
  }

  show(response) {
    this.response = this.question.answered(response) ? response : null;
    this.draw();
  }

  draw() {
    const { response } = this;
    if (!response) return;
    const { target, foil, value } = response;
    const [word, rival] = namedWords(target, foil);
    if (!foil) this.summary.textContent = say`The logit of “${word}” is ${fixed(value, 2)}.`;
    else if (value >= 0) this.summary.textContent = say`“${word}” leads “${rival}” by ${fixed(value, 2)} in the logits.`;
    else this.summary.textContent = say`“${word}” is behind “${rival}” by ${fixed(-value, 2)} in the logits.`;
    if (response.capped) this.summary.append(` ${say`(Before this model's cap on logits.)`}`);
    const rows = this.#rows();
    const ends = rows.flatMap((row) => [row.from, row.to]);
    this.low = Math.min(0, ...ends);
    this.span = Math.max(0, ...ends) - this.low || 1;
    const list = h("ol", { class: "waterfall", vars: { "--zero": this.#at(0) } }, ...rows.filter((row) => row.within.every((fold) => this.open.has(fold))).map((row) => this.#row(row)));
    renew(this.question.body, list, ...this.#strongest());
  }

  // Every row begins where the one before it ended; a row that opens has the sum of what is within it.
  #rows() {
    const { response } = this;
    const parts = [];
    for (const { layer, heads, feedforward, mixer } of response.layers) {
      const inside = heads.map((each) => ({ name: each.head, value: each.value, head: true, inside: [] }));
      if (heads.length) parts.push({ layer, name: say`L${layer} heads`, value: total(heads), folds: `L${layer}`, inside });
      if (mixer !== undefined) parts.push({ layer, name: say`L${layer} mixer`, value: mixer, inside: [] });
      if (feedforward !== undefined) parts.push({ layer, name: `L${layer} MLP`, value: feedforward, inside: [] });
    }
    const rows = [];
    let at = 0;
    const add = ({ inside, ...row }, within = []) => {
      rows.push({ ...row, within, from: at, to: at + row.value });
      for (const each of inside) add(each, [...within, row.folds]);
      if (!inside.length) at += row.value;
    };
    add({ name: say`Embedding`, value: response.embedding, inside: [] });
    for (const part of joined(parts)) add(part);
    add({ name: say`Biases`, value: response.biases, inside: [] });
    at = 0;
    add({ name: response.foil ? say`Difference of the logits` : say`Logit`, value: response.value, sum: true, inside: [] });
    return rows;
  }

  #row({ name, value, from, to, folds, head, within, sum }) {
    const [measured] = (head && this.side.kinds[name]) || [];
    const label = folds
      ? h("button", { type: "button", class: "fold", "aria-expanded": String(this.open.has(folds)), "aria-label": say`${name}, ${added(value)}: show its parts`, on: { click: () => this.#fold(folds) } }, name)
      : h("span", { class: "part-name" }, head ? headLink(this.side, name) : name, measured ? h("small", {}, kindName(measured.name)) : null);
    const vars = { "--from": this.#at(Math.min(from, to)), "--wide": `${(100 * Math.abs(value)) / this.span}%` };
    const is = [value < 0 ? "against" : "for", sum ? "is-sum" : "", head ? "is-head" : "", within.length ? "is-within" : ""].filter(Boolean).join(" ");
    return h("li", { class: is, "data-part": name }, label, h("span", { class: "fall", vars, "aria-hidden": "true" }, h("i")), h("span", { class: "number" }, added(value)));
  }

  #at(value) {
    return `${((100 * (value - this.low)) / this.span).toFixed(2)}%`;
  }

  #fold(layer) {
    if (!this.open.delete(layer)) this.open.add(layer);
    this.draw();
  }

  #strongest() {
    const heads = this.response.layers.flatMap((layer) => layer.heads);
    const best = heads.toSorted((one, other) => Math.abs(other.value) - Math.abs(one.value)).slice(0, STRONGEST);
    if (!best.length) return [];
    const most = Math.max(...best.map((each) => Math.abs(each.value))) || 1;
    const items = best.map(({ head, value }) =>
      h(
        "li",
        { class: value < 0 ? "against" : "for" },
        headLink(this.side, head),
        h("span", { class: "kind-name" }, this.#kind(head)),
        h("span", { class: "both-ways", vars: { "--wide": `${(50 * Math.abs(value)) / most}%` }, "aria-hidden": "true" }, h("i")),
        h("span", { class: "number" }, added(value)),
      ),
    );
    const title = best.length < heads.length ? say`The ${best.length} strongest of ${heads.length} heads` : say`All heads, the strongest first`;
    return [h("h4", {}, title), h("ol", { class: "strongest" }, ...items)];
  }

  #kind(head) {
    const { kinds, nearest } = this.side;
    if (!(head in kinds)) return Object.keys(kinds).length ? "" : "…";
    const [first] = kinds[head];
    if (first) return kindName(first.name);
    return nearest[head] ? say`nearest: ${kindName(nearest[head].name)}` : say`no kind`;
  }
}

function total(heads) {
  return heads.reduce((sum, each) => sum + each.value, 0);
}

// Neighbors that add little, as one row that opens.
function joined(parts) {
  if (parts.length <= MOST_ROWS) return parts;
  const little = LITTLE * Math.max(...parts.map((part) => Math.abs(part.value)));
  const groups = [];
  for (const part of parts) {
    const small = Math.abs(part.value) < little;
    if (small && groups.at(-1)?.small) groups.at(-1).inside.push(part);
    else groups.push({ small, inside: [part] });
  }
  return groups.flatMap(({ inside }) => (inside.length < 3 ? inside : [joinedRow(inside)]));
}

function joinedRow(inside) {
  const [first, last] = [inside[0].layer, inside.at(-1).layer];
  return { name: first === last ? `L${first}` : `L${first} – L${last}`, value: total(inside), folds: `small ${first}`, inside };
}
