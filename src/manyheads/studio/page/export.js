// Export the view as a drawing (SVG or PNG), or its numbers (JSON).

import { css, dark, diverging, sequential } from "./colour.js";
import { shortToken, pluralise, download, s } from "./dom.js";
import { percent } from "./format.js";
import { labelOf, rangeOf } from "./measures.js";

const WIDE = 1180;
const MAP = 40;
// Smaller weights would be invisible in a drawing.
const UNSEEN = 0.002;

export async function exportView(kind, sides) {
  if (kind === "json") return download(new Blob([JSON.stringify(await numbers(sides), null, 1)], { type: "application/json" }), "manyheads.json");
  const drawing = await drawn(sides);
  const text = new XMLSerializer().serializeToString(drawing);
  const blob = new Blob([text], { type: "image/svg+xml" });
  if (kind === "svg") return download(blob, "manyheads.svg");
  return download(await rasterised(blob, drawing), "manyheads.png");
}

async function rasterised(blob, drawing) {
  const [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
  const image = new Image(width, height);
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: width * 2, height: height * 2 });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

// All visible numbers, so that others can draw them.
async function numbers(sides) {
  const found = [];
  for (const side of sides) {
    const [start, stop] = side.lines.span();
    const rows = side.patterns ? await side.patterns.rows(side.selected, start, stop) : {};
    found.push({
      model: side.model.name, text: side.isVision ? null : side.text, tokens: side.tokens, losses: side.losses,
      selected: side.selected, ablated: [...side.ablated], replace_with: side.replaceWith, patched: [...side.patched], token: side.at,
      kinds: Object.fromEntries(side.selected.map((head) => [head, side.kinds[head] ?? []])),
      heads: [...side.atlas.cells.keys()], statistics: side.statistics, predictions: side.prediction, rows: { start, stop, heads: rows },
    });
  }
  return { made_by: "manyheads studio", sides: found };
}

