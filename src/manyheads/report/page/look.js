// One head: where a token looks, in the text, as lines from token to token, and in the whole map.

const WINDOW = 26;
const ROW = 21;
const GAP = 12;
const SPACE = "http://www.w3.org/2000/svg";
const looking = { head: 0, at: 0, back: false, view: "text", pinned: false };
const spans = [];

function buildLook() {
  const text = document.getElementById("view-text");
  if (data.picture) layOver(text, ...data.picture);
  data.tokens.forEach((token, place) => {
    const span = make("span", token.replace(/\n/g, "⏎\n"), { class: "token" });
    span.dataset.place = place;
    if (data.picture && place) span.style.gridArea = areaOf(place - 1, data.picture[2]);
    text.append(span);
    spans.push(span);
  });
  text.addEventListener("mouseover", (event) => hover(event.target.dataset.place));
  text.addEventListener("click", (event) => pin(event.target.dataset.place));
  text.tabIndex = 0;
  for (const part of [text, document.getElementById("map")]) part.addEventListener("keydown", step);
  document.getElementById("view-lines").addEventListener("keydown", step);
  const map = document.getElementById("map");
  map.addEventListener("mousemove", (event) => { if (!looking.pinned) choosePlace(placeOn(map, event)); });
  map.addEventListener("click", (event) => pin(placeOn(map, event)));
}

// An image under its patches; the class token, which is no patch, stands above it.
function layOver(text, address, rows, columns) {
  text.classList.add("picture");
  text.style.setProperty("--columns", columns);
  text.style.setProperty("--rows", rows);
  text.append(make("img", "", { src: address, alt: "The image that was read" }));
  document.querySelector("#tabs [data-view=text]").textContent = "Image";
}

// The image lies under its patches, so that none may wait for an empty cell.
function areaOf(patch, columns) {
  return `${Math.floor(patch / columns) + 2} / ${patch % columns + 1}`;
}

// Where no weight falls the image is dark, where much does it glows.
function glow(weight) {
  const share = Math.sqrt(weight);
  return `rgb(${Math.round(8 + 247 * share)} ${Math.round(12 + 218 * share)} ${Math.round(34 + 26 * share)} / ${0.66 - 0.16 * share})`;
}

function placeOn(map, event) {
  const box = map.getBoundingClientRect();
  const share = looking.back ? (event.clientX - box.left) / box.width : (event.clientY - box.top) / box.height;
  return Math.min(LENGTH - 1, Math.max(0, Math.floor(share * LENGTH)));
}

function hover(place) {
  if (place !== undefined && !looking.pinned) choosePlace(Number(place));
}

// A click holds a token until the same one, or nothing, is clicked.
function pin(place) {
  if (place === undefined) { looking.pinned = false; return; }
  looking.pinned = !(looking.pinned && Number(place) === looking.at);
  choosePlace(Number(place));
}

function step(event) {
  const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  choosePlace(Math.min(LENGTH - 1, Math.max(0, looking.at + by)));
}

function choosePlace(place) {
  looking.at = place;
  drawLook();
}

async function drawLook() {
  const { head, at, back, view } = looking;
  const pattern = await patternOf(head);
  if (looking.head !== head || looking.at !== at) return;
  const looks = back ? looksAt(pattern, at) : looksFrom(pattern, at);
  if (view === "text") drawText(looks);
  if (view === "lines") drawLines(pattern, looks);
  if (view === "map") drawMap(pattern, head);
  say(looks, pattern);
}

function drawText(looks) {
  for (const span of spans) { span.style.background = span.style.color = ""; span.classList.remove("at"); }
  for (const [place, weight] of looks) {
    const colour = weightColour(weight);
    spans[place].style.background = data.picture ? glow(weight / looks[0][1]) : css(colour);
    spans[place].style.color = inkOn(colour);
  }
  spans[looking.at].classList.add("at");
}

// The places that are drawn: those around the chosen one, and those it has most to do with.
function placesAround(looks) {
  const near = Math.min(WINDOW - 8, LENGTH);
  const first = Math.min(Math.max(0, looking.at - Math.floor(near * (looking.back ? 0.3 : 0.7))), LENGTH - near);
  const places = new Set(Array.from({ length: near }, (_, place) => first + place));
  for (const [place] of looks) if (places.size < WINDOW) places.add(place);
  return [...places].sort((one, other) => one - other);
}

