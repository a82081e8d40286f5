// The view as one SVG that can be read without the page: the text with its selected token, the heads with
// their scale, the predictions and the attention.

import { css, dark, diverging, inkOn, sequential } from "./color.js";
import { s } from "./dom.js";
import { counted, fixed, formatted, percent } from "./format.js";
import { shortOf } from "./kinds.js";
import { say } from "./language.js";
import { brightest } from "./map_view.js";
import { isSplit, labelOf, rangeOf, splitPart, unitOf } from "./measures.js";
import { shortToken, visibleToken } from "./token_text.js";

const WIDE = 1180;
const MARGIN = 40;
const RIGHT = 420;
const LINE = 27;
const MAX_LINES = 10;
// Smaller weights would be invisible in a drawing.
const UNSEEN = 0.002;
const MAX_NAMES = 40;
const FONT = "Inter, Segoe UI, system-ui, Noto Sans, DejaVu Sans, sans-serif";
const pen = document.createElement("canvas").getContext("2d");

export async function drawSides(sides) {
  const theme = dark() ? { paper: "#191d26", ink: "#e9ebf1", quiet: "#a2abbb", line: "#3a4150", bar: "#8db4ff" } : { paper: "#ffffff", ink: "#1c2433", quiet: "#5d6779", line: "#d8d3c8", bar: "#1f4fa8" };
  const parts = [];
  let y = 44;
  for (const side of sides) {
    parts.push(text(MARGIN, y, side.model.name, theme.ink, 20, 700), text(MARGIN, y + 24, summary(side), theme.quiet, 13));
    const words = side.isVision ? { parts: [], height: 0 } : drawText(side, MARGIN, y + 44, theme);
    const top = y + 44 + words.height + 40;
    const atlas = drawAtlas(side, MARGIN, top, theme);
    const answers = drawPredictions(side, MARGIN, top + atlas.height + 34, theme);
    const view = await drawView(side, RIGHT, top, theme);
    parts.push(...words.parts, ...atlas.parts, ...answers.parts, ...view.parts);
    y = top + Math.max(atlas.height + answers.height + 34, view.height) + 60;
  }
  return s("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${WIDE} ${y}`, width: WIDE, height: y, "font-family": FONT }, s("rect", { width: WIDE, height: y, fill: theme.paper }), parts);
}

function summary(side) {
  const parts = [say`${counted(side.tokens.length)} {0|token|tokens}`];
  if (side.at !== null && side.tokens.length) parts.push(say`selected: ${side.label(side.at)}, token ${side.at + 1}`);
  if (side.ablated.size) parts.push(side.replaceWith === "mean" ? say`ablated (mean): ${[...side.ablated].join(", ")}` : say`ablated (zero): ${[...side.ablated].join(", ")}`);
  if (side.patched.size) parts.push(say`patched: ${[...side.patched].join(", ")}`);
  if (side.prediction?.loss != null) parts.push(say`loss ${fixed(side.prediction.loss, 3)}`);
  return parts.join("; ");
}

function text(x, y, words, fill, size, weight = 400, anchor = "start") {
  return s("text", { x, y, fill, "font-size": size, "font-weight": weight, "text-anchor": anchor }, words);
}

// The tokens in lines, the selected one in a frame; of a long text the lines around it.
function drawText(side, x, y, theme) {
  pen.font = `16px ${FONT}`;
  const lines = [[]];
  let left = 0;
  side.tokens.forEach((token, index) => {
    const group = side.groups.get(index);
    if (group && index > group.start) return;
    const word = group ? group.text : visibleToken(token);
    const wide = pen.measureText(word).width + 4;
    const selected = group ? side.at >= group.start && side.at < group.stop : index === side.at;
    if (left + wide > WIDE - 2 * MARGIN) {
      lines.push([]);
      left = 0;
    }
    const indent = pen.measureText(word.slice(0, word.length - word.trimStart().length)).width;
    lines.at(-1).push({ word: word.trim(), left, indent, wide, selected });
    left += wide;
    if (token.endsWith("\n")) {
      lines.push([]);
      left = 0;
    }
  });
  const at = lines.findIndex((line) => line.some((each) => each.selected));
  const first = Math.max(0, Math.min(at - Math.floor(MAX_LINES / 2), lines.length - MAX_LINES));
  const shown = lines.slice(first, first + MAX_LINES);
  const parts = shown.flatMap((line, row) =>
    line.flatMap(({ word, left: from, indent, wide, selected }) => [
      selected ? s("rect", { x: x + from - 1, y: y + row * LINE + 1, width: wide, height: 24, rx: 5, fill: "none", stroke: theme.ink, "stroke-width": 1.4 }) : null,
      text(x + from + indent, y + row * LINE + 18, word, selected ? theme.ink : theme.quiet, 16, selected ? 700 : 400),
    ]),
  );
  if (shown.length < lines.length) parts.push(text(x, y + shown.length * LINE + 14, say`lines ${first + 1} to ${first + shown.length} of ${lines.length}`, theme.quiet, 12));
  return { parts, height: shown.length * LINE + (shown.length < lines.length ? 18 : 0) };
}

// Colors from `low` to `high`, with both values.
function drawScale(x, y, width, colorAt, low, high, theme) {
  const steps = 60;
  const step = width / steps;
  const bands = Array.from({ length: steps }, (_, place) => s("rect", { x: x + place * step, y, width: step + 0.5, height: 9, fill: css(colorAt(place / (steps - 1))) }));
  return [...bands, text(x, y + 24, low, theme.quiet, 11.5), text(x + width, y + 24, high, theme.quiet, 11.5, 400, "end")];
}

function drawAtlas(side, x, y, theme) {
  const { measure } = side;
  const values = side.statistics?.[measure] ?? [];
  const [low, high] = rangeOf(measure, values);
  const colorAt = isSplit(measure) ? (part) => diverging(splitPart(measure, part * 2 - 1)) : sequential;
  const most = Math.max(...side.model.layers.map((each) => each.heads));
  const cell = Math.max(8, Math.min(36, Math.floor(316 / most)));
  const parts = [text(x, y - 8, say`Heads by ${labelOf(measure).toLowerCase()}`, theme.ink, 14, 600)];
  const [left, top] = [x + 26, y + 20];
  for (let head = 0; head < most && cell >= 14; head += 1) parts.push(text(left + (head + 0.5) * cell - 1, top - 6, `H${head}`, theme.quiet, 10, 400, "middle"));
  let place = 0;
  side.model.layers.forEach(({ layer, heads }, row) => {
    parts.push(text(x + 20, top + row * cell + cell * 0.6, `L${layer}`, theme.quiet, 10, 400, "end"));
    for (let head = 0; head < heads; head += 1, place += 1) {
      const name = `L${layer}H${head}`;
      const value = values[place] ?? null;
      const color = colorAt(value === null ? 0 : (value - low) / (high - low || 1));
      const box = { x: left + head * cell, y: top + row * cell, width: cell - 3, height: cell - 3, rx: 4 };
      const ring = side.colorOf(name);
      parts.push(s("rect", { ...box, fill: css(color), stroke: ring ?? theme.line, "stroke-width": ring ? 3 : 0.5 }));
      if (cell >= 28) parts.push(text(box.x + box.width / 2, box.y + box.height / 2 + 3, shortOf(side.kindOf(name)), inkOn(color), 9, 400, "middle"));
      if (side.ablated.has(name)) parts.push(s("path", { d: `M${box.x + 3} ${box.y + 3}l${cell - 9} ${cell - 9}m0 ${9 - cell}l${9 - cell} ${cell - 9}`, stroke: "#a3341f", "stroke-width": 2 }));
    }
  });
  let under = top + side.model.layers.length * cell + 8;
  const unit = unitOf(measure);
  if (values.length) parts.push(...drawScale(left, under, most * cell - 3, colorAt, formatted(low, unit), formatted(high, unit), theme));
  under += 50;
  for (const head of side.selected) {
    parts.push(s("rect", { x: left, y: under - 9, width: 10, height: 10, rx: 3, fill: side.colorOf(head) }));
    parts.push(text(left + 18, under, `${head}  ${side.describeKind(head) ?? ""}`, theme.ink, 12.5));
    under += 20;
  }
  return { parts, height: under - y };
}

function drawPredictions(side, x, y, theme) {
  const top = side.prediction?.top ?? [];
  if (!top.length) return { parts: [], height: 0 };
  const word = side.label(side.prediction.position);
  const title = { "next token": say`Next token after “${word}”`, "masked token": say`Predicted token in place of “${word}”` }[side.prediction.output] ?? say`Predictions`;
  const parts = [text(x, y, title, theme.ink, 14, 600)];
  top.forEach((each, place) => {
    const line = y + 24 + place * 22;
    parts.push(text(x + 110, line, shortToken(each.text, 14), theme.ink, 12.5, 400, "end"));
    parts.push(s("rect", { x: x + 118, y: line - 11, width: 150 * each.probability, height: 13, rx: 3, fill: theme.bar }));
    if (each.before !== null) parts.push(s("rect", { x: x + 118 + 150 * each.before, y: line - 12, width: 2, height: 15, fill: theme.ink }));
    parts.push(text(x + 278, line, percent(each.probability), theme.quiet, 12));
  });
  return { parts, height: 24 + top.length * 22 };
}

function drawView(side, x, y, theme) {
  if (!side.tokens.length) return { parts: [], height: 0 };
  if (side.isVision) return drawImages(side, x, y, theme);
  return side.view === "map" ? drawMap(side, x, y, theme) : drawLines(side, x, y, theme);
}

// The images as shown, three per row.
function drawImages(side, x, y, theme) {
  const parts = [];
  const figures = [...side.imageView.views.querySelectorAll("figure")];
  figures.forEach((figure, place) => {
    const [left, top] = [x + (place % 3) * 240, y + Math.floor(place / 3) * 256];
    parts.push(s("image", { x: left, y: top, width: 220, height: 220, href: figure.querySelector("canvas").toDataURL("image/png") }));
    parts.push(text(left, top + 240, figure.querySelector("figcaption").textContent, theme.ink, 12.5));
  });
  return { parts, height: Math.ceil(figures.length / 3) * 256 };
}

async function drawLines(side, x, y, theme) {
  const [start, stop] = side.lines.span();
  const found = await side.patterns.rows(side.selected, start, stop);
  const picture = side.lines.drawing(found, start, stop, side.at, 720);
  for (const word of picture.querySelectorAll("text")) {
    word.setAttribute("fill", word.classList.contains("dim") ? theme.quiet : theme.ink);
    if (!word.hasAttribute("font-size")) word.setAttribute("font-size", 14);
  }
  const height = Number(picture.getAttribute("viewBox").split(" ")[3]);
  const title = say`Attention from “${side.label(side.at)}”`;
  return { parts: [text(x + 120, y - 8, title, theme.ink, 14, 600), s("g", { transform: `translate(${x} ${y})` }, [...picture.childNodes])], height };
}

// Squares for visible weights; a long window is reduced to at most 160 per side.
async function drawMap(side, x, y, theme) {
  const { head } = side.map;
  if (!head) return { parts: [], height: 0 };
  const { rows, keys } = side.map.span();
  const cells = Math.min(rows[1] - rows[0], 160);
  const found = await side.patterns.window(head, rows, keys, cells, null);
  const size = Math.max(3, Math.min(24, Math.floor(560 / found.height)));
  const named = found.height <= MAX_NAMES;
  const [left, top, most] = [x + 120, y + (named ? 84 : 24), brightest(found)];
  const colorAt = (weight) => sequential(Math.sqrt(weight / most));
  const parts = [text(left, y - 8, say`Attention of ${head}, tokens ${rows[0] + 1} to ${rows[1]}: queries down, keys across`, theme.ink, 14, 600)];
  parts.push(s("rect", { x: left, y: top, width: found.width * size, height: found.height * size, fill: css(sequential(0)), stroke: theme.line, "stroke-width": 0.5 }));
  found.weights.forEach((weight, place) => {
    if (weight < UNSEEN) return;
    const box = { x: left + (place % found.width) * size, y: top + Math.floor(place / found.width) * size, width: size, height: size };
    parts.push(s("rect", { ...box, fill: css(colorAt(weight)) }, s("title", {}, fixed(weight, 3))));
  });
  for (let place = 0; named && place < found.height; place += 1) {
    const points = Math.min(12, size);
    parts.push(text(left - 8, top + (place + 0.7) * size, side.label(rows[0] + place, 14), theme.ink, points, rows[0] + place === side.at ? 700 : 400, "end"));
    const turn = `rotate(-60 ${left + (place + 0.6) * size} ${top - 6})`;
    parts.push(s("text", { x: left + (place + 0.6) * size, y: top - 6, fill: theme.ink, "font-size": points, transform: turn }, side.label(keys[0] + place, 12)));
  }
  const bottom = top + found.height * size;
  parts.push(...drawScale(left, bottom + 12, 220, (part) => sequential(Math.sqrt(part)), percent(0), percent(most), theme));
  return { parts, height: bottom + 40 - y };
}
