// The tokens of a text as running text, with thin lines between the tokens of a word; only the visible ones
// are in the document. Bars below a token show attention from the selected token, bars above attention to
// it. A letter of several tokens stands over all of them.

import { alpha } from "./color.js";
import { h } from "./dom.js";
import { percent } from "./format.js";
import { say } from "./language.js";
import { bareBytes, tokenLabel, visibleToken } from "./token_text.js";

const GAP = 1;
const TEXT = 26;
// Room for a finger.
const AROUND = window.matchMedia("(pointer: coarse)").matches ? 5 : 2;
const BAR = 3;
const AHEAD = 6;
const pen = document.createElement("canvas").getContext("2d");

export class Tokens {
  constructor({ hover, pick }) {
    this.hover = hover;
    this.pick = pick;
    this.tokens = [];
    this.losses = [];
    this.groups = new Map();
    this.boxes = [];
    this.marks = [];
    this.at = this.over = null;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.sheet = h("div", { class: "sheet", role: "presentation" });
    this.letters = h("div", { class: "sheet", "aria-hidden": "true" });
    this.element = h(
      "div",
      { class: "strip", role: "listbox", tabindex: 0, "aria-label": say`Tokens of the text`, "aria-orientation": "horizontal" },
      this.canvas,
      this.letters,
      this.sheet,
    );
    this.element.addEventListener("scroll", () => this.#draw());
    this.element.addEventListener("pointermove", (event) => this.#point(event));
    this.element.addEventListener("pointerleave", () => this.#hovered(null));
    this.element.addEventListener("click", (event) => this.#click(event));
    this.element.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.layout()).observe(this.element);
  }

  // `groups` are the tokens that share a letter, `spaced` those after white space that is part of no token,
  // and `fresh` is the first generated one.
  show(tokens, losses, groups, { fresh = tokens.length, spaced = new Set() } = {}) {
    Object.assign(this, { tokens, losses: losses ?? [], groups, fresh, spaced });
    const mean = this.losses.reduce((sum, loss) => sum + (loss ?? 0), 0) / Math.max(1, this.losses.length);
    this.surprising = Math.max(6, 1.7 * mean);
    this.layout();
  }

  // Whether any token has a wavy line.
  get surprises() {
    return this.losses.some((loss) => (loss ?? 0) > this.surprising);
  }

  // How likely a token was to the model, in words; null where that is not known.
  probability(index) {
    if (this.losses[index] == null) return null;
    const chance = percent(Math.exp(-this.losses[index]));
    return index >= this.fresh ? say`generated, probability ${chance}` : say`probability ${chance}`;
  }

  clear() {
    Object.assign(this, { tokens: [], losses: [], groups: new Map(), marks: [], at: null, over: null });
    this.layout();
  }

  // The selected token, and the one under the pointer.
  choose(at, over = null) {
    this.at = at;
    this.over = over;
    this.#draw();
  }

  // [{ color, from: Map, to: Map }], one per selected head.
  mark(marks) {
    const before = this.marks.length;
    this.marks = marks;
    if (before === marks.length) this.#draw();
    else this.layout();
  }

  get lineHeight() {
    return TEXT + 2 * (BAR + 1) * Math.max(1, this.marks.length) + 8;
  }

  layout() {
    const width = this.element.clientWidth - 4;
    if (width <= 0) return;
    const { widths, measure } = this.#widths(width);
    // From each token to the end of its word.
    const words = [];
    for (let index = widths.length - 1; index >= 0; index -= 1) words[index] = widths[index] + (index + 1 < widths.length && !this.#beginsWord(index + 1) ? GAP + words[index + 1] : 0);
    let x = 0;
    let line = 0;
    this.boxes = this.tokens.map((token, index) => {
      let wide = widths[index];
      const group = this.#group(index);
      let needs = group ? (index === group.start ? group.wide : 0) : wide;
      if (this.#beginsWord(index) && words[index] <= width) needs = Math.max(needs, words[index]);
      if (x && x + needs > width) [x, line] = [0, line + 1];
      // A line does not begin with a space.
      const text = x || this.groups.has(index) ? this.#text(index) : this.#text(index).trimStart();
      if (!x && !this.groups.has(index)) wide = Math.min(width, measure(text, "16px", AROUND));
      const place = { x, line, wide, text };
      x += wide + (group && index + 1 < group.stop ? 0 : GAP);
      if (token.endsWith("\n")) [x, line] = [0, line + 1];
      return place;
    });
    this.lines = this.boxes.length ? this.boxes.at(-1).line + 1 : 0;
    this.starts = [];
    this.boxes.forEach((place, index) => (this.starts[place.line] ??= index));
    // An empty line starts where the next one does.
    for (let each = this.lines - 1; each >= 0; each -= 1) this.starts[each] ??= this.starts[each + 1];
    this.sheet.style.height = `${this.lines * this.lineHeight}px`;
    this.sheet.style.width = `${width}px`;
    this.element.style.height = `${Math.min(420, Math.max(1, this.lines) * this.lineHeight + 4)}px`;
    this.#draw();
  }

  // The tokens that share a letter with this one, where they fit into a line.
  #group(index) {
    const group = this.groups.get(index);
    return group?.fits ? group : null;
  }

  // A token as it stands in the text.
  #text(index) {
    const token = this.tokens[index];
    return this.groups.has(index) ? bareBytes(token) : `${this.spaced.has(index) ? " " : ""}${visibleToken(token)}`;
  }

  #special(index) {
    return /^[<[].*[>\]]$/.test(this.tokens[index].trim());
  }

  #beginsWord(index) {
    if (index === 0 || this.spaced.has(index) || /^\s/.test(this.tokens[index])) return true;
    return this.#special(index) || this.#special(index - 1) || /\s$/.test(this.tokens[index - 1]);
  }

  // The width of every token; parts of a letter are at least as wide as the letter together.
  #widths(most) {
    const { fontFamily } = getComputedStyle(this.element);
    const measured = new Map();
    const measure = (text, font, around) => {
      const key = `${font} ${text}`;
      if (!measured.has(key)) {
        pen.font = `${font} ${fontFamily}`;
        measured.set(key, Math.ceil(pen.measureText(text).width) + around);
      }
      return measured.get(key);
    };
    const widths = this.tokens.map((token, index) =>
      Math.min(most, this.groups.has(index) ? Math.max(19, measure(bareBytes(token), "10px", 7)) : measure(this.#text(index), "16px", AROUND)),
    );
    for (const group of new Set(this.groups.values())) {
      const parts = widths.slice(group.start, group.stop);
      const bare = parts.reduce((sum, wide) => sum + wide, 0);
      const stretch = Math.max(1, measure(group.text, "15px", 10) / bare);
      parts.forEach((wide, place) => (widths[group.start + place] = Math.ceil(wide * stretch)));
      group.wide = widths.slice(group.start, group.stop).reduce((sum, wide) => sum + wide, 0);
      group.fits = group.wide <= most;
    }
    return { widths, measure };
  }

  reveal(index) {
    const place = this.boxes[index];
    if (!place) return;
    const top = place.line * this.lineHeight;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    const below = top + this.lineHeight - this.element.clientHeight;
    if (below > this.element.scrollTop) this.element.scrollTop = below;
  }

  #draw() {
    if (!this.boxes.length) {
      this.sheet.replaceChildren();
      this.letters.replaceChildren();
      this.element.removeAttribute("aria-activedescendant");
      this.#paint(0, 0, 0, this.element.clientHeight);
      return;
    }
    const top = this.element.scrollTop;
    const tall = this.element.clientHeight;
    const first = Math.max(0, Math.floor(top / this.lineHeight) - AHEAD);
    const last = Math.min(this.lines - 1, Math.ceil((top + tall) / this.lineHeight) + AHEAD);
    const start = this.starts[first];
    const stop = last + 1 < this.lines ? this.starts[last + 1] : this.boxes.length;
    this.#write(start, stop);
    this.#paint(start, stop, top, tall);
  }

  // Visible elements are reused, so that focus and screen readers stay with them.
  #write(start, stop) {
    const known = new Map([...this.sheet.children].map((each) => [Number(each.dataset.index), each]));
    const wanted = [];
    const letters = [];
    for (let index = start; index < stop; index += 1) {
      const token = known.get(index) ?? this.#made(index);
      const group = this.#group(index);
      const { text } = this.boxes[index];
      if (token.textContent !== text) token.textContent = text;
      token.className = this.#names(index);
      this.#place(token, index, this.groups.has(index) ? this.boxes[index].wide : null);
      const label = tokenLabel(this.tokens[index], this.groups.get(index), 60);
      const told = this.probability(index);
      token.setAttribute("aria-label", told && index >= this.fresh ? `${label}, ${told}` : label);
      if (told) token.title = told;
      else token.removeAttribute("title");
      token.setAttribute("aria-selected", String(index === this.at));
      token.setAttribute("aria-setsize", String(this.tokens.length));
      wanted.push(token);
      if (group?.start === index) letters.push(this.#letter(group));
    }
    this.letters.replaceChildren(...letters);
    const same = wanted.length === this.sheet.children.length && wanted.every((each, place) => each === this.sheet.children[place]);
    if (!same) this.sheet.replaceChildren(...wanted);
    const active = this.at === null ? null : wanted[this.at - start];
    if (active) this.element.setAttribute("aria-activedescendant", active.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #place(element, index, wide) {
    const { x, line } = this.boxes[index];
    const y = line * this.lineHeight + (BAR + 1) * Math.max(1, this.marks.length) + 3;
    element.style.transform = `translate(${x}px, ${y}px)`;
    element.style.width = wide === null ? "" : `${wide}px`;
  }

  #letter(group) {
    const letter = h("div", { class: "letter" }, group.text);
    this.#place(letter, group.start, group.wide);
    return letter;
  }

  #made(index) {
    this.#prefix ??= `t${Math.random().toString(36).slice(2, 8)}`;
    return h("div", { role: "option", "data-index": index, id: `${this.#prefix}-${index}`, "aria-posinset": index + 1 });
  }

