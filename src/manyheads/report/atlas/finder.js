// The finder: all heads as points, by two measures or on the map, and as a table with the same heads.

import { addressOf } from "./address.js";
import { inkOn } from "./color.js";
import { announce, h, s } from "./dom.js";
import { counted, formatted } from "./format.js";
import { rampOf } from "./grid.js";
import { kindName } from "./head_words.js";
import { say } from "./language.js";
import { listedToken } from "./token_text.js";
import { KIND, MAP, atlasNow, background, colorOfKind, coloring, filteredHeads, kindGroups, measureNamed, state, valueOf, valuesOf } from "./state.js";

const SIDE = { left: 62, right: 16, top: 14, bottom: 44 };
const NEAR = 22;
const FIRST_ROWS = 100;
const NAME = { wide: 32, tall: 12 };
const parts = {};
const points = new Map();
let drawn = [];

// `changed` is called after a choice that also concerns other parts of the page.
export function buildFinder(place, changed) {
  const update = () => { changed(); announce(parts.count.textContent); };
  const choose = (name, options, act) => h("select", { id: name, on: { change: (event) => { act(event.target.value); update(); } } }, options.map(([value, label]) => h("option", { value }, label)));
  const measures = atlasNow().measures.map((measure) => [measure.name, measure.title]);
  const layers = Array.from({ length: state.layers[1] + 1 }, (_, layer) => [layer, `${layer}`]);
  const axes = [[MAP, say`Map of similar heads`], ...measures];
  const from = choose("from", layers, (value) => { state.layers = [Number(value), Math.max(Number(value), state.layers[1])]; to.value = state.layers[1]; });
  const to = choose("to", layers, (value) => { state.layers = [Math.min(Number(value), state.layers[0]), Number(value)]; from.value = state.layers[0]; });
  to.value = state.layers[1];
  const across = choose("across", axes, (value) => { state.across = value; state.up = value === MAP ? MAP : state.up === MAP ? otherMeasure(value) : state.up; up.value = state.up; });
  const up = choose("up", axes, (value) => { state.up = value; state.across = value === MAP ? MAP : state.across === MAP ? otherMeasure(value) : state.across; across.value = state.across; });
  const color = choose("color", [...(kindGroups().length ? [[KIND, say`Kind`]] : []), ...measures], (value) => { state.color = value; });
  [across.value, up.value, color.value] = [state.across, state.up, state.color];
  const search = h("input", { id: "words", type: "search", placeholder: say`L3, copy, a token`, on: { input: (event) => { state.words = event.target.value; update(); } } });
  const most = h("input", { id: "most", type: "range", min: 1, max: state.most, value: state.most, on: { input: (event) => { state.most = Number(event.target.value); update(); } } });
  parts.most = h("label", { for: "most" });
  parts.kinds = h("div", { class: "kinds", role: "group", "aria-label": say`Show only heads of these kinds` });
  parts.scale = h("div", { class: "scale quiet" });
  parts.about = h("p", { class: "quiet" });
  parts.plot = s("svg", { "aria-hidden": "true", on: { pointermove: hover, pointerleave: () => mark(null), click: openNearest } });
  parts.at = h("p", { class: "pointed quiet" });
  parts.count = h("p", { class: "quiet" });
  parts.picture = h("div", { class: "plot" }, parts.plot);
  parts.table = h("table", { id: "heads" });
  parts.more = h("p", {});
  parts.list = h("div", { class: "scroll" }, parts.table, parts.more);
  place.append(
    h("div", { class: "controls" }, h("label", {}, say`Across`, " ", across), h("label", {}, say`Up`, " ", up), h("label", {}, say`Color`, " ", color)),
    h("div", { class: "controls" },
      h("label", {}, say`Find`, " ", search), h("span", {}, h("label", {}, say`Layers`, " ", from), h("label", {}, " ", say`to`, " ", to)),
      atlasNow().importance ? h("span", {}, parts.most, most) : null),
    parts.kinds, parts.scale, parts.about, parts.picture, parts.at, parts.count, parts.list,
  );
  for (const group of kindGroups()) {
    const toggle = () => { state.kinds[state.kinds.has(group) ? "delete" : "add"](group); update(); };
    parts.kinds.append(h("button", { type: "button", "data-kind": group, on: { click: toggle } }));
  }
  new ResizeObserver(() => drawPlot()).observe(parts.plot);
}

function otherMeasure(name) {
  return atlasNow().measures.find((measure) => measure.name !== name)?.name ?? name;
}

export function drawFinder() {
  drawn = filteredHeads();
  const { heads } = atlasNow();
  for (const chip of parts.kinds.children) {
    const group = chip.dataset.kind, color = colorOfKind(group);
    chip.setAttribute("aria-pressed", String(state.kinds.has(group)));
    chip.replaceChildren(h("i", { vars: { background: background(color) } }), kindName(group), h("small", {}, `${heads.filter((head) => head.group === group).length}`));
  }
  parts.most.textContent = `${state.most >= heads.length ? say`All heads, by worth` : say`The ${state.most} most valuable`} `;
  parts.count.textContent = !drawn.length ? whyNone() : drawn.length < heads.length ? say`${counted(drawn.length)} {0|head|heads} of ${counted(heads.length)}` : say`${counted(drawn.length)} {0|head|heads}`;
  for (const part of [parts.picture, parts.at, parts.list]) part.hidden = !drawn.length;
  drawScale();
  drawPlot();
  drawTable();
}

