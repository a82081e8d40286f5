// One head: its attention on the text, as lines between tokens, and as a map.

const WINDOW = 26;
const ROW = 21;
const GAP = 12;
const SPACE = "http://www.w3.org/2000/svg";
const view = { head: 0, at: 0, incoming: false, tab: "text", pinned: false };
const spans = [];

function buildHeadView() {
  const text = document.getElementById("view-text");
  if (data.image) showImage(text, ...data.image);
  data.tokens.forEach((token, index) => {
    const span = make("span", token.replace(/\n/g, "⏎\n"), { class: "token" });
    span.dataset.index = index;
    const patch = data.image ? index - 1 - data.image[3] : -1;
    if (patch >= 0) span.style.gridArea = areaOf(patch, data.image[2]);
    text.append(span);
    spans.push(span);
  });
  text.addEventListener("mouseover", (event) => hover(event.target.dataset.index));
  text.addEventListener("click", (event) => pin(event.target.dataset.index));
  text.tabIndex = 0;
  for (const part of [text, document.getElementById("map")]) part.addEventListener("keydown", step);
  document.getElementById("view-lines").addEventListener("keydown", step);
  const map = document.getElementById("map");
  map.addEventListener("mousemove", (event) => { if (!view.pinned) selectToken(tokenAt(map, event)); });
  map.addEventListener("click", (event) => pin(tokenAt(map, event)));
}

// The image under its patches, with the class token above it.
function showImage(text, address, rows, columns) {
  text.classList.add("image");
  text.style.setProperty("--columns", columns);
  text.style.setProperty("--rows", rows);
  text.append(make("img", "", { src: address, alt: "The input image" }));
  document.querySelector("#tabs [data-view=text]").textContent = "Image";
}

function areaOf(patch, columns) {
  return `${Math.floor(patch / columns) + 2} / ${patch % columns + 1}`;
}

// Dark without weight, bright yellow with much.
function glow(weight) {
  const fraction = Math.sqrt(weight);
  return `rgb(${Math.round(8 + 247 * fraction)} ${Math.round(12 + 218 * fraction)} ${Math.round(34 + 26 * fraction)} / ${0.66 - 0.16 * fraction})`;
}

function tokenAt(map, event) {
  const box = map.getBoundingClientRect();
  const fraction = view.incoming ? (event.clientX - box.left) / box.width : (event.clientY - box.top) / box.height;
  return Math.min(LENGTH - 1, Math.max(0, Math.floor(fraction * LENGTH)));
}

function hover(index) {
  if (index !== undefined && !view.pinned) selectToken(Number(index));
}

// A click pins a token until it, or the background, is clicked.
function pin(index) {
  if (index === undefined) { view.pinned = false; return; }
  view.pinned = !(view.pinned && Number(index) === view.at);
  selectToken(Number(index));
}

function step(event) {
  const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  selectToken(Math.min(LENGTH - 1, Math.max(0, view.at + by)));
}

function selectToken(index) {
  view.at = index;
  drawHead();
}

async function drawHead() {
  const { head, at, incoming, tab } = view;
  const pattern = await patternOf(head);
  if (view.head !== head || view.at !== at) return;
  const attention = incoming ? attentionTo(pattern, at) : attentionFrom(pattern, at);
  if (tab === "text") drawText(attention);
  if (tab === "lines") drawLines(pattern, attention);
  if (tab === "map") drawMap(pattern, head);
  summarize(attention, pattern);
}

function drawText(attention) {
  for (const span of spans) { span.style.background = span.style.color = ""; span.classList.remove("at"); }
  for (const [index, weight] of attention) {
    const color = weightColor(weight);
    spans[index].style.background = data.image ? glow(weight / attention[0][1]) : css(color);
    spans[index].style.color = inkOn(color);
  }
  spans[view.at].classList.add("at");
}

// The tokens to draw: those around the selected one, and those with the largest weights.
function tokensAround(attention) {
  const near = Math.min(WINDOW - 8, LENGTH);
  const first = Math.min(Math.max(0, view.at - Math.floor(near * (view.incoming ? 0.3 : 0.7))), LENGTH - near);
  const tokens = new Set(Array.from({ length: near }, (_, index) => first + index));
  for (const [index] of attention) if (tokens.size < WINDOW) tokens.add(index);
  return [...tokens].sort((one, other) => one - other);
}