  #prefix = null;

  #names(index) {
    const names = ["token"];
    if (this.groups.has(index)) names.push("part");
    if (this.#special(index)) names.push("special");
    if (this.boxes[index].x && !this.groups.has(index) && !this.#beginsWord(index)) names.push("inner");
    if ((this.losses[index] ?? 0) > this.surprising) names.push("surprise");
    if (index === this.at) names.push("at");
    if (index === this.over) names.push("hover");
    if (index >= this.fresh) names.push("new");
    return names.join(" ");
  }

  #paint(start, stop, top, tall) {
    const ratio = window.devicePixelRatio || 1;
    const wide = this.element.clientWidth;
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.round(wide * ratio);
    this.canvas.height = Math.round(tall * ratio);
    const ink = this.canvas.getContext("2d");
    ink.scale(ratio, ratio);
    const heads = Math.max(1, this.marks.length);
    for (let index = start; index < stop; index += 1) {
      const { x, line, wide: width } = this.boxes[index];
      const y = line * this.lineHeight - top + (BAR + 1) * heads + 3;
      this.marks.forEach((mark, place) => {
        const from = mark.from.get(index) ?? 0;
        const to = mark.to.get(index) ?? 0;
        if (from > 0.004) {
          ink.fillStyle = alpha(mark.color, 0.34 * from);
          round(ink, x, y, width, TEXT, 4);
          ink.fillStyle = alpha(mark.color, 0.12 + 0.88 * Math.sqrt(from));
          round(ink, x + 0.5, y + TEXT + 2 + place * (BAR + 1), width - 1, BAR, 1.5);
        }
        if (to > 0.004) {
          ink.fillStyle = alpha(mark.color, 0.12 + 0.88 * Math.sqrt(to));
          round(ink, x + 0.5, y - 2 - (place + 1) * (BAR + 1) + 1, width - 1, BAR, 1.5);
        }
      });
    }
  }

