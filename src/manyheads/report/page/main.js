// Start the page: theme, selection of a head, tabs, and sortable table.

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function selectHead(index) {
  view.head = index;
  const head = data.heads[index];
  cells.forEach((cell, each) => cell.setAttribute("aria-pressed", each === index));
  const near = head.nearest ? `, nearest ${head.nearest.name} ${decimal(head.nearest.score)}${head.nearest.lacks && `: ${head.nearest.lacks}`}` : "";
  document.getElementById("title").textContent = data.kinds ? `${head.name} · ${head.kind}${near}` : head.name;
  const labels = document.getElementById("labels");
  labels.replaceChildren();
  labels.append(make("p", head.why));
  const chips = make("p", "", { class: "chips" });
  for (const flag of head.flags) chips.append(make("em", flag, { class: "flag" }));
  for (const kind of head.kinds) {
    const [low, high] = kind.interval;
    const range = low === null ? "" : `, 95% interval ${decimal(low)} to ${decimal(high)}`;
    chips.append(make("span", `${kind.name} ${decimal(kind.score)} (${kind.sample})`, { title: `threshold ${decimal(kind.threshold)}${range}` }));
  }
  for (const measure of data.measures.slice(0, 7)) {
    const value = measure.values[index];
    if (value !== null) chips.append(make("span", `${measure.label}: ${formatted(value, measure.unit)}`, { title: measure.about }));
  }
  labels.append(chips);
  drawHead();
}

function selectTab(name) {
  view.tab = name;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.view === name);
  for (const each of ["text", "lines", "map"]) document.getElementById(`view-${each}`).hidden = each !== name;
  drawHead();
}

function sortTable(title) {
  const table = document.getElementById("heads");
  const titles = [...table.tHead.rows[0].cells];
  const column = titles.indexOf(title);
  const down = title.getAttribute("aria-sort") !== "descending";
  titles.forEach((each) => each.setAttribute("aria-sort", each === title ? (down ? "descending" : "ascending") : "none"));
  const rows = [...table.tBodies[0].rows];
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    // Text ascending from A, numbers descending.
    const order = Number.isNaN(Number(a)) ? a.localeCompare(b) : Number(b) - Number(a);
    return down ? order : -order;
  });
  table.tBodies[0].append(...rows);
}

// The page opens on the head with the clearest kind.
function clearestHead() {
  const wanted = ["induction", "previous-token", "duplicate-token", "bracket", "sink"];
  for (const group of wanted) {
    const found = data.heads.map((head, index) => [head.kinds[0]?.score ?? 0, index, head.group]).filter((each) => each[2] === group);
    if (found.length) return found.sort((one, other) => other[0] - one[0])[0][1];
  }
  return 0;
}

buildAtlas(selectHead);
buildHeadView();
colorAtlas();
patternOf(clearestHead()).then((pattern) => {
  view.at = clearestQuery(pattern);
  selectHead(clearestHead());
});

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  colorAtlas();
  drawHead();
});
document.getElementById("incoming").addEventListener("change", (event) => { view.incoming = event.target.checked; drawHead(); });
for (const [name, by] of [["before", -1], ["after", 1]]) {
  document.getElementById(name).addEventListener("click", () => selectHead((view.head + by + data.heads.length) % data.heads.length));
}
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => selectTab(tab.dataset.view));
for (const title of document.querySelectorAll("#heads thead th")) title.addEventListener("click", () => sortTable(title));
for (const link of document.querySelectorAll("a[data-head]")) link.addEventListener("click", () => selectHead(Number(link.dataset.head)));
// Print in the light theme with all details open.
let printedTheme = null;
addEventListener("beforeprint", () => { printedTheme = theme(); root.dataset.theme = "light"; document.querySelectorAll("details").forEach((each) => { each.open = true; }); colorAtlas(); drawHead(); });
addEventListener("afterprint", () => { root.dataset.theme = printedTheme; colorAtlas(); drawHead(); });
