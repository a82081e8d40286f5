// The first chapter, up to the mix of values: drawings of one head at work, with the numbers of the model.

import { s } from "./dom.js";
import { percent, decimal } from "./format.js";
import { say } from "./language.js";
import { bars, FIRST_ROW, largest, matrix, pairWords, quoted, scoreCell, Scene, softmaxRows, sumOf, tokenPart, typical, weightCell } from "./explain_parts.js";

const GAP = 10;

export function drawTokens(view) {
  const scene = new Scene(view);
  const size = view.em * 1.25, high = size * 2.1;
  const side = Math.min(110, (view.width - 10) / 5);
  let x = 0, y = view.em * 2;
  view.tokens.forEach((_, place) => {
    const image = view.picture?.(place);
    const w = image ? side : Math.min(view.width, Math.max(size * 2.2, view.short(place, 14).length * size * 0.64 + 22));
    const h = image ? side : high;
    // The class token has a line of its own before the rows of patches.
    const breaks = image ? image.column === 0 : x + w > view.width;
    if (breaks && x > 0) [x, y] = [0, y + (image && view.picture(place - 1) ? side + 4 : high + view.em * 2.6)];
    scene.add({ ...tokenPart(view, place, { x, y, w, h, size }), kind: image ? "chip patch" : "chip center", delay: place * 25 });
    if (view.ids) scene.label(`id${place}`, String(view.ids[place]), x, y + h + 3, w, { kind: "label center", from: `t${place}`, delay: place * 25, tone: "number" });
    x += w + (image ? 4 : GAP);
  });
  scene.height = Math.max(scene.height, 260);
  scene.hint = say`Point at a token, or click one to make it the query.`;
  return scene;
}

export function drawEmbeddings(view) {
  const scene = new Scene(view);
  const { token, place, x: sum } = view.embedding;
  scene.tokens();
  const left = view.label + GAP, room = view.width - left;
  const total = view.width_of_model;
  if (token && place) {
    const w = (room - 48) / 3;
    scene.strips("e", say`token`, token, { x: left, w, from: "t", total });
    scene.strips("p", say`position`, place, { x: left + w + 24, w, from: "t", total });
    scene.strips("x", say`together: x`, sum, { x: left + 2 * (w + 24), w, from: "e", total });
    view.tokens.forEach((_, row) => {
      scene.sign(`plus${row}`, "+", left + w, FIRST_ROW + row * view.row, view.row - 4);
      scene.sign(`is${row}`, view.embedding.norm ? "→" : "=", left + 2 * w + 24, FIRST_ROW + row * view.row, view.row - 4);
    });
  } else {
    scene.strips("x", say`the vector x of each token`, sum, { x: left, w: room, from: "t", total });
  }
  scene.hint = say`Point at a strip to read its numbers.`;
  return scene;
}

export function drawHeads(view, turned = false) {
  const scene = new Scene(view);
  const { attention } = view;
  scene.tokens();
  const left = view.label + GAP, room = view.width - left;
  const stream = view.normed ?? view.before;
  const narrow = stream && !turned ? room * 0.2 : 0;
  const dial = turned && !view.narrow ? Math.min(room * 0.34, 280) : 0;
  const count = turned ? 2 : 3;
  const w = (room - narrow - (narrow ? 26 : 0) - dial - (count - 1) * 14) / count;
  if (narrow) {
    scene.strips("x", ["PreNorm", "SandwichNorm", "ScaledPreNorm"].includes(view.norm.placement) ? say`x, normed` : "x", stream, { x: left, w: narrow, total: view.width_of_model });
    view.tokens.forEach((_, row) => scene.sign(`to${row}`, "→", left + narrow + 1, FIRST_ROW + row * view.row, view.row - 4));
  }
  const before = attention.plain_query && !turned;
  const columns = [
    ["q", say`query`, before ? attention.plain_query : attention.query],
    ["k", say`key`, before ? attention.plain_key : attention.key],
    ["v", say`value`, attention.value],
  ];
  columns.slice(0, count).forEach(([name, title, rows], place) => {
    scene.strips(name, title, rows, { x: left + narrow + (narrow ? 26 : 0) + place * (w + 14), w, from: "x", most: typical(name === "v" ? rows : attention.query.concat(attention.key)), total: rows[0].length });
  });
  if (turned && view.narrow) dials(scene, view, 0, view.width, scene.height + view.em, 3);
  else if (turned) dials(scene, view, view.width - dial + 16, dial - 16, FIRST_ROW, 2);
  scene.hint = turned ? say`Dashed: a pair of channels of the query before its rotation. Blue: after it.` : say`Point at a strip to read its numbers.`;
  return scene;
}