  #index(event) {
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - box.left;
    const line = Math.floor((event.clientY - box.top + this.element.scrollTop) / this.lineHeight);
    if (!(line in (this.starts ?? []))) return null;
    for (let index = this.starts[line]; this.boxes[index]?.line === line; index += 1) {
      const place = this.boxes[index];
      if (x >= place.x && x < place.x + place.wide + GAP) return index;
    }
    return null;
  }

  #point(event) {
    this.#hovered(this.#index(event));
  }

  #hovered(index) {
    if (index !== this.over) this.hover(index);
  }

  #click(event) {
    const index = this.#index(event);
    if (index !== null) this.pick(index);
  }

  #key(event) {
    const here = this.at ?? this.tokens.length - 1;
    const line = this.boxes[here]?.line ?? 0;
    const last = this.tokens.length - 1;
    const moves = {
      ArrowLeft: () => here - 1,
      ArrowRight: () => here + 1,
      ArrowUp: () => this.#beside(here, line - 1),
      ArrowDown: () => this.#beside(here, line + 1),
      Home: () => 0,
      End: () => last,
    };
    if (!(event.key in moves) || !this.tokens.length) return;
    event.preventDefault();
    const next = Math.min(last, Math.max(0, moves[event.key]()));
    this.reveal(next);
    this.pick(next);
  }

  // The nearest token of another line.
  #beside(here, line) {
    if (line < 0 || line >= this.lines) return here;
    const middle = this.boxes[here].x + this.boxes[here].wide / 2;
    let best = this.starts[line];
    for (let index = best; this.boxes[index]?.line === line; index += 1) {
      if (this.boxes[index].x <= middle) best = index;
    }
    return best;
  }
}

// The tokens before which the text has white space that belongs to no token.
export function spacedTokens(text, letters) {
  const spaced = new Set();
  let cursor = 0;
  (letters ?? []).forEach((own, index) => {
    const at = own ? text.indexOf(own, cursor) : -1;
    // A mask may be typed differently from how the model reads it.
    if (at < 0 || at > cursor + 40) return;
    if (/\s/.test(text.slice(cursor, at))) spaced.add(index);
    cursor = at + own.length;
  });
  return spaced;
}

function round(ink, x, y, width, height, radius) {
  ink.beginPath();
  ink.roundRect(x, y, Math.max(1, width), height, radius);
  ink.fill();
}
