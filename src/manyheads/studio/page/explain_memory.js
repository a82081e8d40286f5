// The second chapter: where the numbers of heads lie in memory. The third: three sentences in one batch.

import { alpha, dark, headColor } from "./color.js";
import { counted, decimal, percent } from "./format.js";
import { say } from "./language.js";
import { Scene } from "./explain_parts.js";
import { shortToken } from "./token_text.js";

// More tokens or heads would be too small to see.
const MOST_TOKENS = 10;
const MOST_HEADS = 8;

export function shapeText(shape) {
  return `[${shape.join(", ")}]`;
}

function counts(view) {
  return { tokens: Math.min(MOST_TOKENS, view.tokens.length), heads: Math.min(MOST_HEADS, view.attention.heads) };
}

function cutHint(view) {
  const { tokens, heads } = counts(view);
  if (tokens === view.tokens.length && heads === view.attention.heads) return "";
  return ` ${say`Tokens drawn: ${tokens} of ${view.tokens.length}; heads: ${heads} of ${view.attention.heads}.`}`;
}

function chosenInk(is) {
  if (!is) return "";
  return dark() ? "#10141c" : "#ffffff";
}

// One piece of memory: the numbers of one token in one head.
function piece(view, token, head, box) {
  const { stride, offset } = view.layout.views.query;
  const size = view.attention.size;
  const start = offset + token * stride[1] + head * stride[2];
  const color = headColor(head);
  return {
    key: `m${token}_${head}`, kind: "block", text: box.w > view.em * 2.6 ? `${token},${head}` : "", fill: alpha(color, head === view.head ? 0.85 : 0.38), ink: chosenInk(head === view.head), chosen: head === view.head,
    tell: say`Token ${token} ${view.short(token, 12)}, head ${head}: ${size} numbers starting at ${start}; the first is ${decimal(view.layout.first[token][head])}`, ...box,
  };
}

export function drawRow(view) {
  const scene = new Scene(view);
  const { parts, views } = view.layout;
  const { tokens, heads } = counts(view);
  const left = view.label + 10, room = view.width - left;
  const total = views.joined.shape[2];
  const names = { query: say`queries`, key: say`keys`, value: say`values` };
  let x = left;
  for (const [name, rows] of Object.entries(parts)) {
    const w = (room * rows) / total;
    scene.label(`part-${name}`, `${names[name] ?? say`gate`}: ${rows}`, x, 0, w, { tone: name === "query" ? "strong" : "" });
    for (let token = 0; token < tokens; token += 1) {
      const y = 30 + token * view.row;
      if (name === "query") {
        for (let head = 0; head < heads; head += 1) scene.add(piece(view, token, head, { x: x + (w * head) / heads, y, w: w / heads - 1, h: view.row - 5, delay: token * 15 }));
      } else {
        scene.add({ key: `part-${name}${token}`, kind: "block", x, y, w: w - 2, h: view.row - 5, fill: alpha("#8a8f99", 0.22), text: "", tell: say`Token ${token}, ${names[name] ?? say`gate`}: ${rows} numbers` });
      }
    }
    x += w;
  }
  for (let token = 0; token < tokens; token += 1) scene.add(labelOf(view, token, 30 + token * view.row));
  const y = 30 + tokens * view.row + view.em;
  scene.label("shape", say`shape ${shapeText(views.joined.shape)}, strides ${shapeText(views.joined.stride)}: ${total} numbers to the next token`, 0, y, view.width, { tone: "strong wrap" });
  scene.hint = say`Point at a piece to see where it lies.` + cutHint(view);
  return scene;
}

function labelOf(view, token, y) {
  return { key: `t${token}`, kind: "label end", text: view.short(token, 12), x: 0, y, w: view.label, h: view.row - 5 };
}

