// A small grid of all heads: layers down, heads across. Arrow keys move in it.

import { h } from "./dom.js";
import { addressOf } from "./address.js";
import { attentions, stepOf } from "./grid.js";
import { kindName } from "./head_words.js";
import { say, translate } from "./language.js";
import { atlasNow, background, coloring, filteredHeads } from "./state.js";

// The link of each head of the atlas that is drawn.
const cells = new Map();
let drawnAtlas = null;

export function drawNavigator(place, current) {
  const { heads } = atlasNow();
  if (drawnAtlas !== atlasNow()) build(place, heads);
  const [colors, passing] = [coloring(), new Set(filteredHeads())];
  const entry = current ?? heads.find((head) => passing.has(head)) ?? heads[0];
  for (const [head, link] of cells) {
    link.style.background = background(colors.of(head));
    link.classList.toggle("out", !passing.has(head));
    link.tabIndex = head === entry ? 0 : -1;
    if (head === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function build(place, heads) {
  drawnAtlas = atlasNow();
  cells.clear();
  place.replaceChildren(...[...attentions(heads)].flatMap(([name, members]) => [name ? h("h3", {}, translate(name)) : null, grid(members)]).filter(Boolean));
}

function grid(heads) {
  const [wide, tall] = [Math.max(...heads.map((head) => head.head)) + 1, Math.max(...heads.map((head) => head.layer)) + 1];
  const items = [h("span", {})];
  for (let head = 0; head < wide; head += 1) items.push(h("span", { class: "axis", "aria-hidden": "true" }, head % Math.ceil(wide / 10) ? "" : `${head}`));
  for (let layer = 0; layer < tall; layer += 1) {
    items.push(h("span", { class: "axis", "aria-hidden": "true", vars: { "grid-row": layer + 2 } }, layer % Math.ceil(tall / 40) ? "" : `L${layer}`));
  }
  return h("div", { class: wide > 14 ? "grid dense" : "grid", role: "group", "aria-label": say`All heads: layers down, heads across`, vars: { "--heads": wide }, on: { keydown: move } }, items, heads.map(cell));
}

function cell(head) {
  const label = `${head.name}${head.kind ? `, ${kindName(head.kind)}` : ""}`;
  const link = h("a", {
    href: addressOf(head), "aria-label": label, title: label, class: "cell", "data-layer": head.layer, "data-head": head.head,
    vars: { "grid-row": head.layer + 2, "grid-column": head.head + 2 },
  });
  cells.set(head, link);
  return link;
}

function move(event) {
  const by = stepOf(event);
  const { layer, head } = event.target.dataset;
  if (!by || layer === undefined) return;
  event.preventDefault();
  const next = event.currentTarget.querySelector(`[data-layer="${Number(layer) + by[0]}"][data-head="${Number(head) + by[1]}"]`);
  if (!next) return;
  for (const link of event.currentTarget.querySelectorAll(".cell")) link.tabIndex = link === next ? 0 : -1;
  next.focus();
}
