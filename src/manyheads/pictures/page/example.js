// One passage: the query at which a head is sharpest, and what each query around it looks at.

import { css, inkOn, weightColor } from "./color.js";
import { h } from "./dom.js";
import { percent } from "./format.js";
import { tokenStep } from "./grid.js";
import { say, sayParts } from "./language.js";
import { listedToken, visibleToken } from "./token_text.js";

const WEIGHT_UNITS = 1000;
// Keys with at least this weight are in the excerpt, with some tokens around them.
const MUCH = 0.3;
const AROUND = 4;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

// The keys of each query: a map from its position to pairs of key and weight, the largest first.
function rowsOf(example) {
  const rows = new Map();
  let index = 0;
  example.counts.forEach((count, place) => {
    rows.set(example.start + place, Array.from({ length: count }, (_, key) => [example.keys[index + key], example.weights[index + key] / WEIGHT_UNITS]));
    index += count;
  });
  return rows;
}

// Positions worth showing, in order.
function excerpt(rows, length, own) {
  const chosen = new Set();
  const add = (at) => { for (let each = at - AROUND; each <= at + AROUND; each += 1) if (each >= 0 && each < length) chosen.add(each); };
  if (own) for (const query of rows.keys()) chosen.add(query);
  for (const keys of rows.values()) for (const [key, weight] of keys) if (weight >= MUCH) add(key);
  return [...chosen].sort((one, other) => one - other);
}

// `words` are the tokens of the queries, `keyWords` those of the keys where they are of another text.
export function exampleElement(example, words, keyWords = null) {
  const rows = rowsOf(example);
  const last = Math.max(...rows.keys(), ...example.keys, 0) + 1;
  const queries = words ?? Array.from({ length: last }, (_, index) => `${index}`);
  const keys = keyWords ?? queries;
  const said = h("p", { class: "said", "aria-live": "polite" });
  const texts = [text(queries, "queries", rows)];
  if (keyWords) texts.push(text(keyWords, "keys"));
  let at = null;

  function text(tokens, role, shown = null) {
    const letters = tokens.join("");
    const rightToLeft = [...letters.matchAll(new RegExp(RIGHT_TO_LEFT, "g"))].length > letters.length / 3;
    const label = role === "queries" ? say`Passage ${example.text}. Arrow keys choose the query.` : say`What it reads`;
    // Words of some tokenizers carry no space.
    const apart = tokens.filter((token) => token.startsWith(" ")).length < tokens.length / 20;
    const attributes = { class: apart ? "passage apart" : "passage", dir: rightToLeft ? "rtl" : "ltr", role: "group", "aria-label": label, tabindex: shown ? 0 : null };
    const element = h("div", attributes);
    fill(element, tokens, shown, excerpt(rows, tokens.length, role === "queries"));
    if (!shown) return element;
    const pick = (event) => { const index = event.target.closest?.(".query")?.dataset.index; if (index !== undefined) show(Number(index)); };
    for (const name of ["pointerover", "click"]) element.addEventListener(name, pick);
    element.addEventListener("keydown", step);
    return element;
  }

  function fill(element, tokens, shown, places) {
    let before = -1;
    const items = [];
    for (const index of places) {
      if (index !== before + 1) items.push(h("span", { class: "gap" }, " … "));
      items.push(h("bdi", { class: shown?.has(index) ? "token query" : "token", "data-index": index }, /^ +$/.test(tokens[index]) ? tokens[index] : visibleToken(tokens[index])));
      before = index;
    }
    if (before < tokens.length - 1) items.push(h("span", { class: "gap" }, " …"));
    element.replaceChildren(...items);
    element.dataset.whole = String(places.length === tokens.length);
  }

  function step(event) {
    const by = tokenStep(event);
    if (!by) return;
    event.preventDefault();
    const next = at + by * (event.currentTarget.dir === "rtl" && event.key.match(/Left|Right/) ? -1 : 1);
    if (rows.has(next)) show(next);
  }

  function show(query) {
    at = query;
    const attended = new Map(rows.get(query));
    for (const element of texts) {
      for (const token of element.querySelectorAll(".token")) {
        const index = Number(token.dataset.index);
        const weight = element === texts.at(-1) ? attended.get(index) : undefined;
        const color = weight === undefined ? null : weightColor(weight);
        token.style.background = color ? css(color) : "";
        token.style.color = color ? inkOn(color) : "";
        token.classList.toggle("at", element === texts[0] && index === query);
      }
    }
    const word = (tokens, index) => h("bdi", { class: "word" }, listedToken(tokens[index] ?? ""));
    const where = (key) => (keyWords ? ` ${say`at ${key}`}` : `, ${key === query ? say`itself` : key < query ? say`${query - key} before` : say`${key - query} after`}`);
    const listed = rows.get(query).flatMap(([key, weight], place) => [place ? "; " : "", word(keys, key), ` ${percent(weight)}${where(key)}`]);
    said.replaceChildren(...sayParts`${word(queries, query)} at ${query} looks at `, ...(listed.length ? listed : [say`many tokens, each a little`]), ".");
  }

  const whole = h("button", { type: "button", class: "plain", on: { click: () => {
    fill(texts[0], queries, rows, queries.map((_, index) => index));
    if (keyWords) fill(texts[1], keyWords, null, keyWords.map((_, index) => index));
    show(at);
    whole.remove();
    texts[0].focus();
  } } }, say`Show the whole passage`);
  const title = h("p", { class: "quiet" }, `${say`Passage ${example.text}, largest weight ${percent(Math.round(example.activation * WEIGHT_UNITS) / WEIGHT_UNITS)}`} `);
  if (texts.some((element) => element.dataset.whole === "false")) title.append(whole);
  show(rows.has(example.query) ? example.query : rows.keys().next().value);
  return h("article", { class: "example" }, title, texts, said);
}