export function drawView(view) {
  const scene = new Scene(view);
  const { query } = view.layout.views;
  const { tokens, heads } = counts(view);
  const left = view.label + 10, w = Math.min((view.width - left) / heads, view.em * 7);
  for (let head = 0; head < heads; head += 1) scene.label(`mh${head}`, w > view.em * 4.4 ? say`head ${head}` : String(head), left + head * w, 0, w, { kind: "label center", tone: head === view.head ? "strong" : "" });
  for (let token = 0; token < tokens; token += 1) {
    scene.add(labelOf(view, token, 30 + token * view.row));
    for (let head = 0; head < heads; head += 1) scene.add(piece(view, token, head, { x: left + head * w, y: 30 + token * view.row, w: w - 4, h: view.row - 5, delay: head * 20 }));
  }
  strides(scene, query, 30 + tokens * view.row + view.em, [say`batch`, say`token`, say`head`, say`width`]);
  scene.hint = say`Every piece stays where it is in memory; only its index changes.` + cutHint(view);
  return scene;
}

// The axes of a tensor: their sizes, and how far to step for the next.
function strides(scene, { shape, stride }, y, names) {
  const { view } = scene;
  const w = Math.min(view.width / (names.length + 1), view.em * 11);
  scene.label("axis-size", say`size`, 0, y + view.em * 1.8, w);
  scene.label("axis-step", say`stride`, 0, y + view.em * 3.6, w);
  names.forEach((name, place) => {
    const x = (place + 1) * w;
    scene.label(`axis${place}`, name, x, y, w, { kind: "label center", tone: "strong" });
    scene.add({ key: `size${place}`, kind: "box", text: String(shape[place]), x: x + 4, y: y + view.em * 1.7, w: w - 8, h: view.em * 1.7, tell: say`${name}: ${shape[place]}` });
    scene.add({ key: `stride${place}`, kind: "box", text: String(stride[place]), x: x + 4, y: y + view.em * 3.6, w: w - 8, h: view.em * 1.7, tell: say`One step along “${name}”: ${stride[place]} numbers, ${stride[place] * view.layout.bytes} bytes` });
  });
}

export function drawByHead(view) {
  const scene = new Scene(view);
  const { copied } = view.layout.views;
  const { tokens, heads } = counts(view);
  const left = view.em * 5, w = (view.width - left) / tokens, h = Math.max(view.em * 1.8, view.row - 2);
  for (let token = 0; token < tokens; token += 1) scene.add({ ...labelOf(view, token, 0), kind: "label center", x: left + token * w, w: w - 2, h: view.em * 1.6, size: Math.min(view.em * 0.85, w * 0.3) });
  for (let head = 0; head < heads; head += 1) {
    scene.label(`mh${head}`, say`head ${head}`, 0, 30 + head * h, left - 8, { kind: "label end", h: h - 4, tone: head === view.head ? "strong" : "" });
    for (let token = 0; token < tokens; token += 1) scene.add(piece(view, token, head, { x: left + token * w, y: 30 + head * h, w: w - 3, h: h - 5, delay: head * 40 }));
  }
  strides(scene, copied, 30 + heads * h + view.em, [say`batch`, say`head`, say`token`, say`width`]);
  scene.hint = say`Each head is now one piece of ${copied.stride[1]} numbers.` + cutHint(view);
  return scene;
}