// Pairs of channels of the chosen query as arrows, before and after they are turned.
function dials(scene, view, x, w, y, across) {
  const { attention, at } = view;
  const { position } = attention;
  const half = position.rotated / 2;
  const side = Math.min(w / across - 14, view.em * 7);
  position.angles[at].forEach((_, pair) => {
    const pick = (row) => [row[pair], row[pair + half]];
    const [was, is] = [pick(attention.plain_query[at]), pick(attention.query[at])];
    const size = Math.hypot(...is) || 1;
    const arrow = ([a, b], kind) => s("line", { class: kind, x1: 0, y1: 0, x2: ((a / size) * 40).toFixed(2), y2: ((-b / size) * 40).toFixed(2) });
    const content = s("svg", { viewBox: "-50 -50 100 100", width: "100%", height: "100%", "aria-hidden": "true" }, s("circle", { r: 45 }), arrow(was, "was"), arrow(is, "is"));
    const angle = decimal(at * position.frequencies[pair]);
    const top = y + Math.floor(pair / across) * (side + view.em * 2);
    const left = x + (pair % across) * (side + 14);
    scene.add({ key: `dial${pair}`, kind: "dial", x: left, y: top, w: side, h: side, content, from: `q${at}`, tell: say`Channels ${pair} and ${pair + half}: position ${at} × ${decimal(position.frequencies[pair])} = ${angle} radians` });
    scene.label(`dial-label${pair}`, say`${angle} rad`, left, top + side, side, { kind: "label center" });
  });
}

export function drawOneQuery(view) {
  const scene = new Scene(view);
  const { attention, at } = view;
  const left = view.label + GAP;
  const strip = (view.width - left) * (view.narrow ? 0.36 : 0.42);
  const top = FIRST_ROW + view.row + view.em * 1.6;
  const most = typical(attention.query.concat(attention.key));
  scene.label("title-q", say`query of ${quoted(view, at)}`, left, 0, view.width - left, { tone: "strong" });
  scene.strips("q", say`query of ${quoted(view, at)}`, attention.query, { x: left, w: strip, top: FIRST_ROW - at * view.row, most, only: at, tell: say`query`, total: attention.size });
  scene.parts = scene.parts.filter((part, place) => part.key !== "title-q" || place === 0);
  scene.tokens({ top });
  scene.label("title-k", say`keys`, left, top - view.em * 1.7, strip);
  scene.label("title-b", "q · k", left + strip + GAP, top - view.em * 1.7, 90);
  const keys = attention.key;
  const titled = new Scene(view);
  titled.strips("k", say`key`, keys, { x: left, w: strip, top, most, total: attention.size });
  for (const part of titled.parts) if (part.kind === "strip") scene.add({ ...part, chosen: false });
  const row = attention.products[at];
  const products = (key) => attention.query[at].slice(0, 3).map((value, channel) => `${decimal(value)} × ${decimal(keys[key][channel])}`).join(" + ");
  bars(scene, row, {
    x: left + strip + GAP, y: top, w: view.width - left - strip - GAP, step: view.row, most: largest([row]), text: (value) => decimal(value), labels: false,
    tell: (key) => say`${quoted(view, at)} · ${quoted(view, key)} = ${products(key)} + … = ${decimal(row[key])}`,
  });
  scene.hint = say`Point at a sum to see its first products.`;
  return scene;
}

