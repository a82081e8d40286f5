// The attention map of one head: queries down, keys across. A long text has a window, and a small
// overview beside it where a click moves the window.

import { colorTable, sequential } from "./color.js";
import { h } from "./dom.js";
import { percent } from "./format.js";
import { say, sayParts } from "./language.js";
import { pixels } from "./pixels.js";

const WINDOW = 160;
const OVERVIEW = 200;
// The strongest color is never a smaller weight than this.
const FAINTEST = 0.002;

export class MapView {
  constructor(side) {
    this.side = side;
    this.head = null;
    this.corner = [0, 0];
    this.canvas = h("canvas", { role: "img", class: "map" });
    this.overview = h("canvas", { class: "overview", width: OVERVIEW, height: OVERVIEW, "aria-label": say`Overview of the pattern; click to move the window`, role: "img" });
    this.tip = h("p", { class: "tip", "aria-hidden": "true" });
    this.thumbs = h("div", { class: "thumbs", role: "group", "aria-label": say`Head of the map` });
    this.room = h("div", {}, this.canvas, this.tip);
    this.element = h("div", { class: "map-view" }, h("div", { class: "map-frame" }, this.room, h("div", { class: "thumbs" }, this.thumbs, this.overview)));
    new ResizeObserver(() => this.#resized()).observe(this.room);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.pointing = false;
      this.#explain();
      side.hover(null);
    });
    this.canvas.addEventListener("click", (event) => this.#click(this.#under(event)));
    this.overview.addEventListener("click", (event) => this.#move(event));
  }

  clear() {
    Object.assign(this, { shown: null, drawn: null, frame: null, most: null, pointing: false });
  }

  span() {
    const count = this.side.tokens.length;
    const size = Math.min(WINDOW, count);
    const start = (place) => Math.max(0, Math.min(count - size, place));
    const [row, key] = this.corner.map(start);
    return { rows: [row, row + size], keys: [key, key + size] };
  }

  follow(at) {
    if (at === null || this.side.tokens.length <= WINDOW) return;
    const { rows } = this.span();
    if (at < rows[0] || at >= rows[1]) this.corner = [at - WINDOW / 2, at - WINDOW / 2];
  }

  async draw() {
    const { side } = this;
    if (!side.selected.includes(this.head)) this.head = side.selected.at(-1) ?? null;
    this.#list();
    const empty = this.head === null;
    this.canvas.hidden = empty;
    this.overview.hidden = empty || side.tokens.length <= WINDOW;
    if (empty) {
      this.clear();
      this.tip.textContent = say`Select a head to see its map.`;
      return;
    }
    const { patterns } = side;
    const { rows, keys } = this.span();
    const shown = await patterns.window(this.head, rows, keys, WINDOW, "map");
    if (patterns !== side.patterns) return;
    Object.assign(this, { shown, drawn: patterns, at: { rows, keys }, pointing: this.pointing && patterns === this.drawn });
    this.most = brightest(this.shown);
    this.#paint();
    // Keep the text about the cell under the pointer.
    if (!this.pointing) this.#explain();
    if (!this.overview.hidden) await this.#paintAll(rows, keys);
  }

  #resized() {
    if (this.drawn && this.drawn === this.side.patterns && this.element.isConnected) this.#paint();
  }

