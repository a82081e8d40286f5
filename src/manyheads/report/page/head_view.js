// One head: its attention on the text, as lines between tokens, and as a map.

import { css, dark, inkOn, weightColor } from "./color.js";
import { h, s } from "./dom.js";
import { percent } from "./format.js";
import { tokenStep } from "./grid.js";
import { say, sayParts } from "./language.js";
import { attentionFrom, attentionTo, drawPattern } from "./packed.js";
import { listedToken } from "./token_text.js";

const WINDOW = 26;
const ROW = 21;
const GAP = 12;
const LARGE_MAP = 768;
const STACKS = { encoder: say`The encoder reads`, decoder: say`The decoder writes`, main: say`The text` };
// `at` is a query, or with incoming attention a key.
const view = { head: 0, at: 0, incoming: false, tab: "text", pinned: false };
// The elements of the tokens, and the texts that they stand for.
const spans = { queries: [], keys: [], drawn: "" };

function buildHeadView() {
  const text = document.getElementById("view-text");
  text.addEventListener("mouseover", (event) => hover(event.target));
  text.addEventListener("click", (event) => pinSpan(event.target));
  const map = document.getElementById("map");
  for (const part of [text, map, document.getElementById("view-lines")]) part.addEventListener("keydown", step);
  map.addEventListener("mousemove", (event) => { if (!view.pinned) selectToken(tokenAt(map, event)); });
  map.addEventListener("click", (event) => pin(tokenAt(map, event)));
}

// Whether a head looks at the same text that it looks from.
function ownText() {
  return data.heads[view.head].keys === data.heads[view.head].stack;
}

function tokensAt() {
  return view.incoming ? keysOf(view.head) : queriesOf(view.head);
}

function clampToken(index) {
  return Math.min(tokensAt().length - 1, Math.max(0, index));
}

// The text, or for cross-attention both texts, with an element for each token.
function buildText() {
  const { stack, keys } = data.heads[view.head];
  if (spans.drawn === `${stack} ${keys}`) return;
  spans.drawn = `${stack} ${keys}`;
  const text = document.getElementById("view-text");
  text.replaceChildren();
  text.classList.toggle("two", !ownText());
  if (data.image) showImage(text, ...data.image);
  if (ownText()) {
    spans.queries = spans.keys = addTokens(text, stack, "queries");
    return;
  }
  for (const [side, name] of [["queries", stack], ["keys", keys]]) {
    const part = h("div", {}, h("h4", {}, STACKS[name] ?? name));
    spans[side] = addTokens(part, name, side);
    text.append(part);
  }
}

function addTokens(place, stack, side) {
  const elements = data.tokens[stack].map((token, index) => {
    const patch = data.image ? index - 1 - data.image[3] : -1;
    const vars = patch >= 0 ? { "grid-area": areaOf(patch, data.image[2]) } : {};
    return h("span", { class: "token", "data-index": index, "data-side": side, vars }, token.replace(/\n/g, "⏎\n"));
  });
  place.append(...elements);
  return elements;
}

// The image under its patches, with the class token above it.
function showImage(text, address, rows, columns) {
  text.classList.add("image");
  text.style.setProperty("--columns", columns);
  text.style.setProperty("--rows", rows);
  text.append(h("img", { src: address, alt: say`The input image` }));
  document.querySelector("#tabs [data-view=text]").textContent = say`Image`;
}

function areaOf(patch, columns) {
  return `${Math.floor(patch / columns) + 2} / ${patch % columns + 1}`;
}

// Dark without weight, bright yellow with much.
function glow(weight) {
  const fraction = Math.sqrt(weight);
  return `rgb(${Math.round(8 + 247 * fraction)} ${Math.round(12 + 218 * fraction)} ${Math.round(34 + 26 * fraction)} / ${0.66 - 0.16 * fraction})`;
}

function tokenAt(map, event) {
  const box = map.getBoundingClientRect();
  const fraction = view.incoming ? (event.clientX - box.left) / box.width : (event.clientY - box.top) / box.height;
  return clampToken(Math.floor(fraction * tokensAt().length));
}

// In cross-attention a token of the keys shows who looks at it.
function turnTo(side) {
  if (ownText()) return;
  view.incoming = side === "keys";
  document.getElementById("incoming").checked = view.incoming;
}