// Queries at the left, keys at the right; a gap tells that tokens between are left out.
function drawLines(pattern, looks) {
  const places = placesAround(looks);
  const rows = new Map();
  let height = 4;
  places.forEach((place, each) => {
    if (each && place !== places[each - 1] + 1) height += GAP;
    rows.set(place, height + ROW / 2);
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
  for (const query of places) {
    for (const [key, weight] of looksFrom(pattern, query)) if (rows.has(key) && weight > 0.02) line(query, key, weight, false);
  }
  let outside = 0;
  for (const [place, weight] of looks) {
    if (!rows.has(place)) outside += weight;
    else if (looking.back) line(place, looking.at, weight, true);
    else line(looking.at, place, weight, true);
  }
  const by = new Map(looks);
  places.forEach((place, each) => {
    if (each && place !== places[each - 1] + 1) gap(picture, rows.get(place) - ROW / 2 - GAP / 2, left, right);
    word(picture, place, left - 8, rows.get(place), "end", looking.back ? by.get(place) : undefined, !looking.back);
    word(picture, place, right + 8, rows.get(place), "start", looking.back ? undefined : by.get(place), looking.back);
  });
  const holder = document.getElementById("view-lines");
  holder.replaceChildren(picture);
  if (outside > 0.01 && !looking.back) holder.append(make("p", `${percent(outside)} of the weight goes to tokens that are not drawn here.`, { class: "quiet" }));
}

function gap(picture, y, left, right) {
  const path = document.createElementNS(SPACE, "path");
  path.setAttribute("d", `M${left - 60} ${y} H${left - 8} M${right + 8} ${y} H${right + 60}`);
  path.setAttribute("class", "gap");
  picture.append(path);
}

function word(picture, place, x, y, anchor, weight, chooses) {
  const text = document.createElementNS(SPACE, "text");
  const letters = shown(data.tokens[place]);
  const token = document.createElementNS(SPACE, "tspan");
  token.textContent = letters.length > 18 ? `${letters.slice(0, 17)}…` : letters;
  text.append(token, weight > 0.005 ? `  ${percent(weight)}` : "");
  text.setAttribute("x", x);
  text.setAttribute("y", y + 4.5);
  text.setAttribute("text-anchor", anchor);
  text.setAttribute("class", chooses && place === looking.at ? "at" : weight > 0.1 ? "seen" : "");
  // A move to another window under the pointer would run away with it.
  text.addEventListener("click", () => { looking.pinned = true; choosePlace(place); });
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
  const share = looking.at / LENGTH, thick = `max(1px, ${map.clientWidth / LENGTH}px)`;
  Object.assign(cross.style, looking.back
    ? { left: `${share * map.clientWidth}px`, top: 0, width: thick, height: `${map.clientHeight}px` }
    : { top: `${share * map.clientHeight}px`, left: 0, height: thick, width: `${map.clientWidth}px` });
}

// A word that is written from right to left turns nothing around it: <bdi> and <tspan> stand alone.
function say(looks, pattern) {
  const token = (place) => make("bdi", shown(data.tokens[place]));
  const best = looks.slice(0, 4).filter(([, weight]) => weight >= 0.005);
  const listed = best.flatMap(([place, weight], each) => [each ? ", " : "", token(place), ` ${percent(weight)}`]);
  const kept = looksFrom(pattern, looking.at).reduce((sum, [, weight]) => sum + weight, 0);
  const rest = Math.max(0, 1 - kept);
  const does = ` (token ${looking.at}) ${looking.back ? "is looked at by" : "looks at"} `;
  const more = looking.back ? "" : rest > 0.03 ? `; ${percent(rest)} is spread over smaller weights or not kept` : "";
  document.getElementById("said").replaceChildren(token(looking.at), does, ...(best.length ? listed : ["nobody to speak of"]), more);
}

// The query that shows best what a head does: one that looks far, hard, and not at the first token.
function tellingPlace(pattern) {
  let best = [-1, Math.floor(LENGTH * 0.4)];
  for (let query = 1; query < LENGTH; query++) {
    for (let place = pattern.starts[query]; place < pattern.starts[query + 1]; place++) {
      const key = pattern.keys[place];
      const far = key > 0 && Math.abs(query - key) > 1 ? 1 : 0.3;
      if (far * pattern.weights[place] > best[0]) best = [far * pattern.weights[place], query];
    }
  }
  return best[1];
}
