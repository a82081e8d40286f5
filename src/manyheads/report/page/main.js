// The page comes to life: theme, choice of head, tabs, and a table that sorts.

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function chooseHead(place) {
  looking.head = place;
  const head = data.heads[place];
  cells.forEach((cell, each) => cell.setAttribute("aria-pressed", each === place));
  document.getElementById("title").textContent = `${head.name} · ${head.kind}`;
  const labels = document.getElementById("labels");
  labels.replaceChildren();
  const first = head.kinds[0];
  labels.append(make("p", first ? first.evidence : "No kind fits it: it reaches no threshold."));
  const chips = make("p", "", { class: "chips" });
  for (const flag of head.flags) chips.append(make("em", flag, { class: "flag" }));
  for (const kind of head.kinds.slice(1)) chips.append(make("span", `also ${kind.name} ${decimal(kind.score)}`));
  for (const measure of data.measures.slice(0, 7)) {
    const value = measure.values[place];
    if (value !== null) chips.append(make("span", `${measure.label}: ${formatted(value, measure.unit)}`, { title: measure.about }));
  }
  labels.append(chips);
  drawLook();
}

function chooseView(view) {
  looking.view = view;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.view === view);
  for (const each of ["text", "lines", "map"]) document.getElementById(`view-${each}`).hidden = each !== view;
  drawLook();
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
    // Words begin at A, numbers with the largest.
    const order = Number.isNaN(Number(a)) ? a.localeCompare(b) : Number(b) - Number(a);
    return down ? order : -order;
  });
  table.tBodies[0].append(...rows);
}

// The head with the clearest kind is the most rewarding to open with.
function mostTelling() {
  const wanted = ["induction", "previous-token", "duplicate-token", "bracket", "sink"];
  for (const group of wanted) {
    const found = data.heads.map((head, place) => [head.kinds[0]?.score ?? 0, place, head.group]).filter((each) => each[2] === group);
    if (found.length) return found.sort((one, other) => other[0] - one[0])[0][1];
  }
  return 0;
}

buildAtlas(chooseHead);
buildLook();
colourAtlas();
patternOf(mostTelling()).then((pattern) => {
  looking.at = tellingPlace(pattern);
  chooseHead(mostTelling());
});

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  colourAtlas();
  drawLook();
});
document.getElementById("back").addEventListener("change", (event) => { looking.back = event.target.checked; drawLook(); });
for (const [name, by] of [["before", -1], ["after", 1]]) {
  document.getElementById(name).addEventListener("click", () => chooseHead((looking.head + by + data.heads.length) % data.heads.length));
}
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => chooseView(tab.dataset.view));
for (const title of document.querySelectorAll("#heads thead th")) title.addEventListener("click", () => sortTable(title));
for (const link of document.querySelectorAll("a[data-head]")) link.addEventListener("click", () => chooseHead(Number(link.dataset.head)));
// On paper there is one theme, and what is folded away cannot be opened.
let before = null;
addEventListener("beforeprint", () => { before = theme(); root.dataset.theme = "light"; document.querySelectorAll("details").forEach((each) => { each.open = true; }); colourAtlas(); drawLook(); });
addEventListener("afterprint", () => { root.dataset.theme = before; colourAtlas(); drawLook(); });