function hover(element) {
  if (element.dataset.index === undefined || view.pinned) return;
  turnTo(element.dataset.side);
  selectToken(Number(element.dataset.index));
}

function pinSpan(element) {
  if (element.dataset.index === undefined) { view.pinned = false; return; }
  turnTo(element.dataset.side);
  pin(Number(element.dataset.index));
}

// A click pins a token until it, or the background, is clicked.
function pin(index) {
  view.pinned = !(view.pinned && index === view.at);
  selectToken(index);
}

function step(event) {
  const by = tokenStep(event);
  if (!by) return;
  event.preventDefault();
  selectToken(clampToken(view.at + by));
}

function selectToken(index) {
  view.at = index;
  drawHead();
}

async function drawHead() {
  view.at = clampToken(view.at);
  const { head, at, incoming, tab } = view;
  const pattern = await patternOf(head);
  if (view.head !== head || view.at !== at) return;
  const attention = incoming ? attentionTo(pattern, at) : attentionFrom(pattern, at);
  if (tab === "text") drawText(attention);
  if (tab === "lines") drawLines(pattern, attention);
  if (tab === "map") drawMap(pattern, head);
  summarize(attention, pattern);
}

function drawText(attention) {
  buildText();
  const [from, to] = view.incoming ? [spans.keys, spans.queries] : [spans.queries, spans.keys];
  for (const span of new Set([...spans.queries, ...spans.keys])) { span.style.background = span.style.color = ""; span.classList.remove("at"); }
  for (const [index, weight] of attention) {
    const color = weightColor(weight);
    to[index].style.background = data.image ? glow(weight / attention[0][1]) : css(color);
    to[index].style.color = inkOn(color);
  }
  from[view.at].classList.add("at");
}

// The tokens to draw on one side: those around the selected one, and those with the largest weights.
function tokensAround(attention, length, selected, attended) {
  const near = selected ? Math.min(WINDOW - (attended ? 8 : 0), length) : 0;
  const first = Math.min(Math.max(0, view.at - Math.floor(near * (view.incoming ? 0.3 : 0.7))), length - near);
  const tokens = new Set(Array.from({ length: near }, (_, index) => first + index));
  if (attended) for (const [index] of attention) if (tokens.size < WINDOW) tokens.add(index);
  return [...tokens].sort((one, other) => one - other);
}

// Rows from the top, with a gap where tokens are left out.
function placeRows(tokens) {
  const rows = new Map();
  let height = 4;
  tokens.forEach((index, place) => {
    if (place && index !== tokens[place - 1] + 1) height += GAP;
    rows.set(index, height + ROW / 2);
    height += ROW;
  });
  return { tokens, rows, height };
}

// Queries at the left, keys at the right.
function drawLines(pattern, attention) {
  const own = ownText(), { incoming } = view;
  const left = placeRows(tokensAround(attention, queriesOf(view.head).length, own || !incoming, own || incoming));
  const right = own ? left : placeRows(tokensAround(attention, keysOf(view.head).length, incoming, !incoming));
  const width = 560, start = 185, stop = width - 185;
  const line = (query, key, weight, strong) => {
    const middle = (start + stop) / 2, from = left.rows.get(query), to = right.rows.get(key);
    return s("path", {
      d: `M${start} ${from} C${middle} ${from} ${middle} ${to} ${stop} ${to}`, class: strong ? "strong" : "weak",
      "stroke-width": strong ? 0.8 + 7 * weight : 0.4 + 2 * weight, "stroke-opacity": strong ? 0.3 + 0.7 * Math.sqrt(weight) : 0.5 * Math.sqrt(weight),
    });
  };
  const lines = [];
  for (const query of left.tokens) {
    for (const [key, weight] of attentionFrom(pattern, query)) if (right.rows.has(key) && weight > 0.02) lines.push(line(query, key, weight, false));
  }
  let outside = 0;
  for (const [index, weight] of attention) {
    const [query, key] = incoming ? [index, view.at] : [view.at, index];
    if (left.rows.has(query) && right.rows.has(key)) lines.push(line(query, key, weight, true));
    else outside += weight;
  }
  const by = new Map(attention);
  const words = [
    ...sideWords(left, queriesOf(view.head), start - 8, "end", incoming ? by : new Map(), !incoming),
    ...sideWords(right, keysOf(view.head), stop + 8, "start", incoming ? new Map() : by, incoming),
  ];
  const picture = s("svg", { viewBox: `0 0 ${width} ${Math.max(left.height, right.height) + 4}`, role: "img", "aria-label": say`Lines from queries at the left to keys at the right` }, lines, words);
  const more = outside > 0.01 && !incoming ? h("p", { class: "quiet" }, say`${percent(outside)} of the weight is on tokens that are not drawn here.`) : "";
  document.getElementById("view-lines").replaceChildren(picture, more);
}