function whyNone() {
  const words = state.words.trim(), kinds = kindGroups().map(kindName).join(", ");
  if (!words) return say`No head passes all the choices above.`;
  const rest = kinds ? say`You can search for a head (L2H6), a layer (L2), a kind (${kinds}), the kind that a head is nearest to, or a token that heads look at most.` : say`You can search for a head (L2H6), a layer (L2), or a token that heads look at most.`;
  return `${say`No head matches “${words}” and the choices above.`} ${rest}`;
}

function drawScale() {
  const { scale, measure } = coloring();
  parts.scale.hidden = !measure;
  const lines = [state.across, state.up, state.color].map((name) => measureNamed(name)).filter(Boolean);
  parts.about.replaceChildren(...[...new Set(lines)].flatMap((each) => [h("b", {}, `${each.label}: `), `${each.about} `]));
  if (!measure) return;
  parts.scale.replaceChildren(...rampOf(scale, measure.unit), ` ${measure.label}`);
}

// Measures that are not fractions have long tails: their axis shows square roots.
function axisOf(name, dimension, length) {
  if (name === MAP) return { of: (head) => head.place[dimension] * length, ticks: [], title: "" };
  const { unit, title } = measureNamed(name);
  const bend = unit === "percent" ? (value) => value : (value) => Math.sign(value) * Math.sqrt(Math.abs(value));
  const values = valuesOf(name);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (unit === "percent") low = Math.min(0, low);
  if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
  const scaled = (value) => (bend(value) - bend(low)) / (bend(high) - bend(low)) * length;
  const ticks = Array.from({ length: 5 }, (_, index) => {
    const bent = bend(low) + (bend(high) - bend(low)) * index / 4;
    const value = unit === "percent" ? bent : Math.sign(bent) * bent * bent;
    return { at: length * index / 4, text: formatted(Math.abs(value) < 1e-9 ? 0 : value, unit) };
  });
  const of = (head) => { const value = valueOf(head, name); return value === null ? null : scaled(value); };
  return { of, ticks, title: unit === "percent" ? title : say`${title}, square-root scale` };
}

function drawPlot() {
  const wide = parts.plot.clientWidth, tall = parts.plot.clientHeight;
  if (!wide) return;
  const onMap = state.across === MAP;
  const side = onMap ? { left: 16, right: 16, top: 16, bottom: 16 } : SIDE;
  const [width, height] = [wide - side.left - side.right, tall - side.top - side.bottom];
  const [x, y] = [axisOf(state.across, 0, width), axisOf(state.up, 1, height)];
  const colors = coloring();
  const radius = drawn.length > 400 ? 4 : drawn.length > 120 ? 5.5 : 7;
  const lines = [
    ...x.ticks.map(({ at, text }, index) => s("g", { class: "tick", transform: `translate(${side.left + at} ${tall - side.bottom})` }, s("line", { y2: -height }), s("text", { y: 17, "text-anchor": index ? (index === 4 ? "end" : "middle") : "start" }, text))),
    ...y.ticks.map(({ at, text }) => s("g", { class: "tick", transform: `translate(${side.left} ${tall - side.bottom - at})` }, s("line", { x2: width }), s("text", { x: -7, y: 4, "text-anchor": "end" }, text))),
    s("text", { class: "title", x: side.left + width / 2, y: tall - 6, "text-anchor": "middle" }, x.title),
    s("text", { class: "title", x: side.left + 4, y: side.top + 8 }, y.title && `↑ ${y.title}`),
  ];
  const present = new Set();
  for (const head of drawn) {
    const place = [x.of(head), y.of(head)];
    if (place.includes(null)) continue;
    present.add(head.name);
    if (!points.has(head.name)) points.set(head.name, s("circle", { "data-head": head.name }));
    const point = points.get(head.name), color = colors.of(head);
    Object.assign(point, { head, place: [side.left + place[0], tall - side.bottom - place[1]] });
    point.setAttribute("r", radius);
    point.style.transform = `translate(${point.place[0]}px, ${point.place[1]}px)`;
    point.style.fill = background(color);
  }
  for (const [name] of points) if (!present.has(name)) points.delete(name);
  const frame = parts.plot.querySelector(".frame") ?? parts.plot.appendChild(s("g", { class: "frame" }));
  const cloud = parts.plot.querySelector(".points") ?? parts.plot.appendChild(s("g", { class: "points" }));
  frame.replaceChildren(...lines, ...namesOf([...points.values()], wide, radius));
  for (const point of [...cloud.children]) if (!points.has(point.head.name)) point.remove();
  for (const point of points.values()) if (point.parentNode !== cloud) cloud.append(point);
  mark(null);
}

