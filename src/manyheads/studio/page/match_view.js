// Why a document matched: its words, the tokens of both texts, and the heads.

import { css, diverging, inkOn } from "./color.js";
import { h } from "./dom.js";
import { decimal } from "./format.js";
import { say } from "./language.js";

const METHODS = {
  decomposition: () => say`the share of each word in the score, exact`,
  removal: () => say`how much the score falls without each word`,
  gradient: () => say`integrated gradients of each word`,
};
const KINDS = {
  dense: (score) => say`A dense match with the score ${score}.`,
  late: (score) => say`A late match with the score ${score}.`,
};
const SIDES = {
  query: () => [say`While it reads the query`, say`Heads of the query`],
  document: () => [say`While it reads the document`, say`Heads of the document`],
};
const MOST_WORDS = 8;

const signed = (value) => (value > 0 ? `+${decimal(value)}` : decimal(value));
const largest = (values) => Math.max(1e-12, ...values.map((each) => Math.abs(each ?? 0)));

function fill(value, most) {
  const color = diverging((value ?? 0) / most);
  return { "--fill": css(color), "--on": inkOn(color) };
}

// The sections about words and tokens.
export function drawMatch(explained) {
  const score = decimal(explained.score);
  const note = `${KINDS[explained.kind](score)} ${say`Blue adds to it, orange takes away; by ${METHODS[explained.tokens_by]()}.`}`;
  return [
    h("p", { class: "quiet" }, note),
    h("section", {}, h("h3", {}, say`Words of the document`), named(explained.document), passage(explained.document)),
    h("section", {}, h("h3", {}, say`Words of the query`), named(explained.query), passage(explained.query)),
    explained.matrix ? matrix(explained) : null,
  ].filter(Boolean);
}

// The words that add most, each once with its strongest occurrence: common words occur often.
function named(side) {
  const letters = Array.from(side.text);
  const strongest = new Map();
  for (const [start, end, value] of side.words) {
    const word = letters.slice(start, end).join("");
    const key = word.toLocaleLowerCase();
    if ((value ?? 0) > (strongest.get(key)?.value ?? 0)) strongest.set(key, { word, value });
  }
  const best = [...strongest.values()].filter((each) => each.value > 0 && /[\p{L}\p{N}]/u.test(each.word)).sort((one, other) => other.value - one.value);
  if (!best.length) return h("p", { class: "quiet" }, say`No word adds to the score.`);
  return h("ul", { class: "named" }, best.slice(0, MOST_WORDS).map(({ word, value }) => h("li", {}, h("b", {}, word), " ", h("span", {}, signed(value)))));
}

function passage(side) {
  const letters = Array.from(side.text);
  const most = largest(side.words.map((word) => word[2]));
  const parts = [];
  let done = 0;
  for (const [start, end, value] of side.words) {
    if (start > done) parts.push(letters.slice(done, start).join(""));
    const word = letters.slice(Math.max(start, done), end).join("");
    parts.push(h("span", { vars: fill(value, most), title: signed(value ?? 0) }, word));
    done = Math.max(done, end);
  }
  if (done < letters.length) parts.push(letters.slice(done).join(""));
  return h("div", { class: "explained", dir: "auto", tabindex: "0", role: "group", "aria-label": say`Marked text` }, ...parts);
}

function matrix(explained) {
  const { rows, columns, values, tokens } = explained.matrix;
  const most = largest(values.flat());
  const head = h("thead", {}, h("tr", {}, h("td"), columns.map((name) => h("th", { scope: "col" }, h("span", {}, name)))));
  const body = values.map((line, row) => {
    const best = line.indexOf(Math.max(...line));
    const cells = line.map((value, column) => h("td", { class: column === best ? "best" : null, vars: fill(value, most), title: `${rows[row]} × ${columns[column]}: ${decimal(value)}` }));
    return h("tr", {}, h("th", { scope: "row" }, rows[row]), cells);
  });
  const some = columns.length < tokens ? ` ${say`The ${columns.length} strongest of ${tokens} tokens are shown.`}` : "";
  const means = explained.kind === "late" ? say`How similar the vectors of two tokens are; the best of each row is framed, and these sum to the score.` : say`What each pair of tokens adds to the score; the best of each row is framed.`;
  return h("section", {}, h("h3", {}, say`Tokens: query down, document across`), h("p", { class: "quiet" }, means + some), h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": say`Match matrix` }, h("table", { class: "match" }, head, h("tbody", {}, body))));
}

// One map per side, in the same colors.
export function drawHeads(explained) {
  if (!explained.heads) return h("section", {}, h("h3", {}, say`Heads`), h("p", { class: "quiet" }, say`This model has no heads to look at.`));
  const sides = Object.entries(explained.heads);
  const most = largest(sides.flatMap(([, layers]) => layers.flatMap((layer) => layer.values)));
  const maps = sides.map(([name, layers]) => {
    const width = Math.max(...layers.map((layer) => layer.values.length));
    const head = h("tr", {}, h("td"), Array.from({ length: width }, (_, place) => h("th", { scope: "col" }, `H${place}`)));
    const lines = layers.map(({ layer, values }) => h("tr", {}, h("th", { scope: "row" }, `L${layer}`), values.map((value, place) => h("td", { vars: fill(value, most), title: `L${layer}H${place}: ${signed(value ?? 0)}` }))));
    const [reading, heads] = SIDES[name]();
    return h("figure", {}, h("figcaption", { class: "quiet" }, reading), h("div", { class: "scroll" }, h("table", { class: "heads-map", "aria-label": heads }, h("thead", {}, head), h("tbody", {}, lines))));
  });
  const best = h("ul", { class: "named" }, explained.top_heads.map(({ head, value }) => h("li", {}, h("b", {}, head), " ", h("span", {}, signed(value)))));
  const how = explained.heads_by === "ablation" ? say`How much the score falls without each head.` : say`How much the score would fall without each head, to first order.`;
  return h("section", {}, h("h3", {}, say`Heads`), h("p", { class: "quiet" }, how), best, h("div", { class: "head-maps" }, maps));
}