function sideWords({ tokens, rows }, texts, x, anchor, weights, selects) {
  return tokens.flatMap((index, place) => {
    const y = rows.get(index), weight = weights.get(index), letters = listedToken(texts[index]);
    const away = anchor === "end" ? -52 : 52;
    const gap = place && index !== tokens[place - 1] + 1 ? s("path", { class: "gap", d: `M${x} ${y - ROW / 2 - GAP / 2} h${away}` }) : null;
    const token = s("tspan", {}, letters.length > 18 ? `${letters.slice(0, 17)}…` : letters);
    // Without a pin, the redrawn lines would select another token under the pointer.
    const click = () => { turnTo(anchor === "end" ? "queries" : "keys"); view.pinned = true; selectToken(index); };
    const kind = selects && index === view.at ? "at" : weight > 0.1 ? "seen" : null;
    return [gap, s("text", { x, y: y + 4.5, "text-anchor": anchor, class: kind, on: { click } }, token, weight > 0.005 ? `  ${percent(weight)}` : "")];
  });
}

function drawMap(pattern, head) {
  const map = document.getElementById("map");
  const drawn = `${head} ${dark()}`;
  const [rows, columns] = [queriesOf(head).length, keysOf(head).length];
  if (map.dataset.drawn !== drawn) {
    drawPattern(map, pattern, columns, LARGE_MAP);
    map.style.aspectRatio = `${columns} / ${Math.min(2 * columns, Math.max(columns / 3, rows))}`;
    map.dataset.drawn = drawn;
  }
  const cross = document.getElementById("cross");
  const fraction = view.at / tokensAt().length;
  Object.assign(cross.style, view.incoming
    ? { left: `${fraction * map.clientWidth}px`, top: 0, width: `max(1px, ${map.clientWidth / columns}px)`, height: `${map.clientHeight}px` }
    : { top: `${fraction * map.clientHeight}px`, left: 0, height: `max(1px, ${map.clientHeight / rows}px)`, width: `${map.clientWidth}px` });
}

// <bdi> and <tspan> keep right-to-left tokens from reordering the text around them.
function summarize(attention, pattern) {
  const { head, at, incoming } = view;
  const [own, texts] = incoming ? [keysOf(head), queriesOf(head)] : [queriesOf(head), keysOf(head)];
  const token = (words, index) => h("bdi", {}, listedToken(words[index]));
  const best = attention.slice(0, 4).filter(([, weight]) => weight >= 0.005);
  const listed = best.flatMap(([index, weight], place) => [place ? ", " : "", token(texts, index), ` ${percent(weight)}`]);
  const rest = incoming ? 0 : Math.max(0, 1 - attention.reduce((sum, [, weight]) => sum + weight, 0));
  const more = pattern.weights.length && rest > 0.03 ? `; ${say`the other ${percent(rest)} is in smaller weights`}` : "";
  const does = incoming ? sayParts`${token(own, at)} (token ${at}) is attended to by ` : sayParts`${token(own, at)} (token ${at}) attends to `;
  document.getElementById("summary").replaceChildren(...does, ...(best.length ? listed : [say`no token with 0.5% or more`]), more);
}

// The query with the largest weight on a token that is neither near nor the first.
function clearestQuery(pattern) {
  let best = [-1, Math.floor((pattern.starts.length - 1) * 0.4)];
  for (let query = 1; query + 1 < pattern.starts.length; query += 1) {
    for (let index = pattern.starts[query]; index < pattern.starts[query + 1]; index += 1) {
      const key = pattern.keys[index];
      const far = key > 0 && Math.abs(query - key) > 1 ? 1 : 0.3;
      if (far * pattern.weights[index] > best[0]) best = [far * pattern.weights[index], query];
    }
  }
  return best[1];
}
