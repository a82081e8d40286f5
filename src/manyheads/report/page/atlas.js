// The atlas: layers down, heads across, coloured by kind, by a measure or by the pattern itself.

const GROUPS = [...new Set(data.heads.map((head) => head.group))].filter((group) => group !== "mixed").sort();
const cells = [];
let colouring = "kind";

function buildAtlas(choose) {
  const atlas = document.getElementById("atlas");
  const widest = Math.max(...data.heads.map((head) => head.head)) + 1;
  atlas.style.setProperty("--heads", widest);
  atlas.dataset.dense = widest > 8 ? "yes" : "no";
  atlas.append(make("span", ""));
  for (let head = 0; head < widest; head++) atlas.append(make("span", `H${head}`, { class: "axis" }));
  let layer = null;
  data.heads.forEach((head, place) => {
    if (head.layer !== layer) {
      layer = head.layer;
      atlas.append(make("span", `L${layer}`, { class: "axis", style: "grid-column: 1" }));
    }
    const cell = make("button", "", { type: "button", style: `grid-column: ${head.head + 2}` });
    cell.append(make("canvas", "", { hidden: "" }), make("small", ""));
    cell.addEventListener("click", () => choose(place));
    cell.addEventListener("keydown", (event) => walk(event, place));
    atlas.append(cell);
    cells.push(cell);
  });
  const select = document.getElementById("measure");
  select.append(make("option", "Kind", { value: "kind" }), make("option", "Pattern", { value: "pattern" }));
  data.measures.forEach((measure, place) => select.append(make("option", measure.title, { value: place })));
  select.addEventListener("change", () => { colouring = select.value; colourAtlas(); });
}

function walk(event, place) {
  const { layer, head } = data.heads[place];
  const to = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!to) return;
  const found = data.heads.findIndex((each) => each.layer === layer + to[0] && each.head === head + to[1]);
  if (found >= 0) { cells[found].focus(); event.preventDefault(); }
}

function colourAtlas() {
  const measure = data.measures[Number(colouring)];
  const scale = measure ? scaleOf(measure) : null;
  cells.forEach((cell, place) => {
    const head = data.heads[place];
    const [canvas, label] = cell.children;
    const value = measure ? measure.values[place] : null;
    let colour = null;
    if (measure && value !== null) colour = scale.colour(value);
    if (colouring === "kind" && head.group !== "mixed") colour = kindColour(GROUPS.indexOf(head.group));
    cell.style.background = colour ? css(colour) : "";
    cell.style.color = colour ? inkOn(colour) : "";
    canvas.hidden = colouring !== "pattern";
    label.hidden = colouring === "pattern";
    label.textContent = measure ? formatted(value, measure.unit) : breakable(head.kind);
    const said = [head.name, head.kind, ...head.flags, measure ? `${measure.label}: ${label.textContent}` : ""].filter(Boolean);
    cell.title = said.join(", ");
    cell.setAttribute("aria-label", cell.title);
    if (colouring === "pattern") patternOf(place).then((pattern) => drawPattern(canvas, pattern, Math.min(LENGTH, 72)));
  });
  explain(measure, scale);
}

// From values to colours: diverging, by the square root, where some values are negative.
function scaleOf(measure) {
  const known = measure.values.filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known);
  if (low < 0 && high > 0) {
    const most = Math.max(-low, high);
    return { low: -most, high: most, colour: (value) => diverging(Math.sign(value) * Math.sqrt(Math.abs(value) / most)) };
  }
  const fraction = measure.unit === "percent";
  const bottom = fraction ? 0 : low, top = fraction ? Math.max(high, 0.1) : high;
  return { low: bottom, high: top, colour: (value) => sequential(top > bottom ? (value - bottom) / (top - bottom) : 0) };
}

// Long names with a soft hyphen: not every browser knows where to break a word.
function breakable(kind) {
  return kind.replace(/(punctu|corefer|posi)(?=ation|ence|tional)/, "$1\u00ad");
}

function explain(measure, scale) {
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  document.getElementById("measured").textContent = measure ? measure.about
    : colouring === "pattern" ? "Each head's pattern on the text: queries down, keys across."
      : "The best kind of each head; one that reaches no threshold is mixed.";
  if (measure) {
    const bar = make("i", "", { class: "ramp" });
    const stops = Array.from({ length: 9 }, (_, place) => css(scale.colour(scale.low + (scale.high - scale.low) * place / 8)));
    bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
    legend.append(make("span", formatted(scale.low, measure.unit)), bar, make("span", formatted(scale.high, measure.unit)));
  } else if (colouring === "kind") {
    GROUPS.forEach((group, place) => {
      const item = make("span", group, { class: "kind" });
      item.prepend(make("i", "", { style: `background:${css(kindColour(place))}` }));
      legend.append(item);
    });
  }
}

// A pattern drawn on so many cells a side; a cell is the largest weight in it.
function drawPattern(canvas, pattern, side) {
  canvas.width = canvas.height = side;
  const image = canvas.getContext("2d").createImageData(side, side);
  const largest = new Float32Array(side * side);
  for (let query = 0; query < LENGTH; query++) {
    const row = Math.floor(query * side / LENGTH) * side;
    for (let place = pattern.starts[query]; place < pattern.starts[query + 1]; place++) {
      const cell = row + Math.floor(pattern.keys[place] * side / LENGTH);
      largest[cell] = Math.max(largest[cell], pattern.weights[place]);
    }
  }
  largest.forEach((weight, cell) => image.data.set([...weightColour(weight), 255], 4 * cell));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
