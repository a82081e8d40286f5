// The data of the page: heads, measures, tokens; patterns are unpacked when first needed.

const data = JSON.parse(document.getElementById("data").textContent);
const LENGTH = data.tokens.length;
const unpacked = new Map();

// The pattern of a head: the first index of each query, the keys in order, and their weights.
function patternOf(head) {
  if (!unpacked.has(head)) unpacked.set(head, unpack(data.patterns[head]));
  return unpacked.get(head);
}

async function unpack(packed) {
  const zipped = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const starts = new Uint32Array(LENGTH + 1);
  for (let query = 0; query < LENGTH; query++) starts[query + 1] = starts[query] + raw[query];
  const count = starts[LENGTH];
  const low = LENGTH, high = low + count, small = high + count;
  const keys = new Uint16Array(count), weights = new Float32Array(count);
  for (let query = 0; query < LENGTH; query++) {
    let key = 0;
    for (let index = starts[query]; index < starts[query + 1]; index++) {
      key += raw[low + index] + 256 * raw[high + index];
      keys[index] = key;
      weights[index] = (raw[small + index] / 255) ** 2;
    }
  }
  return { starts, keys, weights };
}

// What a query attends to, or what attends to a key: pairs of token index and weight, largest first.
function attentionFrom(pattern, query) {
  const pairs = [];
  for (let index = pattern.starts[query]; index < pattern.starts[query + 1]; index++) {
    pairs.push([pattern.keys[index], pattern.weights[index]]);
  }
  return pairs.sort((one, other) => other[1] - one[1]);
}

function attentionTo(pattern, key) {
  const pairs = [];
  for (let query = 0; query < LENGTH; query++) {
    for (let index = pattern.starts[query]; index < pattern.starts[query + 1]; index++) {
      if (pattern.keys[index] === key) pairs.push([query, pattern.weights[index]]);
    }
  }
  return pairs.sort((one, other) => other[1] - one[1]);
}

// A token with visible spaces and line ends.
function visibleToken(token) {
  const text = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
  return text === "" ? "∅" : text;
}

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