// The matrix, with the chosen row as bars beside it, or below it on a narrow page.
function drawPairs(view, cell, row, from) {
  const scene = new Scene(view);
  const beside = view.width > 620;
  const count = view.tokens.length;
  const room = beside ? view.width * 0.62 : view.width;
  const side = Math.min(room - view.label, count * view.em * 2.6);
  const top = matrix(scene, { x: 0, y: 0, side, cell, from });
  const title = say`from ${quoted(view, view.at)}`;
  if (beside) {
    const x = view.label + side + view.em * 2;
    scene.label("title-b", title, x, view.em * 2.6, view.width - x, { tone: "strong" });
    bars(scene, row.values, { x, y: top, w: view.width - x, step: side / count, ...row });
  } else {
    const y = top + side + view.em * 2.4;
    scene.label("title-b", title, 0, y - view.em * 1.8, view.width, { tone: "strong" });
    bars(scene, row.values, { x: 0, y, w: view.width, step: Math.max(20, view.row * 0.8), ...row });
  }
  scene.hint = say`Point at a cell to read its number, or click a token on the left to follow its row.`;
  return scene;
}

export function drawProducts(view) {
  const { products } = view.attention;
  const most = largest(products);
  const tell = (query, key) => say`Product ${pairWords(view, query, key)}: ${decimal(products[query][key])}`;
  return drawPairs(view, (query, key) => scoreCell(products[query][key], most, tell(query, key)), {
    values: products[view.at], most: largest([products[view.at]]), text: (value) => decimal(value), tell: (key) => tell(view.at, key),
  }, (query, key) => (query === view.at ? `bn${key}` : `t${query}`));
}

// The same scale of colors as for the products, so that one sees them shrink.
export function drawScaled(view) {
  const { products, scores, bias, softcap, scale } = view.attention;
  const most = largest(products);
  const scaled = scores.map((row, query) => row.map((score, key) => score - (bias?.[query][key] ?? 0)));
  const tell = (query, key) => {
    const words = pairWords(view, query, key);
    if (softcap) return say`Score ${words}: ${softcap} · tanh(${decimal(products[query][key] * scale)} / ${softcap}) = ${decimal(scaled[query][key])}`;
    return say`Score ${words}: ${decimal(products[query][key])} × ${decimal(scale)} = ${decimal(scaled[query][key])}`;
  };
  return drawPairs(view, (query, key) => scoreCell(scaled[query][key], most, tell(query, key)), {
    values: scaled[view.at], most: largest([products[view.at]]), text: (value) => decimal(value), tell: (key) => tell(view.at, key),
  });
}

export function drawBias(view) {
  const { scores, bias } = view.attention;
  const most = largest(scores);
  const tell = (query, key) => say`Score ${pairWords(view, query, key)}: ${decimal(scores[query][key] - bias[query][key])} + ${decimal(bias[query][key])} = ${decimal(scores[query][key])}`;
  return drawPairs(view, (query, key) => scoreCell(scores[query][key], most, tell(query, key)), {
    values: scores[view.at], most: largest([scores[view.at]]), text: (value) => decimal(value), tell: (key) => tell(view.at, key),
  });
}

export function drawMask(view) {
  const { scores, visible } = view.attention;
  const seen = scores.map((row, query) => row.filter((_, key) => visible[query][key]));
  const most = largest(seen);
  const tell = (query, key) => (visible[query][key] ? say`Score ${pairWords(view, query, key)}: ${decimal(scores[query][key])}` : say`Hidden ${pairWords(view, query, key)}: the score becomes −∞`);
  return drawPairs(view, (query, key) => (visible[query][key] ? scoreCell(scores[query][key], most, tell(query, key)) : { hollow: true, text: "", tell: tell(query, key) }), {
    values: scores[view.at], most: largest([seen[view.at]]), text: (value) => decimal(value), hidden: (key) => !visible[view.at][key], tell: (key) => tell(view.at, key),
  });
}

export function weightsOf(view) {
  return view.attention.has_scores ? softmaxRows(view.attention, view.temperature) : view.attention.weights;
}

export function drawSoftmax(view) {
  const { scores, visible } = view.attention;
  const weights = weightsOf(view);
  const cell = (query, key) => (visible[query][key] ? weightCell(weights[query][key], pairWords(view, query, key)) : { hollow: true, text: "", tell: say`Hidden ${pairWords(view, query, key)}: weight 0` });
  const tell = (key) => say`Weight ${pairWords(view, view.at, key)}: e^${decimal(scores[view.at][key] / view.temperature)} over the sum of the row = ${percent(weights[view.at][key])}`;
  const scene = drawPairs(view, cell, { values: weights[view.at], most: Math.max(...weights[view.at]), text: (value, key) => (visible[view.at][key] ? percent(value) : "0"), tell });
  scene.hint = say`The weights of a row sum to ${percent(sumOf(weights[view.at]))}.`;
  return scene;
}

