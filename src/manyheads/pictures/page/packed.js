// The patterns of heads that a page has inside, gzipped; each is unpacked when it is first needed.

import { weightColor } from "./color.js";
import { pixels } from "./pixels.js";

// The first index of each query, the keys in order, and their weights.
export async function unpackPattern(packed, queries) {
  const zipped = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const starts = new Uint32Array(queries + 1);
  for (let query = 0; query < queries; query += 1) starts[query + 1] = starts[query] + raw[query];
  const count = starts[queries];
  const low = queries, high = low + count, small = high + count;
  const keys = new Uint16Array(count), weights = new Float32Array(count);
  for (let query = 0; query < queries; query += 1) {
    let key = 0;
    for (let index = starts[query]; index < starts[query + 1]; index += 1) {
      key += raw[low + index] + 256 * raw[high + index];
      keys[index] = key;
      weights[index] = (raw[small + index] / 255) ** 2;
    }
  }
  return { starts, keys, weights };
}

// What a query attends to, or what attends to a key: pairs of token index and weight, largest first.
export function attentionFrom({ starts, keys, weights }, query) {
  const pairs = [];
  for (let index = starts[query]; index < starts[query + 1]; index += 1) pairs.push([keys[index], weights[index]]);
  return pairs.sort((one, other) => other[1] - one[1]);
}

export function attentionTo({ starts, keys, weights }, key) {
  const pairs = [];
  for (let query = 0; query + 1 < starts.length; query += 1) {
    for (let index = starts[query]; index < starts[query + 1]; index += 1) {
      if (keys[index] === key) pairs.push([query, weights[index]]);
    }
  }
  return pairs.sort((one, other) => other[1] - one[1]);
}

// Draw a pattern with at most `most` cells per side; a cell shows the largest weight in it.
export function drawPattern(canvas, { starts, keys, weights }, keyCount, most) {
  const queries = starts.length - 1;
  const height = Math.min(queries, most), width = Math.min(keyCount, most);
  const largest = new Float32Array(height * width);
  for (let query = 0; query < queries; query += 1) {
    const row = Math.floor(query * height / queries) * width;
    for (let index = starts[query]; index < starts[query + 1]; index += 1) {
      const cell = row + Math.floor(keys[index] * width / keyCount);
      largest[cell] = Math.max(largest[cell], weights[index]);
    }
  }
  pixels(height, width, (cell) => weightColor(largest[cell]), canvas);
}
