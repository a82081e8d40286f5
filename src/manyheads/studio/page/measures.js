// Labels, units and meanings of the measures of heads, as the server's table gives them.

const known = {};

// Kinds of heads, short enough for a square.
const SHORT = {
  "previous-token": "prev", "next-token": "next", self: "self", positional: "pos", "duplicate-token": "dup", induction: "ind", copying: "copy",
  sink: "sink", punctuation: "punc", broad: "", bracket: "brkt", numbering: "num", syntactic: "syn", coreference: "cor",
  alignment: "algn", retrieval: "retr", repetition: "rep", recall: "rec", acronym: "acr", tense: "tns", "sentence-start": "sent", capitals: "caps", "bias-gap": "bias", "context-blind": "",
  local: "loc", row: "row", column: "col", "class-token": "cls",
};

const REPEATS = new Set(["induction", "duplicate_token"]);
const FIRST = ["induction", "previous_token", "first_token", "duplicate_token", "normalized_entropy", "distance", "output_share"];

export function setMeasures(measures) {
  Object.assign(known, measures);
}

export function labelOf(measure) {
  return known[measure]?.label ?? "";
}

export function shortOf(kind) {
  return SHORT[kind?.split(" ")[0]] ?? "";
}

export function definitionOf(measure) {
  return known[measure]?.about ?? "";
}

export function unitOf(measure) {
  return known[measure]?.unit ?? "number";
}

// The most useful measures first.
export function inOrder(statistics) {
  const there = Object.keys(statistics);
  return [...FIRST.filter((name) => there.includes(name)), ...there.filter((name) => !FIRST.includes(name))];
}

// Whether any head has a value: induction, for one, needs a token that is repeated.
export function isDefined(statistics, measure) {
  return statistics[measure]?.some((value) => value !== null) ?? false;
}

export function whyUndefined(measure) {
  const reason = REPEATS.has(measure) ? "no token of it is repeated" : "it is too short";
  return `${labelOf(measure)} is undefined on this text, because ${reason}.`;
}

export function rangeOf(measure, values) {
  const present = values.filter((value) => value !== null);
  if (measure === "patching") {
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
