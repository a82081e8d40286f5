// Two models beside each other: their heads as squares, and the patterns of heads that differ.

import { css, kindColor } from "./color.js";
import { h } from "./dom.js";
import { attentions, kindsOf } from "./grid.js";
import { drawPattern, unpackPattern } from "./packed.js";
import { startSorting } from "./table.js";
import { startThemes } from "./theme.js";

const data = JSON.parse(document.getElementById("data").textContent);
const GROUPS = kindsOf(data.models.flat());
const MAP_SIDE = 256;

function drawSquares() {
  data.models.forEach((heads, index) => {
    const grids = [...attentions(heads)].flatMap(([name, members]) => [name ? h("h4", {}, name) : "", gridOf(members)]);
    document.querySelector(`[data-squares="${index}"]`).replaceChildren(...grids);
  });
  const kinds = GROUPS.map((group, place) => h("span", { class: "kind" }, h("i", { vars: { background: css(kindColor(place)) } }), group));
  document.getElementById("legend").replaceChildren(...kinds, h("span", { class: "kind" }, h("i", { class: "none" }), "no kind"));
}

function gridOf(heads) {
  const wide = Math.max(...heads.map((head) => head.head)) + 1;
  const layers = [...new Set(heads.map((head) => head.layer))];
  const names = layers.map((layer, row) => h("span", { class: "axis", vars: { "grid-row": row + 1 } }, `L${layer}`));
  const squares = heads.map((head) => {
    const place = GROUPS.indexOf(head.group), label = `${head.name}: ${head.words}`;
    const vars = { "grid-row": layers.indexOf(head.layer) + 1, "grid-column": head.head + 2, background: place < 0 ? "" : css(kindColor(place)) };
    return h("i", { class: "square", role: "img", title: label, "aria-label": label, vars });
  });
  return h("div", { class: "squares", vars: { "--heads": wide } }, names, squares);
}

async function drawMaps() {
  for (const canvas of document.querySelectorAll("[data-map]")) {
    const [packed, queries, keys] = data.maps[Number(canvas.dataset.map)];
    drawPattern(canvas, await unpackPattern(packed, queries), keys, MAP_SIDE);
  }
}

function draw() {
  drawSquares();
  drawMaps();
}

startThemes(draw);
draw();
for (const table of document.querySelectorAll("table.sortable")) startSorting(table);
