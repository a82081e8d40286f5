// One head: its kinds, its measures, how far it looks, the tokens it looks at and from, and examples.

import { addressOf } from "./address.js";
import { readHead, readPassage, readTokens } from "./chunks.js";
import { h } from "./dom.js";
import { exampleElement } from "./example.js";
import { counted, decimal, formatted, percent } from "./format.js";
import { kindName, sampleOf } from "./head_words.js";
import { kindInWords, meaningOf } from "./kinds.js";
import { currentLanguage, say, translate } from "./language.js";
import { atlasNow, background, colorOfKind, corpusName, state, valueOf, valuesOf } from "./state.js";
import { listedToken } from "./token_text.js";

const TOKENS = 12;
// Examples that are shown at once; the others after a click.
const FIRST = 4;

export async function drawHead(place, head) {
  const atlas = atlasNow();
  place.dataset.head = addressOf(head);
  const status = h("p", { class: "quiet", role: "status" }, say`Reading…`);
  place.replaceChildren(title(head), kinds(head), status);
  const [entry, tokens] = head.file === false ? [null, []] : await Promise.all([readHead(atlas, head), readTokens(atlas)]);
  // Meanwhile the reader may have opened another.
  if (place.dataset.head !== addressOf(head)) return;
  status.remove();
  if (entry) {
    place.append(
      examples(atlas, head, entry),
      h("div", { class: "cards" },
        distances(entry),
        tokenCard(say`Looks at`, say`Tokens that receive more of its weight than equal attention would give them.`, entry.at, tokens),
        tokenCard(say`Looks from`, say`Tokens at which its largest weight is above its mean.`, entry.from, tokens),
        sharpness(entry),
        similar(head)));
  }
  place.append(measures(head));
}

function title(head) {
  const { heads } = atlasNow();
  const index = heads.indexOf(head);
  const step = (by, label, sign) => h("a", { class: "button", href: addressOf(heads[(index + by + heads.length) % heads.length]), "aria-label": label }, sign);
  const steps = state.atlases.length < 2 ? [] : state.atlases.map((atlas, at) => [atlas, at, atlas.heads.find((each) => each.name === head.name)]).filter(([, , same]) => same)
    .map(([atlas, at, same]) => h("a", { class: "button", href: addressOf(same, at), "aria-current": at === state.at ? "page" : null }, atlas.name));
  return h("div", { class: "title" },
    h("h2", { id: "title", tabindex: -1 }, head.name, head.kind ? h("span", { class: "chip", vars: { background: background(colorOfKind(head.group)) } }, kindName(head.kind)) : null, head.flags.map((flag) => h("em", { class: "flag" }, translate(flag)))),
    h("p", { class: "steps" }, h("a", { class: "button", href: "#" }, say`All heads`), step(-1, say`Previous head`, "‹"), step(1, say`Next head`, "›"), steps));
}

function kinds(head) {
  const row = (kind) => {
    const [low, high] = kind.interval ?? [null, null];
    const range = low === null || high === null ? "" : ` (${say`95% interval ${decimal(low)} to ${decimal(high)}`})`;
    return h("li", {}, h("b", {}, kindName(kind.name)), ` ${decimal(kind.score)}${range}, ${say`at least ${decimal(kind.threshold)} needed`}; ${sampleOf(kind)}. `, h("span", { class: "quiet" }, currentLanguage() === "en" ? kind.evidence : meaningOf(kind.name)));
  };
  if (head.kinds.length) return h("ul", { class: "evidence", "aria-label": say`Kinds` }, head.kinds.map(row));
  // The evidence is in English.
  if (currentLanguage() !== "en") return h("p", { class: "evidence" }, head.why && `${kindInWords([], head.nearest)}.`);
  return h("p", { class: "evidence" }, head.why && `No kind: ${head.why}.`);
}

