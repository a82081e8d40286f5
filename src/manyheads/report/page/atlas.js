// The atlas: layers down, heads across, colored by kind, by a measure or by the pattern itself.

import { css, inkOn, kindColor } from "./color.js";
import { h } from "./dom.js";
import { formatted } from "./format.js";
import { attentions, kindsOf, rampOf, stepOf } from "./grid.js";
import { kindName } from "./head_words.js";
import { say, translate, translateFilled } from "./language.js";
import { drawPattern } from "./packed.js";
import { scaleOf } from "./scale.js";

const GROUPS = kindsOf(data.heads);
const MAP_NAMES = { encoder: say`Encoder: self-attention`, decoder: say`Decoder: self-attention`, "decoder cross": say`Decoder: cross-attention to the encoder` };
const SMALL_MAP = 72;
const cells = [];
let coloring = data.kinds ? "kind" : "pattern";

function buildAtlas(select) {
  const atlas = document.getElementById("atlas");
  const widest = Math.max(...data.heads.map((head) => head.head)) + 1;
  atlas.style.setProperty("--heads", widest);
  atlas.dataset.dense = widest > 8 ? "yes" : "no";
  for (const [name, heads] of attentions(data.heads)) {
    if (name) atlas.append(h("h4", { class: "map-name" }, MAP_NAMES[name] ?? name));
    atlas.append(h("span"), ...Array.from({ length: widest }, (_, head) => h("span", { class: "axis" }, `H${head}`)));
    let layer = null;
    for (const head of heads) {
      if (head.layer !== layer) atlas.append(h("span", { class: "axis layer" }, `L${layer = head.layer}`));
      const index = data.heads.indexOf(head);
      const on = { click: () => select(index), keydown: (event) => moveFocus(event, index) };
      const cell = h("button", { type: "button", vars: { "grid-column": head.head + 2 }, on }, h("canvas", { hidden: true }), h("small"));
      cells[index] = cell;
      atlas.append(cell);
    }
  }
  const options = [...(data.kinds ? [["kind", say`Kind`]] : []), ["pattern", say`Pattern`], ...data.measures.map((measure, index) => [index, measure.title])];
  const menu = document.getElementById("measure");
  menu.append(...options.map(([value, label]) => h("option", { value }, label)));
  menu.addEventListener("change", () => { coloring = menu.value; colorAtlas(); });
}

function moveFocus(event, index) {
  const step = stepOf(event), { stack, sublayer, layer, head } = data.heads[index];
  if (!step) return;
  const next = data.heads.findIndex((each) => each.stack === stack && each.sublayer === sublayer && each.layer === layer + step[0] && each.head === head + step[1]);
  if (next >= 0) { cells[next].focus(); event.preventDefault(); }
}

function colorAtlas() {
  const measure = data.measures[Number(coloring)];
  const scale = measure ? scaleOf(measure.values, measure.unit) : null;
  cells.forEach((cell, index) => {
    const head = data.heads[index];
    const [canvas, label] = cell.children;
    const value = measure ? measure.values[index] : null;
    let color = null;
    if (measure && value !== null) color = scale.color(value);
    if (coloring === "kind" && head.group !== "mixed") color = kindColor(GROUPS.indexOf(head.group));
    cell.style.background = color ? css(color) : "";
    cell.style.color = color ? inkOn(color) : "";
    canvas.hidden = coloring !== "pattern";
    label.hidden = coloring === "pattern";
    label.textContent = measure ? formatted(value, measure.unit) : breakable(translateFilled(head.kind, true));
    const description = [head.name, data.kinds ? translateFilled(head.words, true) : "", ...head.flags.map(translate), measure ? `${measure.label}: ${label.textContent}` : ""].filter(Boolean);
    cell.title = description.join(", ");
    cell.setAttribute("aria-label", cell.title);
    if (coloring === "pattern") patternOf(index).then((pattern) => drawPattern(canvas, pattern, keysOf(index).length, SMALL_MAP));
  });
  drawLegend(measure, scale);
}

// A soft hyphen in long names.
function breakable(kind) {
  return kind.replace(/(punctu|corefer|posi|пунк|корефе|предло|индук|аббреви|преды)(?=ation|ence|tional|туация|ренция|жения|ционная|атура|дущий)/, "$1\u00ad");
}

function drawLegend(measure, scale) {
  document.getElementById("measured").textContent = measure ? measure.about
    : coloring === "pattern" ? say`The attention pattern of each head on the text: queries down, keys across.`
      : say`The most specific kind of each head; without color, the kind that it comes nearest to.`;
  const kinds = GROUPS.map((group, index) => h("span", { class: "kind" }, h("i", { vars: { background: css(kindColor(index)) } }), kindName(group)));
  document.getElementById("legend").replaceChildren(...(measure ? rampOf(scale, measure.unit) : coloring === "kind" ? kinds : []));
}
