// Where heads look on one text. A short text's patterns are fetched whole, once a head; of a long
// one only what is looked at: the row of a token, its column, a run of rows, a window of the map.

export const WHOLE = 256;
const KEPT = 600;
// Weights below this are not told, here as on the server.
const LEAST = 5e-4;

export class Patterns {
  // `base` gives what every question carries: model, text or image, edit.
  constructor(api, base, length) {
    Object.assign(this, { api, base, length });
    this.whole = new Map();
    this.kept = new Map();
  }

  get short() {
    return this.length <= WHOLE;
  }

  async ready(heads) {
    if (!this.short) return;
    const missing = heads.filter((head) => !this.whole.has(head));
    if (!missing.length) return;
    const all = [0, this.length];
    const { maps } = await this.api.ask("map", { ...this.base, heads: missing, rows: all, keys: all, cells: WHOLE }, null);
    for (const each of maps) this.whole.set(each.head, floats(each.data));
  }

  // Where a token looks: { head: { places, weights } }.
  async from(heads, at) {
    if (!this.short) return this.#asked("look", heads, at);
    await this.ready(heads);
    const keys = Array.from({ length: this.length }, (_, key) => key);
    return this.#gathered(heads, keys, (weights, key) => weights[at * this.length + key]);
  }

  // Who looks at a token.
  async to(heads, at) {
    if (!this.short) return this.#asked("lookers", heads, at);
    await this.ready(heads);
    const queries = Array.from({ length: this.length }, (_, query) => query);
    return this.#gathered(heads, queries, (weights, query) => weights[query * this.length + at]);
  }

  // For each head one { places, weights } a row.
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
      const told = await this.api.ask("rows", { ...this.base, heads: missing, rows: [start, stop], count: 12 });
      for (const head of missing) this.#keep(`rows ${head} ${start} ${stop}`, told.heads[head]);
    }
    return Object.fromEntries(heads.map((head) => [head, this.kept.get(`rows ${head} ${start} ${stop}`)]));
  }

  // The weights of a window; `cells` is the most a side may have.
  async window(head, rows, keys, cells, kind) {
    const everything = rows[0] === 0 && rows[1] === this.length && keys[0] === 0 && keys[1] === this.length;
    if (this.short && everything) {
      await this.ready([head]);
      return { height: this.length, width: this.length, weights: this.whole.get(head) };
    }
    const key = `map ${head} ${rows} ${keys} ${cells}`;
    if (!this.kept.has(key)) {
      const { maps } = await this.api.ask("map", { ...this.base, heads: [head], rows, keys, cells }, kind);
      const [one] = maps;
      this.#keep(key, { height: one.height, width: one.width, weights: floats(one.data) });
    }
    return this.kept.get(key);
  }

  async #asked(name, heads, at) {
    const missing = heads.filter((head) => !this.kept.has(`${name} ${head} ${at}`));
    if (missing.length) {
      const told = await this.api.ask(name, { ...this.base, heads: missing, at, count: 48 });
      for (const head of missing) this.#keep(`${name} ${head} ${at}`, told.heads[head]);
    }
    return Object.fromEntries(heads.map((head) => [head, this.kept.get(`${name} ${head} ${at}`)]));
  }

  #gathered(heads, places, read) {
    const found = {};
    for (const head of heads) {
      const weights = this.whole.get(head);
      const pairs = places.map((place) => [place, read(weights, place)]).filter((pair) => pair[1] >= LEAST);
      pairs.sort((one, other) => other[1] - one[1]);
      found[head] = { places: pairs.map((pair) => pair[0]), weights: pairs.map((pair) => told(pair[1])) };
    }
    return found;
  }

  #keep(key, value) {
    if (this.kept.size >= KEPT) this.kept.delete(this.kept.keys().next().value);
    this.kept.set(key, value);
  }
}

// The digits that a number of 32 bits has.
function told(weight) {
  return Number(weight.toPrecision(7));
}

function floats(encoded) {
  return new Float32Array(Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0)).buffer);
}