// The sharpest passages, or those of one tenth of all.
function examples(atlas, head, entry) {
  const tenths = [...new Set(entry.examples.map((example) => example.decile))].sort((one, other) => (one === 0 ? -1 : other === 0 ? 1 : other - one));
  const list = h("div", { class: "examples" });
  // HeadVis may have fewer parts than ten.
  const most = Math.max(...tenths), tenth = most === 10;
  const names = (decile) => (decile === 0 ? say`Sharpest` : decile === most ? (tenth ? say`Top tenth` : say`Top`) : decile === 1 ? (tenth ? say`Lowest tenth` : say`Lowest`) : tenth ? say`Tenth ${decile}` : say`Part ${decile}`);
  const buttons = tenths.map((decile) => h("button", { type: "button", "aria-label": decile > 1 && decile < most ? say`Part ${decile} of ${most}` : null, on: { click: () => show(decile) } }, names(decile)));
  let wanted = null;
  async function show(decile) {
    wanted = decile;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(tenths[index] === decile)));
    const chosen = entry.examples.filter((example) => example.decile === decile);
    const passages = await Promise.all(chosen.map((example) => readPassage(atlas, example.text)));
    if (wanted !== decile) return;
    const keys = head.sublayer === "cross" ? "encoder" : null;
    const draw = (example, index) => exampleElement(example, passages[index][head.stack], keys && passages[index][keys]);
    const all = () => list.replaceChildren(...chosen.map(draw));
    list.replaceChildren(...chosen.slice(0, FIRST).map(draw));
    if (chosen.length > FIRST) list.append(h("button", { type: "button", class: "plain", on: { click: all } }, say`All ${chosen.length} passages`));
  }
  const section = h("section", {},
    h("h3", {}, say`Examples`),
    h("p", { class: "quiet" }, say`Point at a token, tap it, or use the arrow keys: the keys that it looks at are shaded by their weight. Tokens in gray have no stored keys.`),
    tenths.some((decile) => decile > 0) ? h("p", { class: "quiet" }, tenth ? say`All passages are sorted by how sharply the head looks in them, and split into tenths from 1, the lowest, to 10, the top.` : say`All passages are sorted by how sharply the head looks in them, and split into ${most} parts from 1, the lowest, to ${most}, the top.`) : null,
    h("div", { class: "tabs", role: "group", "aria-label": say`Passages by how sharply the head looks` }, buttons), list);
  if (!tenths.length) return h("section", {}, h("h3", {}, say`Examples`), h("p", { class: "quiet" }, say`No passage has a query after its first token.`));
  show(tenths[0]).catch((error) => list.replaceChildren(h("p", { role: "alert" }, error.message)));
  return section;
}

function bar(label, fraction, most, text) {
  return h("li", {}, h("span", {}, label), h("span", { class: "bar", "aria-hidden": "true" }, h("i", { vars: { width: `${100 * fraction / (most || 1)}%` } })), h("span", { class: "number" }, text));
}

function distances({ earlier, later }) {
  const span = (index) => (index < 2 ? `${index}` : `${2 ** (index - 1)}–${2 ** index - 1}`);
  const last = Math.max(earlier.findLastIndex((value) => value > 0.0005), later.findLastIndex((value) => value > 0.0005));
  const most = Math.max(...earlier, ...later);
  const rows = [];
  for (let index = Math.min(last, later.length - 1); index > 0; index -= 1) rows.push(bar(say`${span(index)} after`, later[index], most, percent(later[index])));
  for (let index = 0; index <= last; index += 1) rows.push(bar(index ? say`${span(index)} before` : say`itself`, earlier[index], most, percent(earlier[index])));
  if (last < 0) return null;
  return h("section", { class: "card" }, h("h3", {}, say`How far it looks`), h("p", { class: "quiet" }, say`Share of its weight by distance in tokens.`), h("ol", { class: "bars" }, rows));
}