// Queries at the left, keys at the right; a gap marks tokens that are left out.
function drawLines(pattern, attention) {
  const tokens = tokensAround(attention);
  const rows = new Map();
  let height = 4;
  tokens.forEach((index, each) => {
    if (each && index !== tokens[each - 1] + 1) height += GAP;
    rows.set(index, height + ROW / 2);
    height += ROW;
  });
  const width = 560, left = 185, right = width - 185;
  const picture = document.createElementNS(SPACE, "svg");
  picture.setAttribute("viewBox", `0 0 ${width} ${height + 4}`);
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", "Lines from queries at the left to keys at the right");
  const line = (query, key, weight, strong) => {
    const path = document.createElementNS(SPACE, "path");
    const middle = (left + right) / 2, from = rows.get(query), to = rows.get(key);
    path.setAttribute("d", `M${left} ${from} C${middle} ${from} ${middle} ${to} ${right} ${to}`);
    path.setAttribute("class", strong ? "strong" : "weak");
    path.setAttribute("stroke-width", strong ? 0.8 + 7 * weight : 0.4 + 2 * weight);
    path.setAttribute("stroke-opacity", strong ? 0.3 + 0.7 * Math.sqrt(weight) : 0.5 * Math.sqrt(weight));
    picture.append(path);
  };
  for (const query of tokens) {
    for (const [key, weight] of attentionFrom(pattern, query)) if (rows.has(key) && weight > 0.02) line(query, key, weight, false);
  }
  let outside = 0;
  for (const [index, weight] of attention) {
    if (!rows.has(index)) outside += weight;
    else if (view.incoming) line(index, view.at, weight, true);
    else line(view.at, index, weight, true);
  }
  const by = new Map(attention);
  tokens.forEach((index, each) => {
    if (each && index !== tokens[each - 1] + 1) gap(picture, rows.get(index) - ROW / 2 - GAP / 2, left, right);
    word(picture, index, left - 8, rows.get(index), "end", view.incoming ? by.get(index) : undefined, !view.incoming);
    word(picture, index, right + 8, rows.get(index), "start", view.incoming ? undefined : by.get(index), view.incoming);
  });
  const holder = document.getElementById("view-lines");
  holder.replaceChildren(picture);
  if (outside > 0.01 && !view.incoming) holder.append(make("p", `${percent(outside)} of the weight is on tokens that are not drawn here.`, { class: "quiet" }));
}

function gap(picture, y, left, right) {
  const path = document.createElementNS(SPACE, "path");
  path.setAttribute("d", `M${left - 60} ${y} H${left - 8} M${right + 8} ${y} H${right + 60}`);
  path.setAttribute("class", "gap");
  picture.append(path);
}

function word(picture, index, x, y, anchor, weight, chooses) {
  const text = document.createElementNS(SPACE, "text");
  const letters = visibleToken(data.tokens[index]);
  const token = document.createElementNS(SPACE, "tspan");
  token.textContent = letters.length > 18 ? `${letters.slice(0, 17)}…` : letters;
  text.append(token, weight > 0.005 ? `  ${percent(weight)}` : "");
  text.setAttribute("x", x);
  text.setAttribute("y", y + 4.5);
  text.setAttribute("text-anchor", anchor);
  text.setAttribute("class", chooses && index === view.at ? "at" : weight > 0.1 ? "seen" : "");
  // Without a pin, the redrawn lines would select another token under the pointer.
  text.addEventListener("click", () => { view.pinned = true; selectToken(index); });
  picture.append(text);
}

function drawMap(pattern, head) {
  const map = document.getElementById("map");
  const drawn = `${head} ${theme()}`;
  if (map.dataset.drawn !== drawn) {
    drawPattern(map, pattern, Math.min(LENGTH, 768));
    map.dataset.drawn = drawn;
  }
  const cross = document.getElementById("cross");
  const fraction = view.at / LENGTH, thick = `max(1px, ${map.clientWidth / LENGTH}px)`;
  Object.assign(cross.style, view.incoming
    ? { left: `${fraction * map.clientWidth}px`, top: 0, width: thick, height: `${map.clientHeight}px` }
    : { top: `${fraction * map.clientHeight}px`, left: 0, height: thick, width: `${map.clientWidth}px` });
}

// <bdi> and <tspan> keep right-to-left tokens from reordering the text around them.
function summarize(attention, pattern) {
  const token = (index) => make("bdi", visibleToken(data.tokens[index]));
  const best = attention.slice(0, 4).filter(([, weight]) => weight >= 0.005);
  const listed = best.flatMap(([index, weight], each) => [each ? ", " : "", token(index), ` ${percent(weight)}`]);
  const kept = attentionFrom(pattern, view.at).reduce((sum, [, weight]) => sum + weight, 0);
  const rest = Math.max(0, 1 - kept);
  const does = ` (token ${view.at}) ${view.incoming ? "is attended to by" : "attends to"} `;
  const more = view.incoming ? "" : rest > 0.03 ? `; the other ${percent(rest)} is in smaller weights` : "";
  document.getElementById("summary").replaceChildren(token(view.at), does, ...(best.length ? listed : ["no token with 0.5% or more"]), more);
}

// The query with the largest weight on a token that is neither near nor the first.
function clearestQuery(pattern) {
  let best = [-1, Math.floor(LENGTH * 0.4)];
  for (let query = 1; query < LENGTH; query++) {
    for (let index = pattern.starts[query]; index < pattern.starts[query + 1]; index++) {
      const key = pattern.keys[index];
      const far = key > 0 && Math.abs(query - key) > 1 ? 1 : 0.3;
      if (far * pattern.weights[index] > best[0]) best = [far * pattern.weights[index], query];
    }
  }
  return best[1];
}
