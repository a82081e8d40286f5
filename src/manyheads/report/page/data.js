// The data of the page: heads, measures, tokens by stack, and patterns.

import { translateMeasures } from "./head_words.js";
import { unpackPattern } from "./packed.js";

const data = JSON.parse(document.getElementById("data").textContent);
const unpacked = new Map();
translateMeasures(data.measures);

// The tokens that a head looks from, and those that it looks at.
function queriesOf(head) {
  return data.tokens[data.heads[head].stack];
}

function keysOf(head) {
  return data.tokens[data.heads[head].keys];
}

function patternOf(head) {
  if (!unpacked.has(head)) unpacked.set(head, unpackPattern(data.patterns[head], queriesOf(head).length));
  return unpacked.get(head);
}
