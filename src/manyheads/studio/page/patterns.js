// Attention patterns of one text. Patterns of a short text are fetched completely, once per head; of a
// long one only what is shown: a row, a column, a range of rows, or a window of the map.

export const MAX_COMPLETE = 256;
const KEPT = 600;
// Smaller weights are left out, here as on the server.
const MIN_WEIGHT = 5e-4;

export class Patterns {
  // `base` holds the fields of every request: model, text or image, edits.
  constructor(api, base, length) {
    Object.assign(this, { api, base, length });
    this.complete = new Map();
    this.kept = new Map();
  }

  get short() {
    return this.length <= MAX_COMPLETE;
  }

  async ready(heads) {
    if (!this.short) return;
    const missing = heads.filter((head) => !this.complete.has(head));
    if (!missing.length) return;
    const all = [0, this.length];
    const { maps } = await this.api.ask("attention_map", { ...this.base, heads: missing, rows: all, keys: all, cells: MAX_COMPLETE }, null);
    for (const each of maps) this.complete.set(each.head, floats(each.data));
  }

  // What a token attends to: { head: { positions, weights } }.
  async from(heads, at) {
    if (!this.short) return this.#fetched("attention_from", heads, at);
    await this.ready(heads);
    const keys = Array.from({ length: this.length }, (_, key) => key);
    return this.#gathered(heads, keys, (weights, key) => weights[at * this.length + key]);
  }

  // What attends to a token.
  async to(heads, at) {
    if (!this.short) return this.#fetched("attention_to", heads, at);
    await this.ready(heads);
    const queries = Array.from({ length: this.length }, (_, query) => query);
    return this.#gathered(heads, queries, (weights, query) => weights[query * this.length + at]);
  }

  // For each head one { positions, weights } per row.
  async rows(heads, start, stop) {
    if (this.short) {
      await this.ready(heads);
      const found = Object.fromEntries(heads.map((head) => [head, []]));
      for (let row = start; row < stop; row += 1) {
        const each = await this.from(heads, row);
        for (const head of heads) found[head].push(each[head]);
      }
      return found;
    }
    const missing = heads.filter((head) => !this.kept.has(`rows ${head} ${start} ${stop}`));
    if (missing.length) {
      const response = await this.api.ask("attention_rows", { ...this.base, heads: missing, rows: [start, stop], top_k: 12 });
      for (const head of missing) this.#keep(`rows ${head} ${start} ${stop}`, response.heads[head]);
    }
    return Object.fromEntries(heads.map((head) => [head, this.kept.get(`rows ${head} ${start} ${stop}`)]));
  }

  // The weights of a window, reduced to at most `cells` per side.
  async window(head, rows, keys, cells, kind) {
    const everything = rows[0] === 0 && rows[1] === this.length && keys[0] === 0 && keys[1] === this.length;
    if (this.short && everything) {
      await this.ready([head]);
      return { height: this.length, width: this.length, weights: this.complete.get(head) };
    }
    const key = `map ${head} ${rows} ${keys} ${cells}`;
    if (!this.kept.has(key)) {
      const { maps } = await this.api.ask("attention_map", { ...this.base, heads: [head], rows, keys, cells }, kind);
      const [one] = maps;
      this.#keep(key, { height: one.height, width: one.width, weights: floats(one.data) });
    }
    return this.kept.get(key);
  }

  async #fetched(name, heads, at) {
    const missing = heads.filter((head) => !this.kept.has(`${name} ${head} ${at}`));
    if (missing.length) {
      const response = await this.api.ask(name, { ...this.base, heads: missing, position: at, top_k: 48 });
      for (const head of missing) this.#keep(`${name} ${head} ${at}`, response.heads[head]);
    }
    return Object.fromEntries(heads.map((head) => [head, this.kept.get(`${name} ${head} ${at}`)]));
  }

  #gathered(heads, places, read) {
    const found = {};
    for (const head of heads) {
      const weights = this.complete.get(head);
      const pairs = places.map((place) => [place, read(weights, place)]).filter((pair) => pair[1] >= MIN_WEIGHT);
      pairs.sort((one, other) => other[1] - one[1]);
      found[head] = { positions: pairs.map((pair) => pair[0]), weights: pairs.map((pair) => rounded(pair[1])) };
    }
    return found;
  }

  #keep(key, value) {
    if (this.kept.size >= KEPT) this.kept.delete(this.kept.keys().next().value);
    this.kept.set(key, value);
  }
}

// The significant digits of a float32.
function rounded(weight) {
  return Number(weight.toPrecision(7));
}

export function floats(encoded) {
  return new Float32Array(Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0)).buffer);
}
