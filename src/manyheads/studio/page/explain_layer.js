// The first chapter, from the heads joined to the next layer.

import { decimal, percent } from "./format.js";
import { say } from "./language.js";
import { drawTokens, drawEmbeddings } from "./explain_attention.js";
import { FIRST_ROW, largest, quoted, Scene, typical } from "./explain_parts.js";
import { visibleToken } from "./token_text.js";

const GAP = 10;

export function drawJoined(view) {
  const scene = new Scene(view);
  const { at, joined } = view;
  const heads = joined.heads[at];
  const most = largest(heads), strongest = Math.max(...joined.sizes[at]);
  const fit = Math.max(2, Math.floor(view.width / (view.em * 9)));
  const across = Math.ceil(heads.length / Math.ceil(heads.length / fit));
  const w = (view.width - (across - 1) * 8) / across;
  const block = view.em * 5.4;
  scene.label("title-heads", say`outputs of all heads for ${quoted(view, at)}`, 0, 0, view.width, { tone: "strong" });
  heads.forEach((row, head) => {
    const x = (head % across) * (w + 8), y = FIRST_ROW + Math.floor(head / across) * block;
    const own = head === view.head;
    scene.label(`head${head}`, say`head ${head}`, x, y, w, { tone: own ? "strong" : "" });
    scene.add({ key: own ? "o" : `o${head}`, kind: "strip", x, y: y + view.em * 1.6, w, h: view.row - 4, values: row, most, chosen: own, from: "o", delay: own ? 0 : 200 + head * 25, tell: (channel) => (channel === null ? say`Head ${head}: ${row.slice(0, 6).map(decimal).join(", ")} …` : say`Head ${head}, channel ${channel}: ${decimal(row[channel])}`) });
    const size = joined.sizes[at][head];
    scene.add({ key: `size${head}`, kind: "bar", x, y: y + view.em * 1.6 + view.row + 1, w: Math.max(2, (w * size) / strongest), h: view.em * 0.5, tone: own ? "" : "soft", from: `head${head}`, tell: say`Head ${head} writes a vector of length ${decimal(size)} for ${quoted(view, at)}` });
  });
  const y = FIRST_ROW + Math.ceil(heads.length / across) * block + view.em * 0.5;
  scene.add({ key: "wo", kind: "box", text: say`output matrix: ${view.inner} → ${view.width_of_model}`, x: view.width / 2 - view.em * 10, y, w: view.em * 20, h: view.em * 2.2 });
  if (view.written) {
    scene.label("title-a", say`what attention writes for ${quoted(view, at)}`, 0, y + view.em * 2.6, view.width, { tone: "strong" });
    scene.add({ key: `a${at}`, kind: "strip", x: 0, y: y + view.em * 4.4, w: view.width, h: view.row, values: view.written[at], most: typical(view.written), chosen: true, from: "o", delay: 350, tell: (channel) => (channel === null ? say`${view.written[at].slice(0, 6).map(decimal).join(", ")} … (${view.width_of_model} numbers)` : say`Channel ${channel}: ${decimal(view.written[at][channel])}`) });
  }
  scene.hint = say`Bars show how much each head writes. Point at them.`;
  return scene;
}

// Columns that add up, for all tokens: x + what was written = the new x.
function drawSum(view, columns) {
  const scene = new Scene(view);
  scene.tokens();
  const left = view.label + GAP;
  const w = (view.width - left - (columns.length - 1) * 24) / columns.length;
  columns.forEach(({ name, title, rows, from, sign }, place) => {
    const x = left + place * (w + 24);
    scene.strips(name, title, rows, { x, w, from, total: name === "f" ? view.feedforward.hidden : view.width_of_model });
    if (place) view.tokens.forEach((_, row) => scene.sign(`${name}-sign${row}`, sign, x - 24, FIRST_ROW + row * view.row, view.row - 4));
  });
  scene.hint = say`Point at a strip to read its numbers.`;
  return scene;
}

export function drawResidual(view) {
  // With two streams, what is read is not what is added to.
  const twice = view.residual === "reversible";
  const columns = [{ name: "x", title: "x", rows: view.before, from: "t" }];
  if (view.written) columns.push({ name: "a", title: view.mixer ? say`mixer` : view.attention ? say`attention` : say`constant`, rows: view.written, from: "x", sign: twice ? "→" : "+" });
  if (view.after) columns.push({ name: "y", title: view.norm.placement === "PostNorm" ? say`sum, normed` : say`sum`, rows: view.after, from: "x", sign: twice || view.norm.placement === "PostNorm" ? "→" : "=" });
  return drawSum(view, columns);
}