function tokenCard(name, about, rows, tokens) {
  if (!rows.length) return null;
  const list = h("ol", { class: "bars tokens" });
  const most = Math.max(...rows.map(([, lift]) => lift));
  const draw = (count) => list.replaceChildren(...rows.slice(0, count).map(([token, lift, number]) => {
    const text = number === null ? decimal(lift) : `× ${decimal(lift)}`;
    const item = bar("", lift, most, text);
    item.firstChild.append(h("bdi", { class: "word" }, listedToken(tokens[token])));
    if (number !== null) item.append(h("small", { class: "quiet" }, say`${counted(number)} {0|time|times}`));
    return item;
  }));
  draw(TOKENS);
  const more = h("button", { type: "button", class: "plain", on: { click: () => { draw(rows.length); more.remove(); } } }, say`All ${rows.length}`);
  return h("section", { class: "card" }, h("h3", {}, name), h("p", { class: "quiet" }, rows[0][2] === null ? say`Tokens by the sum of weights in the sampled passages.` : about), list, rows.length > TOKENS ? more : null);
}

function sharpness({ activations, mean_activation: mean }) {
  const most = Math.max(...activations, 1), total = activations.reduce((sum, count) => sum + count, 0);
  const half = percent(activations.slice(activations.length / 2).reduce((sum, count) => sum + count, 0) / (total || 1));
  const label = say`Of ${counted(total)} passages, ${half} have a weight of 50% or more.`;
  return h("section", { class: "card" },
    h("h3", {}, say`How sharply`), h("p", { class: "quiet" }, say`Its largest weight in each passage, the first token left out.`),
    h("div", { class: "histogram", role: "img", "aria-label": label }, activations.map((count) => h("i", { vars: { height: count ? `${Math.max(3, 100 * count / most)}%` : "0" } }))),
    h("p", { class: "axis quiet", "aria-hidden": "true" }, [0, 0.5, 1].map((part) => h("span", {}, percent(part)))),
    h("p", { class: "quiet" }, `${label} ${say`Mean: ${percent(mean)}.`}`));
}

function similar(head) {
  const heads = head.similar.map(([name, value]) => [atlasNow().heads.find((each) => each.name === name), value]).filter(([other]) => other);
  if (!heads.length) return null;
  const item = ([other, value]) => {
    const line = bar("", Math.max(0, value), 1, percent(value));
    line.firstChild.append(h("a", { href: addressOf(other) }, other.name), h("small", { class: "quiet" }, ` ${kindName(other.kind)}`));
    return line;
  };
  return h("section", { class: "card" }, h("h3", {}, say`Similar heads`), h("p", { class: "quiet" }, say`How alike their patterns and outputs are.`), h("ol", { class: "bars" }, heads.map(item)));
}

function measures(head) {
  const row = (measure, index) => {
    const value = valueOf(head, measure.name), error = head.errors[index];
    if (value === null) return null;
    const values = valuesOf(measure.name), low = Math.min(...values), high = Math.max(...values);
    const above = atlasNow().heads.filter((other) => (valueOf(other, measure.name) ?? -Infinity) > value).length;
    const mark = h("i", { vars: { left: `${high > low ? 100 * (value - low) / (high - low) : 50}%` } });
    return h("tr", {},
      h("th", { scope: "row", title: measure.about }, measure.title), h("td", { class: "number" }, formatted(value, measure.unit)),
      h("td", { class: "number quiet" }, error === null ? "" : `± ${formatted(error, measure.unit)}`),
      h("td", { "aria-hidden": "true" }, h("span", { class: "strip", title: say`${formatted(low, measure.unit)} to ${formatted(high, measure.unit)}` }, mark)),
      h("td", { class: "number quiet" }, high > low ? say`${above + 1} of ${atlasNow().heads.length}` : ""));
  };
  const titles = [say`Measure`, say`Value`, say`Standard error`, say`Among all heads`, say`Rank`];
  const { corpus } = atlasNow();
  const name = corpusName(corpus) || say`the corpus of this atlas`;
  const where = say`Measured on ${name}; kinds on texts made to test them. Other texts, such as one in the studio, give other values.`;
  return h("section", {}, h("h3", {}, say`All measures`), h("p", { class: "quiet" }, where), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, titles.map((name, index) => h("th", { scope: "col", class: [1, 2, 4].includes(index) ? "number" : null, "aria-hidden": index === 3 ? "true" : null }, name)))), h("tbody", {}, atlasNow().measures.map(row)))));
}