async function drawn(sides) {
  const theme = dark() ? { paper: "#191d26", ink: "#e9ebf1", quiet: "#a2abbb" } : { paper: "#ffffff", ink: "#1c2433", quiet: "#5d6779" };
  const parts = [];
  let y = 36;
  for (const side of sides) {
    const heights = [];
    parts.push(text(40, y, `${side.model.name}`, theme.ink, 20, 700), text(40, y + 24, summary(side), theme.quiet, 13));
    const atlas = drawnAtlas(side, 40, y + 68, theme);
    parts.push(...atlas.parts);
    heights.push(atlas.height);
    const saying = drawnAnswers(side, 40, y + 68 + atlas.height + 34, theme);
    parts.push(...saying.parts);
    heights[0] += saying.height + 46;
    const view = await drawnView(side, 420, y, theme);
    parts.push(...view.parts);
    heights.push(view.height);
    y += 56 + Math.max(...heights) + 56;
  }
  const font = "Inter, Segoe UI, system-ui, Noto Sans, DejaVu Sans, sans-serif";
  return s("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${WIDE} ${y}`, width: WIDE, height: y, "font-family": font }, s("rect", { width: WIDE, height: y, fill: theme.paper }), parts);
}

function drawnView(side, x, y, theme) {
  if (!side.tokens.length) return { parts: [], height: 0 };
  if (side.isVision) return drawnImages(side, x, y + 56, theme);
  return side.view === "map" ? drawnMap(side, x, y + 56, theme) : drawnLines(side, x, y + 40, theme);
}

function summary(side) {
  const off = side.ablated.size ? `; ablated (${side.replaceWith}): ${[...side.ablated].join(", ")}` : "";
  return `${pluralise(side.tokens.length, "token")}${off}${side.prediction?.loss != null ? `; loss ${side.prediction.loss.toFixed(3)}` : ""}`;
}

function text(x, y, words, fill, size, weightOf = 400, anchor = "start") {
  return s("text", { x, y, fill, "font-size": size, "font-weight": weightOf, "text-anchor": anchor }, words);
}

function drawnAtlas(side, x, y, theme) {
  const values = side.statistics?.[side.statistic] ?? [];
  const [low, high] = rangeOf(side.statistic, values);
  const split = side.statistic === "patching";
  const most = Math.max(...side.model.layers.map((each) => each.heads));
  const cell = Math.max(8, Math.min(34, Math.floor(320 / most)));
  const parts = [text(x, y - 8, `Heads by ${labelOf(side.statistic).toLowerCase()}`, theme.ink, 14, 600)];
  let place = 0;
  side.model.layers.forEach(({ layer, heads }, row) => {
    parts.push(text(x + 14, y + row * cell + cell * 0.65, String(layer), theme.quiet, 10, 400, "end"));
    for (let head = 0; head < heads; head += 1, place += 1) {
      const name = `L${layer}H${head}`;
      const value = values[place] ?? null;
      const part = value === null ? 0 : (value - low) / (high - low || 1);
      const box = { x: x + 20 + head * cell, y: y + row * cell, width: cell - 3, height: cell - 3, rx: 4 };
      const fill = css(split ? diverging(part * 2 - 1) : sequential(part));
      parts.push(s("rect", { ...box, fill, stroke: side.colourOf(name) ?? (dark() ? "#2b313d" : "#e4e0d8"), "stroke-width": side.colourOf(name) ? 3 : 0.5 }));
      if (side.ablated.has(name)) parts.push(s("path", { d: `M${box.x + 3} ${box.y + 3}l${cell - 9} ${cell - 9}m0 ${9 - cell}l${9 - cell} ${cell - 9}`, stroke: "#a3341f", "stroke-width": 2 }));
    }
  });
  let under = y + side.model.layers.length * cell + 16;
  for (const head of side.selected) {
    parts.push(s("rect", { x: x + 20, y: under - 9, width: 10, height: 10, rx: 3, fill: side.colourOf(head) }));
    parts.push(text(x + 38, under, `${head}  ${side.kindOf(head) ?? ""}`, theme.ink, 12.5));
    under += 20;
  }
  return { parts, height: under - y };
}

function drawnAnswers(side, x, y, theme) {
  const top = side.prediction?.top ?? [];
  if (!top.length) return { parts: [], height: 0 };
  const parts = [text(x, y, side.prediction.output === "next token" ? "Next token" : "Predictions", theme.ink, 14, 600)];
  const most = Math.max(...top.map((each) => Math.max(each.probability, each.before ?? 0)), 0.01);
  top.forEach((each, place) => {
    const line = y + 24 + place * 22;
    parts.push(text(x + 110, line, shortToken(each.text, 14), theme.ink, 12.5, 400, "end"));
    parts.push(s("rect", { x: x + 118, y: line - 11, width: (150 * each.probability) / most, height: 13, rx: 3, fill: "#2f66b8" }));
    if (each.before !== null) parts.push(s("rect", { x: x + 118 + (150 * each.before) / most, y: line - 12, width: 2, height: 15, fill: theme.ink }));
    parts.push(text(x + 278, line, percent(each.probability), theme.quiet, 12));
  });
  return { parts, height: 24 + top.length * 22 };
}

// The images as shown, three per row.
function drawnImages(side, x, y, theme) {
  const parts = [];
  const figures = [...side.imageView.views.querySelectorAll("figure")];
  figures.forEach((figure, place) => {
    const [left, top] = [x + (place % 3) * 240, y + Math.floor(place / 3) * 256];
    parts.push(s("image", { x: left, y: top, width: 220, height: 220, href: figure.querySelector("canvas").toDataURL("image/png") }));
    parts.push(text(left, top + 240, figure.querySelector("figcaption").textContent, theme.ink, 12.5));
  });
  return { parts, height: Math.ceil(figures.length / 3) * 256 };
}

async function drawnLines(side, x, y, theme) {
  const [start, stop] = side.lines.span();
  const found = await side.patterns.rows(side.selected, start, stop);
  const picture = side.lines.drawing(found, start, stop, side.at, 720);
  for (const word of picture.querySelectorAll("text")) {
    word.setAttribute("fill", word.classList.contains("dim") ? theme.quiet : theme.ink);
    if (!word.hasAttribute("font-size")) word.setAttribute("font-size", 14);
  }
  const height = Number(picture.getAttribute("viewBox").split(" ")[3]);
  return { parts: [s("g", { transform: `translate(${x} ${y})` }, [...picture.childNodes])], height };
}

// Squares for visible weights; a long window is reduced to at most 160 per side.
async function drawnMap(side, x, y, theme) {
  const head = side.map.head;
  if (!head) return { parts: [], height: 0 };
  const { rows, keys } = side.map.span();
  const cells = Math.min(rows[1] - rows[0], 160);
  const found = await side.patterns.window(head, rows, keys, cells, null);
  const size = Math.max(3, Math.min(24, Math.floor(560 / found.height)));
  const parts = [text(x + 120, y - 8, `${head}: tokens ${rows[0] + 1} to ${rows[1]}`, theme.ink, 14, 600)];
  found.weights.forEach((weight, place) => {
    if (weight < UNSEEN) return;
    const box = { x: x + 120 + (place % found.width) * size, y: y + Math.floor(place / found.width) * size, width: size, height: size };
    parts.push(s("rect", { ...box, fill: css(sequential(Math.sqrt(weight))) }, s("title", {}, weight.toFixed(3))));
  });
  if (found.height <= MAP) {
    for (let place = 0; place < found.height; place += 1) parts.push(text(x + 112, y + (place + 0.7) * size, shortToken(side.tokens[rows[0] + place], 14), theme.ink, Math.min(12, size), 400, "end"));
  }
  return { parts, height: found.height * size };
}
