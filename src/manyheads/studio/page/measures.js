// What the measures of heads are called, and what they mean in one sentence.

const KNOWN = {
  entropy: ["Entropy", "how widely a head looks, in nats: 0 is one token alone"],
  normalized_entropy: ["Entropy, share of most", "1 looks evenly at all it can see"],
  effective_keys: ["Tokens looked at", "how many tokens share the attention, in effect"],
  max_weight: ["Confidence", "the largest weight of a query, on average"],
  distance: ["Distance", "how far back a head looks, in tokens"],
  spread: ["Spread", "how far apart the tokens are that it looks at"],
  first_token: ["On the first token", "attention resting on the first token"],
  sink: ["Sink", "1 where the first token is a sink"],
  previous_token: ["Previous token", "attention to the token just before"],
  self: ["Itself", "attention to the token itself"],
  next_token: ["Next token", "attention to the token just after"],
  duplicate_token: ["Earlier copies", "attention to earlier copies of the same token"],
  induction: ["Induction", "attention to what followed an earlier copy"],
  output_norm: ["Output size", "how much a head writes to the stream"],
  output_share: ["Share of the stream", "what it writes beside what is there"],
  on_punctuation: ["On punctuation", "attention resting on punctuation"],
  on_digits: ["On digits", "attention resting on digits"],
  on_newline: ["On line ends", "attention resting on line ends"],
  on_special: ["On special tokens", "attention resting on special tokens"],
  patching: ["Brought back by patching", "share of the other prompt's answer that this head alone brings in"],
};

// Kinds of heads in the few letters that a square has room for.
const SHORT = {
  "previous-token": "prev", "next-token": "next", self: "self", positional: "pos", "duplicate-token": "dup", induction: "ind", copying: "copy",
  sink: "sink", punctuation: "punc", broad: "", bracket: "brkt", numbering: "num", syntactic: "syn", coreference: "cor",
  local: "loc", row: "row", column: "col", "class-token": "cls",
};

const FIRST = ["induction", "previous_token", "first_token", "duplicate_token", "normalized_entropy", "distance", "output_share"];
// Shares, whose scale is always from 0 to 1.
const SHARES = new Set(["normalized_entropy", "max_weight", "first_token", "sink", "previous_token", "self", "next_token", "duplicate_token", "induction"]);

export function nameOf(measure) {
  return KNOWN[measure]?.[0] ?? measure.replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());
}

export function shortOf(kind) {
  return SHORT[kind?.split(" ")[0]] ?? "";
}

export function meaningOf(measure) {
  return KNOWN[measure]?.[1] ?? "";
}

// Those that people ask for first, then the rest; one that was never measured is left out.
export function inOrder(statistics) {
  const there = Object.keys(statistics).filter((name) => statistics[name].some((value) => value !== null));
  return [...FIRST.filter((name) => there.includes(name)), ...there.filter((name) => !FIRST.includes(name))];
}

export function rangeOf(measure, values) {
  const known = values.filter((value) => value !== null);
  if (measure === "patching") {
    const most = Math.max(0.01, ...known.map(Math.abs));
    return [-most, most];
  }
  if (SHARES.has(measure) || measure.startsWith("on_")) return [0, Math.max(0.15, ...known)];
  return [Math.min(0, ...known), Math.max(1e-6, ...known)];
}

// Something to see at once: the head that does most of each of three things.
export function telling(statistics, heads) {
  const found = [];
  for (const measure of ["previous_token", "induction", "duplicate_token", "first_token", "max_weight", "output_share"]) {
    const values = statistics[measure]?.map((value) => value ?? -1) ?? [0];
    const most = Math.max(...values);
    const best = heads[values.indexOf(most)];
    if (most > 0 && !found.includes(best) && found.length < 3) found.push(best);
  }
  return found;
}
