// Labels, units and meanings of the measures of heads, as the server's table gives them.

import { say, translate, translateFilled } from "./language.js";

const known = {};

// What the page itself colors the heads by.
const OWN = {
  kind: () => [say`Kind`, say`what the head does on texts made to test it. Heads without a color have no kind.`],
  worth: () => [say`Worth for this prediction`, say`how much the log-probability of the predicted token falls without the head, in nats. Blue heads support it, orange ones oppose it. What later parts make of its output counts too; “Which heads spoke for it?”, in “Why this word?”, counts only what it writes itself, and so may name other heads.`],
};

export function isOwn(measure) {
  return Object.hasOwn(OWN, measure);
}

// Whether 0 is in the middle of its colors.
export function isSplit(measure) {
  return measure === "patching" || measure === "worth";
}

const REPEATS = new Set(["induction", "duplicate_token"]);
const FIRST = ["induction", "previous_token", "first_token", "duplicate_token", "normalized_entropy", "distance", "output_share"];

export function setMeasures(measures) {
  Object.assign(known, measures);
}

export function labelOf(measure) {
  return isOwn(measure) ? OWN[measure]()[0] : translateFilled(known[measure]?.label ?? "");
}

export function definitionOf(measure) {
  return isOwn(measure) ? OWN[measure]()[1] : translate(known[measure]?.about ?? "");
}

export function unitOf(measure) {
  return known[measure]?.unit ?? "number";
}

// The most useful measures first.
export function inOrder(statistics) {
  const there = Object.keys(statistics);
  return [...FIRST.filter((name) => there.includes(name)), ...there.filter((name) => !FIRST.includes(name))];
}

// Whether any head has a value: induction, for one, needs a token that is repeated, and brackets must be there.
export function isDefined(statistics, measure) {
  return statistics[measure]?.some((value) => value !== null && (value !== 0 || !isOfClass(measure))) ?? false;
}

// Weight on tokens of a class, such as digits, which a text may not have.
function isOfClass(measure) {
  return measure.startsWith("on_") && measure !== "on_no_key";
}

// The name of a measure in the menu.
export function optionOf(statistics, measure) {
  const none = isOfClass(measure) && !isDefined(statistics, measure);
  return none ? say`${labelOf(measure)}: none in this text` : labelOf(measure);
}

export function whyUndefined(measure) {
  if (isOfClass(measure)) return say`${labelOf(measure)}: there are none in this text.`;
  if (REPEATS.has(measure)) return say`${labelOf(measure)} is undefined on this text, because no token of it is repeated.`;
  return say`${labelOf(measure)} is undefined on this text, because it is too short.`;
}

// Between -1 and 1: the square root lets small worths be seen beside a large one.
export function splitPart(measure, part) {
  return measure === "worth" ? Math.sign(part) * Math.sqrt(Math.abs(part)) : part;
}

export function rangeOf(measure, values) {
  const present = values.filter((value) => value !== null);
  if (isSplit(measure)) {
    const most = Math.max(0.01, ...present.map(Math.abs));
    return [-most, most];
  }
  if (unitOf(measure) === "percent") return [0, Math.max(0.15, ...present)];
  return [Math.min(0, ...present), Math.max(1e-6, ...present)];
}

// The heads that are selected at first: the best of up to three measures.
export function clearestHeads(statistics, heads) {
  const found = [];
  for (const measure of ["previous_token", "induction", "duplicate_token", "first_token", "max_weight", "output_share"]) {
    const values = statistics[measure]?.map((value) => value ?? -1) ?? [0];
    const most = Math.max(...values);
    const best = heads[values.indexOf(most)];
    if (most > 0 && !found.includes(best) && found.length < 3) found.push(best);
  }
  return found;
}
