// Heads as squares and values as colors, as the report, the atlas and the studio draw them.

import { css } from "./color.js";
import { h } from "./dom.js";
import { formatted } from "./format.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

// How far an arrow key moves: layers down and heads to the right; undefined for other keys.
export function stepOf(event) {
  return STEPS[event.key];
}

// How far an arrow key moves in a text.
export function tokenStep(event) {
  const [down, right] = stepOf(event) ?? [0, 0];
  return down + right;
}

// The heads of each attention: "", or "encoder", "decoder" and "decoder cross" with their heads.
export function attentions(heads) {
  const words = (head) => [head.stack, head.sublayer].filter((word) => word !== "main" && word !== "attention").join(" ");
  return Map.groupBy(heads, words);
}

// The kinds of some heads in the order of the legend.
export function kindsOf(heads) {
  return [...new Set(heads.map((head) => head.group))].filter((group) => group && group !== "mixed").sort();
}

// A scale of colors between its lowest and its highest value.
export function rampOf(scale, unit) {
  const stops = Array.from({ length: 9 }, (_, index) => css(scale.color(scale.low + (scale.high - scale.low) * index / 8)));
  const bar = h("i", { class: "ramp", vars: { background: `linear-gradient(90deg, ${stops.join(",")})` } });
  return [h("span", {}, formatted(scale.low, unit)), bar, h("span", {}, formatted(scale.high, unit))];
}