// Weights that are no softmax: those of a mixer, which may be negative.
export function drawMixer(view) {
  const { weights } = view.mixer;
  const most = largest(weights);
  const tell = (query, key) => say`Weight ${pairWords(view, query, key)}: ${decimal(weights[query][key])}`;
  return drawPairs(view, (query, key) => scoreCell(weights[query][key], most, tell(query, key)), {
    values: weights[view.at], most: largest([weights[view.at]]), text: (value) => decimal(value), tell: (key) => tell(view.at, key),
  });
}

export function mixOf(view, weights) {
  const { value } = view.attention;
  return value[0].map((_, channel) => sumOf(weights.map((weight, key) => weight * value[key][channel])));
}

export function drawMix(view) {
  const scene = new Scene(view);
  const { attention, at } = view;
  const weights = weightsOf(view)[at];
  const left = view.label + GAP, cell = view.em * 4;
  const x = left + cell + 46;
  const w = view.width - x;
  const top = Math.max(...weights);
  scene.tokens({ more: (token) => ({ opacity: token === at ? 1 : 0.4 + 0.6 * Math.min(1, weights[token] / top) }) });
  scene.label("title-w", say`weight`, left, 0, cell + 20);
  weights.forEach((weight, key) => {
    const look = weightCell(weight, pairWords(view, at, key));
    scene.add({ key: `s${at}_${key}`, kind: "number", text: percent(weight), x: left, y: FIRST_ROW + key * view.row, w: cell, h: view.row - 4, tell: look.tell });
    scene.sign(`times${key}`, "×", left + cell + 2, FIRST_ROW + key * view.row, view.row - 4);
  });
  scene.strips("v", say`value`, attention.value, { x, w, from: "t", faded: (token) => 0.12 + 0.88 * Math.sqrt(weights[token] / top), total: attention.size });
  for (const part of scene.parts) if (part.kind === "strip") part.chosen = false;
  const mixed = mixOf(view, weights);
  const y = FIRST_ROW + view.tokens.length * view.row + view.em;
  const rows = [["o", say`sum`, mixed]];
  const gate = attention.gates.find((each) => each.at === "output");
  if (gate) rows.push(["g", gate.operation === "multiply" ? say`× gate` : say`+ gate`, spread(gate.values[at], mixed.length)], ["og", say`output`, attention.output[at]]);
  rows.forEach(([name, title, row], place) => {
    const under = y + place * (view.row + 4);
    scene.label(`sum-${name}`, title, left - view.em * 2, under, x - left + view.em * 2 - 32, { kind: "label end", tone: "strong" });
    scene.add({ key: name, kind: "strip", x, y: under, w, h: view.row - 2, values: row.slice(0, view.channels), most: name === "g" ? 1 : largest([mixed]), chosen: place === rows.length - 1, from: name === "o" ? `v${weights.indexOf(top)}` : "o", delay: 300 + 150 * place, tell: (channel) => sumWords(view, weights, name, title, row, channel) });
  });
  scene.lines = weights.map((weight, key) => ({ weight, key })).filter(({ weight }) => weight > 0.03).map(({ key }) => {
    const from = FIRST_ROW + key * view.row + view.row / 2 - 3;
    return { d: `M ${x - 4} ${from} C ${x - 24} ${from}, ${x - 24} ${y + view.row / 2}, ${x - 4} ${y + view.row / 2}`, kind: key === weights.indexOf(top) ? "after" : "" };
  });
  scene.hint = say`Point at the sum to see how a channel is added up.`;
  return scene;
}

function spread(values, count) {
  return values.length === 1 ? Array(count).fill(values[0]) : values;
}

function sumWords(view, weights, name, title, row, channel) {
  if (name !== "o" || channel === null) return say`${title} of ${quoted(view, view.at)}: ${row.slice(0, 6).map(decimal).join(", ")} …`;
  const best = weights.map((weight, key) => [weight, key]).sort((one, other) => other[0] - one[0]).slice(0, 3);
  const terms = best.map(([weight, key]) => `${percent(weight)} × ${decimal(view.attention.value[key][channel])}`).join(" + ");
  return say`Channel ${channel}: ${terms} + … = ${decimal(row[channel])}`;
}
