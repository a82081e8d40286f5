// What the drawings are made of: tokens in a column, columns of strips, a matrix, bars of one row.

import { css, inkOn, weightColor } from "./color.js";
import { h } from "./dom.js";
import { decimal, fixed, percent } from "./format.js";
import { currentLanguage, say } from "./language.js";
import { signed } from "./explain_stage.js";

export const FIRST_ROW = 30;

// A token as it stands in a sentence.
export function quoted(view, token) {
  const text = view.called(token);
  return currentLanguage() === "ru" ? `«${text}»` : `“${text}”`;
}

export function largest(rows) {
  let most = 0;
  for (const row of rows) for (const value of row) most = Math.max(most, Math.abs(value ?? 0));
  return most;
}

// The size of most numbers: a few channels or tokens of some models are a hundred times larger than the others.
export function typical(rows) {
  const ordered = (values) => [...values].sort((one, other) => one - other);
  const large = rows.map((row) => {
    const sizes = ordered(row.map((value) => Math.abs(value ?? 0)));
    return sizes[Math.floor(0.97 * (sizes.length - 1))];
  });
  return ordered(large)[Math.floor(rows.length / 2)] || largest(rows);
}

export function sumOf(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

export class Scene {
  constructor(view) {
    this.view = view;
    this.parts = [];
    this.lines = [];
    this.height = 0;
  }

  add(part) {
    this.parts.push(part);
    this.height = Math.max(this.height, part.y + part.h);
    return part;
  }

  label(key, text, x, y, w, more = {}) {
    return this.add({ key, kind: "label", text, x, y, w, h: this.view.em * 1.5, ...more });
  }

  // The tokens as the labels of rows.
  tokens(options = {}) {
    const { view } = this;
    const top = options.top ?? FIRST_ROW;
    view.tokens.forEach((_, token) => this.add(tokenPart(view, token, { x: 0, y: top + token * view.row, w: view.label, h: view.row - 4, ...options.more?.(token) })));
  }

  // One strip per token. `from` is the name of the column that it comes out of.
  strips(name, title, rows, { x, w, from, top = FIRST_ROW, most = typical(rows), faded, tell, total, only }) {
    const { view } = this;
    this.label(`title-${name}`, title, x, 0, w, { from: from && `title-${from}` });
    const channels = Math.min(view.channels, rows[0].length);
    rows.forEach((row, token) => {
      if (only !== undefined && token !== only) return;
      const values = row.slice(0, channels);
      this.add({
        key: `${name}${token}`, kind: "strip", x, y: top + token * view.row + 2, w, h: view.row - 8, values, most, from: from && `${from}${token}`, opacity: faded?.(token) ?? 1,
        chosen: token === view.at, delay: token * 12, tell: (channel) => numbersOf(tell ?? title, quoted(view, token), row, channel, total ?? row.length),
      });
    });
  }

  sign(key, text, x, y, h) {
    this.add({ key, kind: "sign", text, x, y, w: 24, h });
  }
}

export function tokenPart(view, token, place) {
  const image = view.picture?.(token);
  return {
    key: `t${token}`, kind: image ? "chip patch" : "chip", text: image ? "" : view.short(token, 14), chosen: token === view.at, act: () => view.choose(token), image,
    name: say`Query ${quoted(view, token)}, token ${token}`, tell: view.ids ? say`Token ${token}: ${quoted(view, token)}, number ${view.ids[token]} of the vocabulary` : say`Token ${token}: ${quoted(view, token)}`, ...place,
  };
}

// “q of “cat”, channel 3: 0.12”, or its first numbers.
export function numbersOf(name, owner, row, channel, total) {
  if (channel !== null && channel !== undefined) return say`${name} of ${owner}, channel ${channel}: ${decimal(row[channel])}`;
  const first = row.slice(0, 6).map(decimal).join(", ");
  return say`${name} of ${owner}: ${first}${total > 6 ? " …" : ""} (${total} numbers)`;
}

// All queries and keys. `cell` gives the color, the text and the words of each pair.
export function matrix(scene, { x, y, side, cell, from }) {
  const { view } = scene;
  const count = view.tokens.length;
  const step = side / count;
  const top = y + view.em * 4.6;
  const text = Math.min(view.em * 0.8, step * 0.38);
  for (let key = 0; key < count; key += 1) {
    scene.add({ key: `c${key}`, kind: "column", content: h("span", {}, view.short(key, 9)), x: x + view.label + key * step, y, w: step - 1, h: view.em * 4.4, from: `t${key}`, stays: true, size: Math.min(view.em * 0.85, step * 0.8) });
  }
  for (let query = 0; query < count; query += 1) {
    scene.add(tokenPart(view, query, { x, y: top + query * step, w: view.label - 6, h: step - 2, size: Math.min(view.em * 0.95, step * 0.7) }));
    for (let key = 0; key < count; key += 1) {
      const look = cell(query, key);
      scene.add({
        key: `s${query}_${key}`, kind: "cell", x: x + view.label + key * step, y: top + query * step, w: step - 1, h: step - 1, from: from?.(query, key), fill: look.hollow ? "" : css(look.color), ink: look.hollow ? "" : inkOn(look.color),
        text: step >= view.em * 2 ? look.text : "", size: text, hollow: look.hollow, tell: look.tell, delay: query * 10, tone: query === view.at ? "own" : "",
      });
    }
  }
  scene.height = Math.max(scene.height, top + side + 4);
  return top;
}

export function pairWords(view, query, key) {
  return say`from ${quoted(view, query)} to ${quoted(view, key)}`;
}

// The numbers of the chosen row, as bars beside or below the matrix, or beside the keys.
export function bars(scene, values, { x, y, w, step, most, text, hidden, tell, tone, labels = true }) {
  const { view } = scene;
  const low = Math.min(0, ...values.filter((value, key) => value !== null && !hidden?.(key)));
  const number = view.em * 4;
  const name = labels ? Math.min(view.em * 5.2, w * 0.3) : 0;
  const room = w - name - number;
  const zero = low < 0 ? room * 0.4 : 0;
  const unit = most ? (room - zero) / most : 0;
  values.forEach((value, key) => {
    const gone = hidden?.(key) ?? false;
    const size = gone ? 0 : Math.max(-zero || -room, Math.min(room - zero, (value ?? 0) * unit));
    const at = y + key * step;
    if (labels) scene.add({ key: `bl${key}`, kind: "label end", text: view.short(key, 10), x, y: at, w: name - 6, h: step - 2, from: `t${key}`, size: Math.min(view.em * 0.9, step * 0.75) });
    scene.add({ key: `b${key}`, kind: "bar", x: x + name + zero + Math.min(0, size), y: at + step * 0.18, w: Math.max(1, Math.abs(size)), h: step * 0.56, tone: gone ? "gone" : tone?.(key) ?? (size < 0 ? "minus" : ""), from: `k${key}` });
    scene.add({ key: `bn${key}`, kind: "number", text: gone ? "−∞" : text(value, key), x: x + w - number, y: at, w: number, h: step - 2, size: Math.min(view.em * 0.9, step * 0.75), tell: tell(key), from: `k${key}`, tone: gone ? "gone" : "" });
  });
}

export function weightCell(weight, words) {
  return { color: weightColor(weight), text: weight >= 0.0095 ? percent(weight).replace(/\s/, "") : "", tell: say`Weight ${words}: ${percent(weight)}` };
}

export function scoreCell(value, most, tell) {
  // Two digits fit into a cell; what is pointed at has more.
  return { color: signed(value, most), text: fixed(value, Math.abs(value) < 9.95 ? 1 : 0), tell };
}

// The weights of all rows from the scores, at a temperature, as the model has them at 1.
export function softmaxRows({ scores, visible, sink }, temperature) {
  return scores.map((row, query) => {
    const seen = row.map((score, key) => (visible[query][key] ? score / temperature : -Infinity));
    const top = Math.max(...seen, sink === null ? -Infinity : sink / temperature);
    const powers = seen.map((score) => (score === -Infinity ? 0 : Math.exp(score - top)));
    const sum = sumOf(powers) + (sink === null ? 0 : Math.exp(sink / temperature - top));
    return powers.map((power) => (sum ? power / sum : 0));
  });
}