export function drawShared(view) {
  const scene = new Scene(view);
  const { attention, layout } = view;
  const groups = Math.min(MOST_HEADS, attention.key_heads), shared = attention.heads / attention.key_heads;
  const w = view.width / groups;
  const small = Math.max(4, w / shared);
  scene.label("title-shared", say`heads of queries`, 0, 0, view.width, { tone: "strong" });
  scene.label("title-key", say`heads of keys and values`, 0, view.em * 7, view.width, { tone: "strong" });
  for (let group = 0; group < groups; group += 1) {
    const x = group * w;
    const y = view.em * 9;
    const own = group === attention.key_head;
    scene.add({ key: `kv${group}`, kind: "box", text: small * shared > view.em * 3 ? `K, V ${group}` : String(group), x, y, w: w - 8, h: view.em * 2.4, chosen: own, tell: say`Keys and values ${group} serve heads ${group * shared} to ${group * shared + shared - 1}` });
    for (let member = 0; member < shared; member += 1) {
      const head = group * shared + member;
      scene.add({ key: `m0_${head}`, kind: "block", text: small > view.em * 1.6 ? String(head) : "", fill: alpha(headColor(head), head === view.head ? 0.85 : 0.38), ink: chosenInk(head === view.head), x: x + member * ((w - 8) / shared), y: view.em * 2.2, w: (w - 8) / shared - 2, h: view.em * 2.2, tell: say`Head ${head} reads keys and values ${group}` });
      const from = x + (member + 0.5) * ((w - 8) / shared);
      scene.lines.push({ d: `M ${from} ${view.em * 4.5} L ${x + (w - 8) / 2} ${view.em * 9}`, kind: head === view.head ? "after" : "" });
    }
  }
  strides(scene, layout.views.shared, view.em * 13, [say`batch`, say`token`, say`group`, say`shared`, say`width`]);
  scene.hint = say`A stride of 0 reads the same numbers again: nothing is copied.`;
  return scene;
}

// Third chapter. Each sentence has a color.
function tokenBlock(view, sentence, place, box) {
  const { batch } = view;
  const padded = place >= batch.lengths[sentence];
  const token = padded ? "" : batch.texts[sentence][place];
  return {
    key: `p${sentence}_${place}`, kind: padded ? "block pad" : "block", text: padded ? (box.w > view.em * 2.2 ? "pad" : "") : shortToken(token, Math.max(2, Math.floor(box.w / (view.em * 0.6)))), fill: padded ? "" : alpha(headColor(sentence), 0.42), delay: sentence * 60 + place * 8,
    tell: padded ? say`Padding: it is computed and thrown away` : say`Sentence ${sentence + 1}, position ${place}: ${token}, at place ${batch.offsets[sentence] + place} of the batch`, ...box,
  };
}

export function drawPadded(view) {
  const scene = new Scene(view);
  const { batch } = view;
  const longest = Math.max(...batch.lengths);
  const w = view.width / longest, high = view.em * 2.4;
  batch.lengths.forEach((length, sentence) => {
    const y = sentence * (high + view.em * 2.2);
    scene.label(`sentence${sentence}`, say`sentence ${sentence + 1}: ${length} tokens, ${longest - length} of padding`, 0, y, view.width);
    for (let place = 0; place < longest; place += 1) scene.add(tokenBlock(view, sentence, place, { x: place * w, y: y + view.em * 1.6, w: w - 3, h: high }));
  });
  scene.height += view.em * 2;
  scene.hint = say`Striped squares are padding.`;
  return scene;
}

export function drawCost(view) {
  const scene = new Scene(view);
  const { batch } = view;
  const longest = Math.max(...batch.lengths), count = batch.lengths.length;
  const side = Math.min((view.width - (count - 1) * 20) / count, view.em * 15);
  batch.lengths.forEach((length, sentence) => {
    const x = sentence * (side + 20), used = (side * length) / longest, y = view.em * 2;
    scene.label(`sentence${sentence}`, say`sentence ${sentence + 1}`, x, 0, side);
    scene.add({ key: `wasted${sentence}`, kind: "area wasted", x, y, w: side, h: side, tell: say`Padded: ${longest} × ${longest} = ${longest ** 2} scores per head`, from: `p${sentence}_0` });
    scene.add({ key: `used${sentence}`, kind: "area", x, y, w: used, h: used, fill: headColor(sentence), tell: say`Needed: ${length} × ${length} = ${length ** 2} scores per head`, from: `p${sentence}_0` });
  });
  const { cost } = batch;
  const lines = [
    [say`tokens in all`, cost.padded_tokens, cost.packed_tokens],
    [say`scores in ${batch.heads} heads`, cost.padded_scores, cost.packed_scores],
  ];
  const y = side + view.em * 4, w = view.width / 4;
  [say`padded`, say`end to end`, say`wasted`].forEach((title, place) => scene.label(`cost-title${place}`, title, (place + 1) * w, y, w, { kind: "label center" }));
  lines.forEach(([name, padded, packed], row) => {
    const under = y + view.em * (2 + row * 3);
    scene.label(`cost-name${row}`, name, 0, under, w, { tone: "strong wrap", h: view.em * 2.4 });
    const waste = percent(1 - packed / padded);
    [counted(padded), counted(packed), waste].forEach((text, place) => scene.add({ key: `cost${row}_${place}`, kind: "box", text, x: (place + 1) * w + 4, y: under, w: w - 8, h: view.em * 2.2, chosen: place === 1, tell: `${name}: ${text}` }));
  });
  scene.hint = say`Striped: scores of padding.`;
  return scene;
}

