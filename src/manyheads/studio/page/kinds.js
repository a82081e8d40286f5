// The kinds of heads in words, each with its score, its interval and what it was measured on.

import { h } from "./dom.js";

const two = (value) => value.toFixed(2);

// "0.41 (0.39 to 0.43, 5 of 5 draws)".
function scored(label) {
  const [low, high] = label.interval ?? [null, null];
  const parts = [low == null || high == null ? null : `${two(low)} to ${two(high)}`, label.sample || null].filter(Boolean);
  return `${two(label.score)}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

// One line about a head: its first kind, or the nearest one if it has none.
export function kindInWords(labels, near) {
  if (labels?.length) return `${labels[0].name} ${scored(labels[0])}`;
  return near ? `no kind; nearest: ${near.name} ${two(near.score)}` : "no kind";
}

// The same for the list of selected heads, with further kinds; the evidence is its title.
export function kindElement(measured, labels, near) {
  if (!measured) return h("span", { class: "kind" }, "measuring its kind…");
  if (!labels?.length) {
    const why = near ? h("small", {}, `nearest: ${near.name} ${scored(near)}`) : null;
    return h("span", { class: "kind", title: near?.evidence }, "no kind", why);
  }
  const [first, ...rest] = labels;
  const also = rest.length ? `; also ${rest.map((each) => `${each.name} ${two(each.score)}`).join(", ")}` : "";
  return h("span", { class: "kind", title: first.evidence }, first.name, h("small", {}, `score ${scored(first)}${also}`));
}