// The names of heads where they cover neither another name nor a point; those with a kind first.
function namesOf(all, wide, radius) {
  const covered = all.map(({ place: [x, y] }) => [x - radius, y - radius, x + radius, y + radius]);
  const names = [];
  for (const { head, place: [x, y] } of [...all].sort((one, other) => other.head.kinds.length - one.head.kinds.length)) {
    const end = x > wide - 60, start = end ? x - radius - 3 - NAME.wide : x + radius + 3;
    const box = [start, y - NAME.tall / 2, start + NAME.wide, y + NAME.tall / 2];
    if (covered.some(([left, top, right, bottom]) => left < box[2] && box[0] < right && top < box[3] && box[1] < bottom)) continue;
    covered.push(box);
    names.push(s("text", { class: "name", x: end ? x - radius - 3 : start, y: y + 4, "text-anchor": end ? "end" : "start" }, head.name));
  }
  return names;
}

function nearest(event) {
  const box = parts.plot.getBoundingClientRect();
  const away = ({ place: [x, y] }) => Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
  const best = [...points.values()].reduce((one, other) => (one && away(one) <= away(other) ? one : other), null);
  return best && away(best) <= NEAR ? best : null;
}

function hover(event) {
  mark(nearest(event));
}

function mark(point) {
  for (const each of points.values()) each.classList.toggle("near", each === point);
  parts.plot.classList.toggle("pointing", point !== null);
  parts.at.textContent = point ? describe(point.head) : say`Point at a head to see what it is; click it to open it.`;
}

function describe(head) {
  const values = tableMeasures().map((name) => `${measureNamed(name).label} ${formatted(valueOf(head, name), measureNamed(name).unit)}`);
  const tokens = head.looks_at?.length ? say`looks most at ${head.looks_at.map((token) => say`“${listedToken(token)}”`).join(", ")}` : "";
  return [head.name, kindName(head.kind), tokens, ...values].filter(Boolean).join(" · ");
}

function openNearest(event) {
  const point = nearest(event);
  if (point) location.hash = addressOf(point.head);
}

// The measures of the table: those of the axes and the colors, and the worth.
function tableMeasures() {
  const names = [state.across, state.up, state.color, atlasNow().importance?.measure];
  return [...new Set(names)].filter((name) => measureNamed(name));
}

function drawTable() {
  const colors = coloring();
  const titles = [["name", say`Head`], ...(kindGroups().length ? [["kind", say`Kind`]] : []), ["looks_at", say`Looks most at`], ...tableMeasures().map((name) => [name, measureNamed(name).title])];
  const rank = (head) => (state.sort === "name" ? atlasNow().heads.indexOf(head) : ["kind", "looks_at"].includes(state.sort) ? String(head[state.sort] ?? "") : valueOf(head, state.sort));
  const rows = drawn.map((head) => [rank(head), head]).sort(([one], [other]) => {
    if (one === null || other === null) return (one === null) - (other === null);
    const order = typeof one === "string" ? one.localeCompare(other) : one - other;
    return state.down ? -order : order;
  });
  const sortBy = (name) => {
    state.down = state.sort === name ? !state.down : !["name", "kind", "looks_at"].includes(name);
    state.sort = name;
    drawTable();
    parts.table.querySelector(`[data-sort="${name}"]`).focus();
  };
  const title = ([name, label]) => h("th", { scope: "col", class: measureNamed(name) ? "number" : null, "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : null }, h("button", { type: "button", "data-sort": name, on: { click: () => sortBy(name) } }, label));
  const row = ([, head]) => {
    const color = colors.of(head);
    return h("tr", {},
      h("th", { scope: "row" }, h("a", { href: addressOf(head) }, head.name)),
      kindGroups().length === 0 ? null : h("td", {}, h("span", { class: "chip", vars: { background: background(state.color === KIND ? color : colorOfKind(head.group)), color: state.color === KIND && color ? inkOn(color) : "" } }, kindName(head.kind)), head.nearest ? h("small", { class: "quiet" }, ` ${say`near ${kindName(head.nearest.name)}`}`) : null),
      h("td", { class: "words" }, (head.looks_at ?? []).map((token) => h("bdi", { class: "word" }, listedToken(token)))),
      tableMeasures().map((name) => h("td", { class: "number" }, formatted(valueOf(head, name), measureNamed(name).unit))));
  };
  parts.table.replaceChildren(
    h("caption", { class: "hidden" }, say`The heads of the picture above`),
    h("thead", {}, h("tr", {}, titles.map(title))), h("tbody", {}, rows.slice(0, FIRST_ROWS).map(row)));
  const rest = rows.slice(FIRST_ROWS);
  const more = () => { parts.table.tBodies[0].append(...rest.map(row)); parts.more.replaceChildren(); };
  parts.more.replaceChildren(...(rest.length ? [h("button", { type: "button", on: { click: more } }, say`Show the other ${counted(rest.length)}`)] : []));
}
