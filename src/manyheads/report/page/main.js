// Start the page: theme, selection of a head, tabs, and sortable tables.

import { dark } from "./color.js";
import { h } from "./dom.js";
import { decimal, formatted } from "./format.js";
import { kindName, sampleOf } from "./head_words.js";
import { say, startLanguages, translate, translateFilled } from "./language.js";
import { startSorting } from "./table.js";
import { startThemes } from "./theme.js";

function selectHead(index) {
  view.head = index;
  const head = data.heads[index];
  cells.forEach((cell, place) => cell.setAttribute("aria-pressed", place === index));
  document.getElementById("title").textContent = data.kinds ? `${head.name} · ${translateFilled(head.words, true)}` : head.name;
  const chips = head.flags.map((flag) => h("em", { class: "flag" }, translate(flag)));
  for (const kind of head.kinds) {
    const [low, high] = kind.interval;
    const range = low === null ? "" : `, ${say`95% interval ${decimal(low)} to ${decimal(high)}`}`;
    chips.push(h("span", { title: `${say`threshold ${decimal(kind.threshold)}`}${range}` }, `${kindName(kind.name)} ${decimal(kind.score)} (${sampleOf(kind)})`));
  }
  for (const measure of data.measures.slice(0, 7)) {
    const value = measure.values[index];
    if (value !== null) chips.push(h("span", { title: measure.about }, `${measure.label}: ${formatted(value, measure.unit)}`));
  }
  document.getElementById("labels").replaceChildren(h("p", { class: "evidence", lang: "en" }, head.why), h("p", { class: "chips" }, chips));
  drawHead();
}

function selectTab(name) {
  view.tab = name;
  for (const tab of document.querySelectorAll("#tabs [role=tab]")) tab.setAttribute("aria-selected", tab.dataset.view === name);
  for (const part of ["text", "lines", "map"]) document.getElementById(`view-${part}`).hidden = part !== name;
  drawHead();
}

function redraw() {
  colorAtlas();
  drawHead();
  document.dispatchEvent(new Event("recolor"));
}

if (document.getElementById("language")) startLanguages(document.getElementById("language"));
startThemes(redraw);
buildAtlas(selectHead);
buildHeadView();
colorAtlas();
patternOf(data.start).then((pattern) => {
  view.at = clearestQuery(pattern);
  selectHead(data.start);
});

document.getElementById("incoming").addEventListener("change", (event) => { view.incoming = event.target.checked; drawHead(); });
for (const [name, by] of [["before", -1], ["after", 1]]) {
  document.getElementById(name).addEventListener("click", () => selectHead((view.head + by + data.heads.length) % data.heads.length));
}
for (const tab of document.querySelectorAll("#tabs [role=tab]")) tab.addEventListener("click", () => selectTab(tab.dataset.view));
for (const table of document.querySelectorAll("table.sortable")) startSorting(table);
for (const link of document.querySelectorAll("a[data-head]")) link.addEventListener("click", () => selectHead(Number(link.dataset.head)));
// Print in the light theme with all details open.
let printedDark = false;
addEventListener("beforeprint", () => {
  printedDark = dark();
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  redraw();
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = printedDark ? "dark" : "light";
  redraw();
});