export function drawFeedForward(view) {
  const { feedforward } = view;
  const post = feedforward.norm.placement === "PostNorm";
  const parallel = view.residual.startsWith("parallel");
  const columns = [{ name: "y", title: parallel ? "x" : say`x after attention`, rows: parallel ? feedforward.before : view.after ?? feedforward.before, from: "t" }];
  if (feedforward.inside) columns.push({ name: "f", title: say`neurons`, rows: feedforward.inside, from: "y", sign: "→" });
  columns.push({ name: "z", title: say`feed-forward`, rows: feedforward.written, from: feedforward.inside ? "f" : "y", sign: feedforward.inside ? "→" : "+" });
  columns.push({ name: "n", title: post ? say`sum, normed` : say`new x`, rows: feedforward.after, from: "y", sign: "⇒" });
  return drawSum(view, columns);
}

export function drawNext(view) {
  const scene = new Scene(view);
  const { at, layers } = view;
  const high = Math.min(view.em * 2.4, Math.max(view.em * 1.3, (view.em * 26) / layers.length));
  const w = Math.min(view.width * 0.36, view.em * 15);
  const right = w + view.em * 3;
  layers.forEach((layer, index) => {
    const last = index === view.layer;
    const name = view.narrow ? say`layer ${index}` : layer.kind === "attention" ? say`layer ${index}: ${layer.heads} heads` : layer.kind === "mixer" ? say`layer ${index}: mixer` : say`layer ${index}: no heads`;
    scene.add({ key: `layer${index}`, kind: "box", text: name, x: 0, y: FIRST_ROW + index * (high + 3), w, h: high, size: Math.min(view.em, high * 0.62), chosen: last, act: () => view.open(index), name: say`Go to layer ${index}`, tell: say`Click to follow the text through layer ${index}` });
  });
  scene.label("title-layers", say`layers`, 0, 0, w, { tone: "strong" });
  scene.label("title-n", say`${quoted(view, at)} after layer ${view.layer}`, right, 0, view.width - right, { tone: "strong" });
  if (view.leaves) scene.add({ key: `n${at}`, kind: "strip", x: right, y: FIRST_ROW, w: view.width - right, h: view.row, values: view.leaves[at], most: typical(view.leaves), chosen: true, from: "t", tell: (channel) => (channel === null ? say`${view.leaves[at].slice(0, 6).map(decimal).join(", ")} … (${view.width_of_model} numbers)` : say`Channel ${channel}: ${decimal(view.leaves[at][channel])}`) });
  const top = view.predictions?.top ?? [];
  if (top.length) {
    const title = view.em * (view.narrow ? 3.6 : 2);
    const y = FIRST_ROW + view.row + title + view.em * 1.4;
    scene.label("title-pred", predictionTitle(view), right, y - title, view.width - right, { tone: "strong wrap", h: title });
    const name = Math.min((view.width - right) * 0.42, view.em * 11), number = view.em * 4, room = view.width - right - name - number;
    top.slice(0, 6).forEach(({ text, probability }, place) => {
      const under = y + place * view.em * 2;
      scene.label(`pl${place}`, `${visibleToken(text).trim() || "␣"}`, right, under, name - 8, { kind: "label end" });
      scene.add({ key: `p${place}`, kind: "bar", x: right + name, y: under + 4, w: Math.max(2, room * probability), h: view.em, from: `n${at}`, delay: 150 + 60 * place });
      scene.add({ key: `pn${place}`, kind: "number", text: percent(probability), x: view.width - number, y: under, w: number, h: view.em * 1.5, tell: say`${visibleToken(text)}: ${percent(probability)}` });
    });
  }
  scene.hint = say`Click a layer to follow the text through it.`;
  return scene;
}

function predictionTitle(view) {
  const { output } = view.predictions;
  if (output === "classes") return say`after the last layer: the class`;
  if (output === "next token") return say`after the last layer: what comes after ${quoted(view, view.at)}`;
  if (output === "masked token") return say`after the last layer: what stands at ${quoted(view, view.at)}`;
  return say`after the last layer: the class of ${quoted(view, view.at)}`;
}

export { drawTokens, drawEmbeddings };
