// The difference between two sides.

import { signed } from "./predictions.js";
import { colorTable, css, diverging } from "./color.js";
import { h, debounce } from "./dom.js";
import { formatted, percent } from "./format.js";
import { pixels } from "./map_view.js";
import { labelOf, unitOf } from "./measures.js";
import { MAX_COMPLETE } from "./patterns.js";
import { shortToken } from "./token_text.js";

const LARGEST = 96;

export class Difference {
  constructor(place) {
    this.place = place;
    this.update = debounce(250, (sides) => this.#draw(sides));
  }

  hide() {
    this.update.cancel();
    this.place.hidden = true;
  }

  async #draw(sides) {
    const [one, other] = sides;
    if (!one?.tokens.length || !other?.tokens.length) {
      this.place.hidden = true;
      return;
    }
    const heads = [one, other].map((side) => (side.selected.includes(side.map.head) ? side.map.head : side.selected.at(-1)));
    let map = h("p", { class: "empty" }, `Select a head on each side, on texts with the same number of tokens and at most ${MAX_COMPLETE}, to see where they differ.`);
    if (heads.every(Boolean) && one.tokens.length === other.tokens.length && one.tokens.length <= MAX_COMPLETE) {
      map = await this.#map(one, other, heads);
    }
    this.place.replaceChildren(h("header", {}, h("h2", {}, "Difference"), h("span", { class: "quiet" }, "A minus B")), h("div", { class: "versus" }, map, this.#table(one, other, heads)));
    this.place.hidden = false;
  }

  async #map(one, other, heads) {
    const count = one.tokens.length;
    const all = [0, count];
    const [mine, theirs] = await Promise.all([one.patterns.window(heads[0], all, all, count, null), other.patterns.window(heads[1], all, all, count, null)]);
    const common = mine.weights.reduce((sum, weight, place) => sum + Math.min(weight, theirs.weights[place]), 0);
    const colors = colorTable((value) => diverging(value * 2 - 1));
    const colorAt = (place) => {
      const apart = mine.weights[place] - theirs.weights[place];
      return colors[Math.round(127.5 + 127.5 * Math.sign(apart) * Math.sqrt(Math.min(1, Math.abs(apart))))];
    };
    const size = Math.max(3, Math.min(14, Math.floor(400 / count))) * count;
    const canvas = h("canvas", { width: size, height: size, role: "img", "aria-label": `Where A ${heads[0]} and B ${heads[1]} attend differently` });
    canvas.style.borderRadius = "8px";
    canvas.style.maxWidth = "100%";
    const ink = canvas.getContext("2d");
    ink.imageSmoothingEnabled = count > LARGEST;
    ink.drawImage(pixels(count, count, colorAt), 0, 0, size, size);
    const sign = (value, text) => h("span", {}, h("span", { class: "swatch", vars: { "--color": css(diverging(value)) } }), ` ${text}`);
    this.overlap = common / count;
    return h("figure", {}, canvas, h("figcaption", { class: "legend" }, sign(0.8, `A ${heads[0]} attends more`), sign(-0.8, `B ${heads[1]} attends more`), h("span", { "data-overlap": this.overlap.toFixed(4) }, `${percent(this.overlap)} overlap`)));
  }

  #table(one, other, heads) {
    const rows = [["", "A", "B", "A − B"], ["Model", one.model.name, other.model.name, ""], ["Tokens", String(one.tokens.length), String(other.tokens.length), ""]];
    rows.push(["Head", heads[0] ?? "–", heads[1] ?? "–", ""]);
    const [mine, theirs] = [one.prediction, other.prediction];
    if (mine?.loss != null && theirs?.loss != null) rows.push(["Loss", mine.loss.toFixed(3), theirs.loss.toFixed(3), signed(mine.loss - theirs.loss, 3)]);
    const said = (answer) => (answer?.top.length ? `${shortToken(answer.top[0].text)} ${percent(answer.top[0].probability)}` : "–");
    rows.push(["Top prediction", said(mine), said(theirs), ""]);
    for (const measure of ["previous_token", "induction", "first_token", "normalized_entropy", "distance"]) {
      const values = [one, other].map((side, place) => side.statistics?.[measure]?.[[...side.atlas.cells.keys()].indexOf(heads[place])] ?? null);
      if (values.every((value) => value !== null)) rows.push([labelOf(measure), ...[...values, values[0] - values[1]].map((value) => formatted(value, unitOf(measure)))]);
    }
    const [head, ...body] = rows;
    return h("table", { class: "plain" }, h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))), h("tbody", {}, body.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", { class: "number" }, cell))))));
  }
}
