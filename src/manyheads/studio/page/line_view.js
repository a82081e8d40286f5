// Lines from tokens to the tokens they attend to: queries at the left, keys at the right, one color
// per head, with the whole pattern of each head beside them. A long text is drawn around the selected
// token, without the patterns.

import { h, s } from "./dom.js";
import { counted } from "./format.js";
import { say } from "./language.js";
import { brightest, painted } from "./map_view.js";

const ROW = 23;
const SPAN = 36;
const NARROWEST = 300;
const WIDEST = 560;
const FAINT = 0.06;
// Smaller weights of tokens that are not selected are left out.
const BACKGROUND = 0.2;
const PATTERN = 132;

export class LineView {
  constructor(side) {
    this.side = side;
    this.start = 0;
    this.room = h("div");
    this.thumbs = h("div", { class: "patterns", role: "group", "aria-label": say`Patterns of the selected heads` });
    this.element = h("div", { class: "lines-view" }, this.room, this.thumbs);
    this.pager = h("div", { class: "pager" });
    // The listeners stay while the drawing is replaced under the pointer.
    this.room.addEventListener("pointermove", (event) => side.hover(this.#under(event)));
    this.room.addEventListener("pointerleave", () => side.hover(null));
    this.room.addEventListener("click", (event) => side.select(this.#under(event)));
    new ResizeObserver(() => this.#resized()).observe(this.room);
  }

  clear() {
    this.room.replaceChildren();
    this.thumbs.replaceChildren();
    this.pager.replaceChildren();
  }

  // The visible range of tokens.
  span() {
    const count = this.side.tokens.length;
    if (count <= SPAN) return [0, count];
    const start = Math.max(0, Math.min(count - SPAN, this.start));
    return [start, start + SPAN];
  }

  follow(at) {
    const [start, stop] = this.span();
    if (at !== null && (at < start || at >= stop)) this.start = at - SPAN + 6;
  }

  async draw() {
    const { side } = this;
    if (!side.selected.length) {
      this.clear();
      this.room.append(h("p", { class: "empty" }, say`Select a head to see its attention.`));
      return;
    }
    const { patterns } = side;
    const [start, stop] = this.span();
    const found = await patterns.rows(side.selected, start, stop);
    if (patterns !== side.patterns) return;
    this.width = this.#width();
    this.room.replaceChildren(this.drawing(found, start, stop, side.focus, this.width, true));
    this.#drawPager(start, stop);
    await this.#drawPatterns(patterns);
  }

  // The complete pattern of each head; a click opens its map.
  async #drawPatterns(patterns) {
    const { side } = this;
    const heads = patterns.short ? side.selected : [];
    const key = JSON.stringify([heads, heads.map((head) => side.colorOf(head))]);
    if (this.drawn === patterns && this.key === key) return;
    const all = [0, side.tokens.length];
    const windows = await Promise.all(heads.map((head) => patterns.window(head, all, all, side.tokens.length, null)));
    if (patterns !== side.patterns) return;
    Object.assign(this, { drawn: patterns, key });
    this.thumbs.replaceChildren(...heads.map((head, place) => {
      const canvas = h("canvas", { width: PATTERN, height: PATTERN });
      const ink = canvas.getContext("2d");
      ink.imageSmoothingEnabled = false;
      ink.drawImage(painted(windows[place], brightest(windows[place])), 0, 0, PATTERN, PATTERN);
      const open = () => {
        side.map.head = head;
        side.setView("map");
      };
      return h("button", { type: "button", "aria-label": say`Open the map of ${head}`, on: { click: open } }, canvas, h("span", {}, h("span", { class: "swatch", vars: { "--color": side.colorOf(head) } }), ` ${head}`));
    }));
  }

  // On the page the lines of the selected token can be clicked.
  drawing(found, start, stop, focus, width, clickable = false) {
    const { side } = this;
    const { left, right } = columns(width);
    const bend = (right - left) * 0.42;
    const letters = Math.floor(left / 9);
    const height = (stop - start) * ROW + 34;
    const y = (place) => (place - start) * ROW + 34 + ROW / 2;
    const ink = [];
    const targets = [];
    side.selected.forEach((head, order) => {
      // Lines of two heads between the same tokens lie side by side.
      const aside = 3 * (order - (side.selected.length - 1) / 2);
      (found[head] ?? []).forEach((row, offset) => {
        const query = start + offset;
        const chosen = focus === null || focus === query;
        row.positions.forEach((key, place) => {
          const weight = row.weights[place];
          const least = focus === null ? FAINT * 1.5 : 0.01;
          const towards = focus !== null && key === focus && weight > 0.08;
          // The other tokens are in the background.
          const behind = !chosen && !towards;
          if (weight < (behind ? BACKGROUND : least) || key < start || key >= stop) return;
          const opacity = behind ? 0.16 * weight : (chosen ? 0.12 + 0.8 * weight : 0.35 * weight) * (focus === null ? 0.75 : 1);
          const path = `M${left} ${y(query) + aside}C${left + bend} ${y(query) + aside} ${right - bend} ${y(key) + aside} ${right} ${y(key) + aside}`;
          if (clickable && !behind) targets.push(side.cuts.over(path, head, query, key, weight));
          ink.push(
            s("path", {
              d: path,
              fill: "none", stroke: side.colorOf(head), "stroke-width": (behind ? 1.2 : 0.8 + 3.4 * weight).toFixed(2), "stroke-opacity": opacity.toFixed(3),
              "stroke-dasharray": towards && !chosen ? "3 4" : null, "stroke-linecap": "round",
            }),
          );
        });
      });
    });
    const words = [];
    for (let place = start; place < stop; place += 1) {
      const dim = focus !== null && focus !== place ? "dim" : null;
      const bold = focus === place ? 700 : null;
      words.push(s("text", { x: left - 10, y: y(place) + 5, "text-anchor": "end", class: dim, "font-weight": bold }, side.label(place, letters)));
      words.push(s("text", { x: right + 10, y: y(place) + 5 }, side.label(place, letters)));
    }
    const titles = [
      s("text", { x: left - 10, y: 18, "text-anchor": "end", class: "dim", "font-size": "12.5" }, say`query`),
      s("text", { x: right + 10, y: 18, class: "dim", "font-size": "12.5" }, say`key`),
    ];
    const drawing = s("svg", { class: "lines", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": this.#description(start, stop) }, titles, ink, words, targets);
    drawing.style.maxWidth = `${width}px`;
    return drawing;
  }

  #width() {
    return Math.max(NARROWEST, Math.min(WIDEST, this.room.clientWidth || WIDEST));
  }

  // The text keeps its size, so another width needs another drawing.
  #resized() {
    if (this.room.querySelector("svg") && this.#width() !== this.width) this.draw().catch(this.side.failed);
  }

  // The token under the pointer, on either side.
  #under(event) {
    const box = this.room.querySelector("svg")?.getBoundingClientRect();
    if (!box) return null;
    const [start, stop] = this.span();
    const { width } = this;
    const { left, right } = columns(width);
    const scale = width / box.width;
    const x = (event.clientX - box.left) * scale;
    const place = start + Math.floor(((event.clientY - box.top) * scale - 34) / ROW);
    const beside = x <= left + 20 || (x >= right - 20 && x <= width);
    return beside && place >= start && place < stop ? place : null;
  }

  #description(start, stop) {
    return say`Lines from tokens ${start + 1} to ${stop} to the tokens that they attend to in ${this.side.selected.join(", ")}`;
  }

  #drawPager(start, stop) {
    const count = this.side.tokens.length;
    if (count <= SPAN) {
      this.pager.replaceChildren();
      return;
    }
    const move = (to) => {
      this.start = to;
      this.draw().catch(this.side.failed);
    };
    const range = h("input", { type: "range", min: 0, max: count - SPAN, value: start, "aria-label": say`First visible token`, on: { input: (event) => move(Number(event.target.value)) } });
    const label = h("span", { class: "number" }, say`${counted(start + 1)}–${counted(stop)} of ${counted(count)}`);
    if (this.pager.firstChild?.matches?.("input:focus, input:active")) {
      this.pager.lastChild.replaceWith(label);
      return;
    }
    this.pager.replaceChildren(range, label);
  }
}

// Where queries end and keys begin for this width.
function columns(width) {
  return { left: Math.round(width * 0.26), right: Math.round(width * 0.74) };
}