export function drawPacked(view) {
  const scene = new Scene(view);
  const { batch } = view;
  const total = batch.offsets.at(-1);
  const lines = Math.ceil((total * view.em * 3.2) / view.width);
  const across = Math.ceil(total / lines), w = view.width / across, high = view.em * 2.4, step = view.em * 6.4;
  let index = 0;
  batch.lengths.forEach((length, sentence) => {
    for (let place = 0; place < length; place += 1, index += 1) {
      const x = (index % across) * w, y = Math.floor(index / across) * step + view.em * 1.8;
      scene.add(tokenBlock(view, sentence, place, { x, y, w: w - 3, h: high }));
      scene.label(`pos${index}`, String(place), x, y + high + 2, w - 3, { kind: "label center", from: `p${sentence}_${place}`, size: view.em * 0.8 });
      if (place === 0) scene.label(`start${sentence}`, `↓ ${batch.offsets[sentence]}`, x, y - view.em * 1.7, view.em * 5, { tone: "strong", from: `sentence${sentence}` });
    }
  });
  const y = lines * step + view.em;
  scene.label("offsets", say`cumulative lengths: ${shapeText(batch.offsets)}`, 0, y, view.width, { tone: "strong wrap" });
  scene.label("offsets-more", say`Below each token is its position in its own sentence: it begins at 0 each time.`, 0, y + view.em * 2, view.width, { tone: "wrap", h: view.em * 3 });
  scene.hint = say`Arrows: where each sentence begins.`;
  return scene;
}

export function drawBlockMask(view) {
  const scene = new Scene(view);
  const { batch } = view;
  const total = batch.offsets.at(-1);
  const side = Math.min(view.width, view.em * 34), step = side / total;
  scene.add({ key: "mask", kind: "outline", x: 0, y: 0, w: side, h: side });
  batch.lengths.forEach((length, sentence) => {
    const first = batch.offsets[sentence] * step;
    for (let query = 0; query < length; query += 1) {
      const seen = batch.visible[sentence][query];
      scene.add({
        key: `p${sentence}_${query}`, kind: "area", x: first, y: first + query * step, w: length * step, h: step - 1, fill: cells(seen, step, alpha(headColor(sentence), 0.8)),
        tell: say`Sentence ${sentence + 1}, ${shortToken(batch.texts[sentence][query], 14)}: sees ${seen.reduce((sum, one) => sum + one, 0)} of the ${total} tokens in the batch`,
      });
    }
    const x = side + view.em;
    if (view.width - side > view.em * 12) scene.label(`sentence${sentence}`, say`sentence ${sentence + 1}`, x, first, view.em * 10);
  });
  scene.hint = say`Rows are queries, columns are keys.`;
  return scene;
}

// One row of the mask: a square where the key is visible.
function cells(seen, step, color) {
  const stops = seen.map((is, key) => `${is ? color : "transparent"} ${key * step}px ${(key + 1) * step - 1}px, transparent ${(key + 1) * step - 1}px ${(key + 1) * step}px`);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}