  #explain() {
    if (this.most) this.tip.textContent = say`Queries down, keys across: a row shows the attention of its token. The strongest color is ${percent(this.most)}.`;
  }

  #paint() {
    const { side, at } = this;
    const count = at.rows[1] - at.rows[0];
    const names = count <= 44;
    const room = names ? 110 : 8;
    const place = this.room.clientWidth || 640;
    const cell = Math.max(2, Math.min(30, Math.floor((Math.min(place, 760) - room - 8) / count)));
    const size = cell * count;
    const ratio = window.devicePixelRatio || 1;
    const [wide, tall] = [size + room + 8, size + (names ? 84 : 8)];
    Object.assign(this.canvas, { width: wide * ratio, height: tall * ratio });
    Object.assign(this.canvas.style, { width: `${wide}px`, height: `${tall}px` });
    const ink = this.canvas.getContext("2d");
    ink.scale(ratio, ratio);
    const top = names ? 76 : 4;
    ink.imageSmoothingEnabled = false;
    ink.drawImage(painted(this.shown, this.most), room, top, size, size);
    this.frame = { room, top, cell, count };
    const style = getComputedStyle(this.element);
    ink.strokeStyle = style.color;
    const focus = side.focus;
    if (focus !== null && focus >= at.rows[0] && focus < at.rows[1]) {
      ink.globalAlpha = 0.75;
      ink.strokeRect(room - 0.5, top + (focus - at.rows[0]) * cell - 0.5, size + 1, cell + 1);
      ink.globalAlpha = 1;
    }
    if (names) {
      const word = (start, most) => (place) => side.label(start + place, most);
      nameAxes(ink, style, this.frame, word(at.rows[0], 14), word(at.keys[0], 12), focus - at.rows[0]);
    }
    this.canvas.setAttribute("aria-label", say`Map of ${this.head}: tokens ${at.rows[0] + 1} to ${at.rows[1]} down, the tokens they attend to across`);
  }

  async #paintAll(rows, keys) {
    const count = this.side.tokens.length;
    const all = [0, count];
    const { patterns } = this.side;
    const whole = await patterns.window(this.head, all, all, OVERVIEW, "overview");
    if (patterns !== this.side.patterns) return;
    const ink = this.overview.getContext("2d");
    ink.clearRect(0, 0, OVERVIEW, OVERVIEW);
    ink.drawImage(painted(whole, brightest(whole)), 0, 0, OVERVIEW, OVERVIEW);
    ink.strokeStyle = "#d55e00";
    ink.lineWidth = 2;
    const scale = OVERVIEW / count;
    const side = Math.max(6, (rows[1] - rows[0]) * scale);
    ink.strokeRect(keys[0] * scale, rows[0] * scale, side, side);
  }

  #list() {
    const buttons = this.side.selected.map((head) =>
      h("button", { type: "button", "aria-pressed": String(head === this.head), on: { click: () => this.#turnTo(head) } }, h("span", { class: "swatch", vars: { "--color": this.side.colorOf(head) } }), head),
    );
    this.thumbs.replaceChildren(...buttons);
  }

  #turnTo(head) {
    this.head = head;
    this.draw().catch(this.side.failed);
  }

  #move(event) {
    const box = this.overview.getBoundingClientRect();
    const count = this.side.tokens.length;
    const place = (part) => Math.round(part * count - WINDOW / 2);
    this.corner = [place((event.clientY - box.top) / box.height), place((event.clientX - box.left) / box.width)];
    this.draw().catch(this.side.failed);
  }

  #under(event) {
    if (!this.frame) return null;
    const box = this.canvas.getBoundingClientRect();
    const scale = box.width / parseFloat(this.canvas.style.width);
    const { room, top, cell, count } = this.frame;
    const column = Math.floor(((event.clientX - box.left) / scale - room) / cell);
    const row = Math.floor(((event.clientY - box.top) / scale - top) / cell);
    if (column < 0 || row < 0 || column >= count || row >= count) return null;
    return { query: this.at.rows[0] + row, key: this.at.keys[0] + column, value: this.shown.weights[row * count + column] };
  }

  // A click selects a token; in the row of the selected one it explains a link.
  #click(cell) {
    const { side } = this;
    const isLink = cell && cell.query === side.at && (cell.value > 0 || side.cuts.isCut(this.head, cell.query, cell.key));
    if (isLink) side.reasons.open(this.head, cell.query, cell.key);
    else side.select(cell?.query ?? null);
  }

  #point(event) {
    const found = this.#under(event);
    if (!found) return;
    const word = (index) => h("span", { class: "word" }, this.side.label(index));
    this.pointing = true;
    this.tip.replaceChildren(...sayParts`${word(found.query)} attends to ${word(found.key)} with a weight of ${percent(found.value)}`);
    this.side.hover(found.query, false);
  }
}

// The tokens of the queries at the left of a map and those of the keys above it.
export function nameAxes(ink, style, { room, top, cell, count }, query, key, bold = null) {
  const points = Math.min(13, cell - 1);
  if (points < 8) return;
  const write = (text, x, y, align, weight = 400) => {
    Object.assign(ink, { fillStyle: style.color, textAlign: align, textBaseline: "middle", font: `${weight} ${points}px ${style.fontFamily}` });
    ink.fillText(text, x, y);
  };
  ink.globalAlpha = 0.65;
  write(say`key →`, room - 6, top - 24, "right");
  write(say`query ↓`, room - 6, top - 8, "right");
  ink.globalAlpha = 1;
  for (let place = 0; place < count; place += 1) {
    const weight = place === bold ? 700 : 400;
    write(query(place), room - 6, top + (place + 0.5) * cell, "right", weight);
    ink.save();
    ink.translate(room + (place + 0.5) * cell, top - 6);
    ink.rotate(-Math.PI / 3);
    write(key(place), 0, 0, "left", weight);
    ink.restore();
  }
}

// The largest weight of a window, so that faint patterns are visible too.
export function brightest({ weights }) {
  return weights.reduce((most, value) => Math.max(most, value), FAINTEST);
}

// An image of a window, one pixel per cell, colored by the square root of the weights.
export function painted({ height, width, weights }, most) {
  const colors = colorTable(sequential);
  return pixels(height, width, (place) => colors[Math.round(255 * Math.sqrt(Math.min(1, weights[place] / most)))]);
}
