// Kinds and measures of heads in the language of the page.

import { counted, fixed } from "./format.js";
import { say, translate, translateFilled } from "./language.js";

const UNITS = {
  sequences: (count) => say`${count} {0|sequence|sequences}`,
  texts: (count) => say`${count} {0|text|texts}`,
  words: (count) => say`${count} {0|word|words}`,
  tokens: (count) => say`${count} {0|token|tokens}`,
  pairs: (count) => say`${count} {0|pair|pairs}`,
  images: (count) => say`${count} {0|image|images}`,
};

export const two = (value) => fixed(value, 2);

export function kindName(name) {
  return translateFilled(name);
}

// The measures of a page with their names and meanings in its language.
export function translateMeasures(measures) {
  for (const measure of measures) {
    const label = translateFilled(measure.label, true);
    const title = measure.unit === "nats" ? say`${label} (nats)` : measure.unit === "tokens" ? say`${label} (tokens)` : label;
    Object.assign(measure, { label, title, about: translate(measure.about) });
  }
}

// What it was measured on, and if it could tip over: "5 of 5 draws".
export function sampleOf(label) {
  const sample = label.draws ? say`${label.draws[0]} of ${label.draws[1]} draws` : UNITS[label.unit]?.(counted(label.samples));
  return [sample, label.near_threshold ? say`near the threshold ${two(label.threshold)}` : null].filter(Boolean).join(", ");
}
