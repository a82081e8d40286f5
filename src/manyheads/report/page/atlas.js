// The atlas: layers down, heads across, colored by kind, by a measure or by the pattern itself.

const GROUPS = [...new Set(data.heads.map((head) => head.group))].filter((group) => group !== "mixed").sort();
const cells = [];
let coloring = data.kinds ? "kind" : "pattern";

function buildAtlas(select) {
  const atlas = document.getElementById("atlas");
  const widest = Math.max(...data.heads.map((head) => head.head)) + 1;
  atlas.style.setProperty("--heads", widest);
  atlas.dataset.dense = widest > 8 ? "yes" : "no";
  atlas.append(make("span", ""));
  for (let head = 0; head < widest; head++) atlas.append(make("span", `H${head}`, { class: "axis" }));
  let layer = null;
  data.heads.forEach((head, index) => {
    if (head.layer !== layer) {
      layer = head.layer;
      atlas.append(make("span", `L${layer}`, { class: "axis", style: "grid-column: 1" }));
    }
    const cell = make("button", "", { type: "button", style: `grid-column: ${head.head + 2}` });
    cell.append(make("canvas", "", { hidden: "" }), make("small", ""));
    cell.addEventListener("click", () => select(index));
    cell.addEventListener("keydown", (event) => moveFocus(event, index));
    atlas.append(cell);
    cells.push(cell);
  });
  const menu = document.getElementById("measure");
  if (data.kinds) menu.append(make("option", "Kind", { value: "kind" }));
  menu.append(make("option", "Pattern", { value: "pattern" }));
  data.measures.forEach((measure, index) => menu.append(make("option", measure.title, { value: index })));
  menu.addEventListener("change", () => { coloring = menu.value; colorAtlas(); });
}

function moveFocus(event, index) {
  const { layer, head } = data.heads[index];
  const to = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!to) return;
  const found = data.heads.findIndex((each) => each.layer === layer + to[0] && each.head === head + to[1]);
  if (found >= 0) { cells[found].focus(); event.preventDefault(); }
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
    label.textContent = measure ? formatted(value, measure.unit) : breakable(head.kind);
    const description = [head.name, head.kind, ...head.flags, measure ? `${measure.label}: ${label.textContent}` : ""].filter(Boolean);
    cell.title = description.join(", ");
    cell.setAttribute("aria-label", cell.title);
    if (coloring === "pattern") patternOf(index).then((pattern) => drawPattern(canvas, pattern, Math.min(LENGTH, 72)));
  });
  drawLegend(measure, scale);
}

// A soft hyphen in long names.
function breakable(kind) {
  return kind.replace(/(punctu|corefer|posi)(?=ation|ence|tional)/, "$1\u00ad");
}

function drawLegend(measure, scale) {
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  document.getElementById("measured").textContent = measure ? measure.about
    : coloring === "pattern" ? "The attention pattern of each head on the text: queries down, keys across."
      : "The most specific kind of each head; heads that reach no threshold are mixed.";
  if (measure) {
    const bar = make("i", "", { class: "ramp" });
    const stops = Array.from({ length: 9 }, (_, index) => css(scale.color(scale.low + (scale.high - scale.low) * index / 8)));
    bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
    legend.append(make("span", formatted(scale.low, measure.unit)), bar, make("span", formatted(scale.high, measure.unit)));
  } else if (coloring === "kind") {
    GROUPS.forEach((group, index) => {
      const item = make("span", group, { class: "kind" });
      item.prepend(make("i", "", { style: `background:${css(kindColor(index))}` }));
      legend.append(item);
    });
  }
}

// Draw a pattern with `side` cells per side; a cell shows the largest weight in it.
function drawPattern(canvas, pattern, side) {
  canvas.width = canvas.height = side;
  const image = canvas.getContext("2d").createImageData(side, side);
  const largest = new Float32Array(side * side);
  for (let query = 0; query < LENGTH; query++) {
    const row = Math.floor(query * side / LENGTH) * side;
    for (let index = pattern.starts[query]; index < pattern.starts[query + 1]; index++) {
      const cell = row + Math.floor(pattern.keys[index] * side / LENGTH);
      largest[cell] = Math.max(largest[cell], pattern.weights[index]);
    }
  }
  largest.forEach((weight, cell) => image.data.set([...weightColor(weight), 255], 4 * cell));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
