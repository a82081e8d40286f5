// The difference between two sides.

import { signed } from "./predictions.js";
import { colorTable, css, diverging } from "./color.js";
import { h, debounce } from "./dom.js";
import { counted, fixed, formatted, percent } from "./format.js";
import { say } from "./language.js";
import { nameAxes } from "./map_view.js";
import { labelOf, unitOf } from "./measures.js";
import { MAX_COMPLETE } from "./patterns.js";
import { pixels } from "./pixels.js";
import { shortToken } from "./token_text.js";

const LONGEST_NAMED = 44;
// Patterns with a larger overlap are the same.
const SAME = 0.9995;
const MOST_NAMED = 5;

export class Difference {
  constructor(place) {
    this.place = place;
    this.update = debounce(250, (sides) => this.#draw(sides));
  }

  hide() {
    this.update.cancel();
    this.place.hidden = true;
  }

  // The first result selects the head that differs most.
  start() {
    this.starting = true;
  }

  async #draw(sides) {
    const [one, other] = sides;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    if (!one?.tokens.length || !other?.tokens.length) {
      this.place.hidden = true;
      return;
    }
    const ranking = await this.#ranked(one, other);
    if (turn !== this.turn) return;
    if (this.starting && ranking && one.statistics && other.statistics) {
      this.starting = false;
      if (ranking.overlap[0] < SAME) {
        for (const side of sides) side.lead(ranking.heads[0]);
        return;
      }
    }
    const heads = [one, other].map((side) => (side.selected.includes(side.map.head) ? side.map.head : side.selected.at(-1)));
    let map = h("p", { class: "empty" }, say`Select a head on each side, on texts with the same number of tokens and at most ${MAX_COMPLETE}, to see where they differ.`);
    if (heads.every(Boolean) && comparable(one, other)) map = await this.#map(one, other, heads);
    if (turn !== this.turn) return;
    const title = h("header", {}, h("h2", {}, say`Difference`), h("span", { class: "quiet" }, say`A minus B`));
    this.place.replaceChildren(title, changes(ranking, sides), h("div", { class: "versus" }, map, this.#table(one, other, heads)));
    this.place.hidden = false;
  }

  // The heads of both sides, those that differ most first.
  async #ranked(one, other) {
    if (!comparable(one, other) || one.isVision !== other.isVision) return null;
    const sides = [one.base, other.base];
    const key = JSON.stringify(sides);
    if (this.key !== key) {
      try {
        this.ranking = await one.api.ask("comparison", { sides });
        this.key = key;
      } catch (error) {
        one.failed(error);
        return null;
      }
    }
    return this.ranking;
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
    const canvas = h("canvas", { role: "img", "aria-label": say`Where A ${heads[0]} and B ${heads[1]} attend differently: queries down, keys across` });
    const most = Math.min(620, document.documentElement.clientWidth - 60);
    const names = count <= LONGEST_NAMED && most > 110 + 9 * count;
    const [room, top] = names ? [110, 76] : [4, 4];
    const cell = Math.max(2, Math.min(26, Math.floor((most - room - 40) / count)));
    const [wide, tall] = [room + cell * count + 40, top + cell * count + 4];
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
    canvas.style.width = `${wide}px`;
    const ink = canvas.getContext("2d");
    ink.scale(ratio, ratio);
    ink.imageSmoothingEnabled = false;
    ink.drawImage(pixels(count, count, colorAt), room, top, cell * count, cell * count);
    const word = (place, most) => [...new Set([one, other].map((side) => side.label(place, most)))].join("/");
    if (names) nameAxes(ink, getComputedStyle(document.body), { room, top, cell, count }, (place) => word(place, 14), (place) => word(place, 10));
    const sign = (value, text) => h("span", {}, h("span", { class: "swatch", vars: { "--color": css(diverging(value)) } }), ` ${text}`);
    this.overlap = common / count;
    const legend = [sign(0.8, say`A ${heads[0]} attends more`), sign(-0.8, say`B ${heads[1]} attends more`), h("span", { "data-overlap": this.overlap.toFixed(4) }, say`${percent(this.overlap)} overlap`)];
    return h("figure", {}, canvas, h("figcaption", { class: "legend" }, ...legend, h("span", {}, say`Rows are queries, columns are keys.`)));
  }

  #table(one, other, heads) {
    const rows = [["", "A", "B", "A − B"], [say`Model`, one.model.name, other.model.name, ""], [say`Tokens`, counted(one.tokens.length), counted(other.tokens.length), ""]];
    rows.push([say`Head`, heads[0] ?? "–", heads[1] ?? "–", ""]);
    const [mine, theirs] = [one.prediction, other.prediction];
    if (mine?.loss != null && theirs?.loss != null) rows.push([say`Loss`, fixed(mine.loss, 3), fixed(theirs.loss, 3), signed(mine.loss - theirs.loss, 3)]);
    const said = (answer) => (answer?.top.length ? `${shortToken(answer.top[0].text)} ${percent(answer.top[0].probability)}` : "–");
    rows.push([say`Top prediction`, said(mine), said(theirs), ""]);
    for (const measure of ["previous_token", "induction", "first_token", "normalized_entropy", "distance"]) {
      const values = [one, other].map((side, place) => side.statistics?.[measure]?.[[...side.atlas.cells.keys()].indexOf(heads[place])] ?? null);
      if (values.every((value) => value !== null)) rows.push([labelOf(measure), ...[...values, values[0] - values[1]].map((value) => formatted(value, unitOf(measure)))]);
    }
    const [head, ...body] = rows;
    return h("table", { class: "plain" }, h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))), h("tbody", {}, body.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", { class: "number" }, cell))))));
  }
}

function comparable(one, other) {
  return one.tokens.length === other.tokens.length && one.tokens.length <= MAX_COMPLETE;
}

// The heads that differ most, by name; a click selects one on both sides.
function changes(ranking, sides) {
  const differing = ranking?.heads.map((head, place) => [head, ranking.overlap[place]]).filter(([, overlap]) => overlap < SAME).slice(0, MOST_NAMED);
  if (!differing?.length) return h("p", { class: "changes" }, ranking ? say`Both sides attend alike: change the text, the model or the heads of one.` : "");
  const lead = (head) => sides.forEach((side) => side.lead(head));
  const links = differing.flatMap(([head, overlap], place) => [place ? ", " : "", h("button", { type: "button", class: "head-link", title: say`Select ${head} on both sides`, on: { click: () => lead(head) } }, head), ` ${percent(overlap)}`]);
  return h("p", { class: "changes" }, say`Heads that differ most, with the overlap of their attention:`, " ", ...links);
}
