// The files beside the page. Each is a script that calls `manyheads(kind, content)`, since a page that is
// opened from disk may run scripts and read nothing.

import { h } from "./dom.js";
import { say } from "./language.js";

const reads = new Map();
const contents = new WeakMap();

window.manyheads = (kind, content) => contents.set(document.currentScript, content);

export function readChunk(path) {
  if (!reads.has(path)) reads.set(path, new Promise((resolve, reject) => {
    const fail = () => {
      reads.delete(path);
      reject(new Error(say`${path} cannot be read: keep the whole folder of the atlas together.`));
    };
    const load = () => (contents.has(script) ? resolve(contents.get(script)) : fail());
    const script = h("script", { src: path, on: { load, error: fail } });
    document.head.append(script);
  }));
  return reads.get(path);
}

// "decoder L2H0 cross" in file names and addresses.
export function slugOf(name) {
  return name.replaceAll(" ", "-");
}

export function readHead(atlas, head) {
  return readChunk(`${atlas.folder}heads/${slugOf(head.name)}.js`);
}

export function readTokens(atlas) {
  return readChunk(`${atlas.folder}tokens.js`);
}

// The tokens of a passage by stack; none where the model reads no tokens.
export async function readPassage(atlas, text) {
  const chunk = atlas.chunks.findLastIndex((first) => first <= text);
  if (chunk < 0) return {};
  const [tokens, { texts }] = await Promise.all([readTokens(atlas), readChunk(`${atlas.folder}texts/${chunk}.js`)]);
  const stacks = Object.entries(texts[text] ?? {});
  return Object.fromEntries(stacks.map(([stack, ids]) => [stack, ids.map((id) => tokens[id])]));
}
