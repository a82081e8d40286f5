// What the page knows: heads, measures, tokens; patterns are unpacked when they are first looked at.

const data = JSON.parse(document.getElementById("data").textContent);
const LENGTH = data.tokens.length;
const unpacked = new Map();

// Of a head: where the keys of each query start, the keys in order, and their weights.
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
    for (let place = starts[query]; place < starts[query + 1]; place++) {
      key += raw[low + place] + 256 * raw[high + place];
      keys[place] = key;
      weights[place] = (raw[small + place] / 255) ** 2;
    }
  }
  return { starts, keys, weights };
}

// Where one query looks, or who looks at one key: pairs of place and weight, largest first.
function looksFrom(pattern, query) {
  const found = [];
  for (let place = pattern.starts[query]; place < pattern.starts[query + 1]; place++) {
    found.push([pattern.keys[place], pattern.weights[place]]);
  }
  return found.sort((one, other) => other[1] - one[1]);
}

function looksAt(pattern, key) {
  const found = [];
  for (let query = 0; query < LENGTH; query++) {
    for (let place = pattern.starts[query]; place < pattern.starts[query + 1]; place++) {
      if (pattern.keys[place] === key) found.push([query, pattern.weights[place]]);
    }
  }
  return found.sort((one, other) => other[1] - one[1]);
}

// A token as it can be seen: spaces and line ends have no shape of their own.
function shown(token) {
  const seen = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
  return seen === "" ? "∅" : seen;
}

function make(tag, words = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = words;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
