// When did the model know? Each layer read as if it were the last: its first guesses, and the probability of
// the word as a curve that runs down through the layers.

import { h, s } from "./dom.js";
import { percent } from "./format.js";
import { say } from "./language.js";
import { listedToken, shorten } from "./token_text.js";
import { namedWords, Question } from "./why_question.js";

const ROW = 32;
// Of more layers those are folded in which the word is still unlikely.
const MOST_ROWS = 14;
const UNLIKELY = 0.01;

export class LayerCurve {
  constructor(side) {
    this.side = side;
    this.question = new Question(say`When did the model know?`, say`Each layer is read as if it were the last: the final norm and the output weights are applied to what it leaves (the logit lens). Early layers often speak another language, so that their words may mean little.`);
    this.element = this.question.element;
  }

  show(lens) {
    const other = JSON.stringify(lens.target) !== JSON.stringify(this.lens?.target);
    if (other) this.all = false;
    this.lens = this.question.answered(lens) ? lens : null;
    if (this.lens) this.#draw();
  }

  #draw() {
    const { steps, target } = this.lens;
    this.question.summary.textContent = this.#summary(this.lens);
    const likely = steps.findIndex((step) => step.probability >= UNLIKELY);
    const from = steps.length <= MOST_ROWS || this.all ? 1 : Math.max(1, Math.min(likely < 0 ? steps.length : likely - 1, steps.length - MOST_ROWS / 2));
    const places = [...steps.keys()].filter((place) => place === 0 || place >= from);
    const rows = places.map((place) => this.#row(steps[place], place, target));
    if (from > 1) rows.splice(1, 0, this.#fold(from));
    // The folded layers are one row of the curve.
    const down = (row) => (row && from > 1 ? row + 1.5 : row + 0.5) * ROW;
    const points = places.map((place, row) => `${(100 * steps[place].probability).toFixed(2)},${down(row)}`);
    const curve = s("svg", { class: "curve", viewBox: `0 0 100 ${rows.length * ROW}`, preserveAspectRatio: "none", "aria-hidden": "true" }, s("polyline", { points: points.join(" "), fill: "none", "vector-effect": "non-scaling-stroke" }));
    const title = (label) => h("span", { role: "columnheader" }, label);
    const ends = h("span", { class: "curve-ends", "aria-hidden": "true" }, h("span", {}, percent(0)), h("span", {}, percent(1)));
    const head = h("div", { class: "layer-row layer-head", role: "row" }, title(say`after`), title(ends), title(say`probability`), title(say`first guesses`));
    const list = h("div", { class: "layer-rows", role: "presentation" }, h("div", { class: "curve-room", role: "presentation" }, curve), ...rows);
    this.question.body.replaceChildren(h("div", { class: "layers", role: "table", "aria-label": say`The first guesses after each layer` }, head, list));
  }

  #fold(from) {
    const open = () => {
      this.all = true;
      this.#draw();
    };
    const name = from === 2 ? "L0" : `L0 – L${from - 2}`;
    return h("div", { class: "layer-row is-fold", role: "row" }, h("span", { class: "layer-name", role: "rowheader" }, name), h("span"), h("span", { class: "number", role: "cell" }, "⋮"), h("span", { role: "cell" }, h("button", { type: "button", class: "plain", on: { click: open } }, say`Show all layers`)));
  }

  #row(step, place, target) {
    const words = step.top.map((each) =>
      h("span", { class: `guess${each.id === target.id ? " is-target" : ""}`, title: percent(each.probability), vars: { "--sure": each.probability.toFixed(3) } }, shorten(listedToken(each.text), 12)),
    );
    const dot = h("i", { vars: { "--at": `${(100 * step.probability).toFixed(2)}%` } });
    return h(
      "div",
      { class: `layer-row${step.rank === 0 ? " is-first" : ""}`, role: "row" },
      h("span", { class: "layer-name", role: "rowheader" }, layerName(place)),
      h("span", { class: "curve-cell", role: "cell", "aria-hidden": "true" }, dot),
      h("span", { class: "number", role: "cell" }, percent(step.probability)),
      h("span", { class: "guesses", role: "cell" }, ...words),
    );
  }

  #summary({ steps, settled, target }) {
    const [word, last] = namedWords(target, steps.at(-1).top[0]);
    if (settled === null) return say`“${word}” is not the first guess: the last layer prefers “${last}”.`;
    if (settled === 0) return say`“${word}” is the first guess from the start.`;
    const [, before] = namedWords(target, steps[settled - 1].top[0]);
    if (settled === 1) return say`“${word}” is the first guess from layer 0 on; the embedding alone says “${before}”.`;
    return say`“${word}” is the first guess from layer ${settled - 1} on; after layer ${settled - 2} it was still “${before}”.`;
  }
}

function layerName(place) {
  return place === 0 ? say`embedding` : `L${place - 1}`;
}
