// A circuit: heads and MLPs by layer, the edges between them by weight and sign, a slider for how many, filters
// by what they are read with, and the edges of the node under the pointer or the keyboard.

import { h, s } from "./dom.js";
import { counted, decimal, fixed } from "./format.js";
import { say } from "./language.js";

const COLUMN_WIDTH = 98, ROW_HEIGHT = 66, BOX_WIDTH = 76, BOX_HEIGHT = 28, MARGIN_LEFT = 66, MARGIN = 22;
const LISTED_EDGES = 12;
const READER_KINDS = ["query", "key", "value", "mixer", "mlp"];
const ARROW_STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

// What an edge is read with: the port of a head, or the kind of its reader.
function readerKind([, node, port]) {
  return port || (/ mlp$/.test(node) ? "mlp" : / mixer$/.test(node) ? "mixer" : node);
}

function edgeName([writer, node, port]) {
  return `${writer} → ${node}${port ? ` ${port}` : ""}`;
}

// With two significant digits of the error, and as many digits after the point of the value.
function withError(value, error) {
  if (!error) return decimal(value);
  if (error < 0.0005) return `${decimal(value)} ± ${decimal(error)}`;
  const digits = Math.max(0, 1 - Math.floor(Math.log10(error)));
  return `${fixed(value, digits)} ± ${fixed(error, digits)}`;
}

// `view` is what circuit_view of Python returns; `curve`, if any, has points of [edges, faithfulness, error].
// `onDraw` is called with the edges in the picture, and `onPick` with a node that is clicked.
export function showCircuit(host, view, curve = [], { onDraw = () => {}, onPick = () => {} } = {}) {
  const kinds = [...new Set([...READER_KINDS, ...view.edges.map(readerKind)])].filter((kind) => view.edges.some((edge) => readerKind(edge) === kind));
  const state = { layout: preferredLayout(view), hidden: new Set(), node: null, pinned: false };
  const count = h("output", {});
  const slider = h("input", {
    type: "range", min: 0, max: view.layouts.length - 1, value: state.layout, "aria-label": say`Number of edges`,
    on: { input: () => { state.layout = Number(slider.value); draw(); } },
  });
  const filters = kinds.map((kind) => h("label", {}, h("input", {
    type: "checkbox", checked: true,
    on: { change: (event) => { state.hidden[event.target.checked ? "delete" : "add"](kind); draw(); } },
  }), ` ${kind}`));
  const graph = h("div", { class: "circuit-graph" });
  const side = h("div", { class: "circuit-side" });
  const chart = h("div", { class: "circuit-curve" });
  host.replaceChildren(h("div", { class: "circuit" },
    h("div", { class: "circuit-tools" },
      h("label", {}, h("span", {}, say`Edges`), slider, count),
      h("fieldset", {}, h("legend", {}, say`Read by`), filters),
      h("span", { class: "circuit-signs" }, sign("helps", say`helps`), sign("hurts", say`works against`)),
    ),
    h("div", { class: "circuit-body" }, graph, h("div", {}, side, chart)),
  ));

  function visibleEdges() {
    const { routes } = view.layouts[state.layout];
    return routes.map((route, index) => ({ edge: view.edges[index], route })).filter(({ edge }) => !state.hidden.has(readerKind(edge)));
  }

  function draw() {
    const layout = view.layouts[state.layout];
    count.textContent = say`${counted(layout.routes.length)} of ${counted(view.total)}`;
    slider.setAttribute("aria-valuetext", count.textContent);
    if (!layout.nodes.some(([name]) => name === state.node)) Object.assign(state, { node: null, pinned: false });
    const focused = graph.contains(document.activeElement);
    graph.replaceChildren(drawGraph(layout));
    if (curve.length) chart.replaceChildren(drawFaithfulness(curve, layout.routes.length));
    select(state.node, state.pinned);
    if (focused) graph.querySelector("[tabindex='0']")?.focus();
    onDraw(visibleEdges().map(({ edge }) => edge));
  }

  function drawGraph(layout) {
    const width = Math.max(MARGIN_LEFT + layout.columns * COLUMN_WIDTH + MARGIN, graph.clientWidth);
    const height = (layout.layers.length - 1) * ROW_HEIGHT + BOX_HEIGHT + 2 * MARGIN;
    const across = (x) => (MARGIN_LEFT + width - MARGIN) / 2 + x * COLUMN_WIDTH;
    const upward = (row) => height - MARGIN - BOX_HEIGHT / 2 - row * ROW_HEIGHT;
    const edges = visibleEdges();
    const most = Math.max(...view.edges.map((edge) => Math.abs(edge[3]))) || 1;
    const rows = new Map(layout.nodes.map(([name, , row]) => [name, row]));
    const used = new Set(edges.flatMap(({ edge }) => [edge[0], edge[1]]));
    const lines = edges.map(({ edge, route }) => {
      const first = rows.get(edge[0]);
      const points = route.map((x, index) => [across(x), upward(first + index)]);
      points[0][1] -= BOX_HEIGHT / 2;
      points[points.length - 1][1] += BOX_HEIGHT / 2;
      return s("path", {
        class: `circuit-edge ${edge[3] < 0 ? "hurts" : "helps"}`, d: smoothLine(points), "data-writer": edge[0], "data-reader": edge[1],
        "stroke-width": (1 + 6 * Math.abs(edge[3]) / most).toFixed(2),
      }, s("title", {}, `${edgeName(edge)}: ${withError(edge[3], edge[4])}`));
    }).reverse();
    const links = layout.shared.map((pair) => s("path", {
      class: "circuit-shared", d: smoothLine(pair.map((name) => [across(layout.nodes.find((node) => node[0] === name)[1]), upward(rows.get(name))])),
    }));
    const boxes = layout.nodes.map(([name, x, row, ports]) => drawNode(name, across(x), upward(row), ports, used.has(name)));
    return s("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": say`A circuit: layers upward, lines from what writes to what reads; arrow keys move between nodes`,
      on: { click: (event) => { if (!event.target.closest(".circuit-node")) select(null, false); } },
    }, drawBands(layout, width, upward), links, lines, boxes);
  }

  function drawNode(name, x, y, ports, used) {
    const marks = ports.map((port, index) => port && s("text", {
      class: "circuit-port", x: x + 0.23 * COLUMN_WIDTH * (index - (ports.length - 1) / 2), y: y + BOX_HEIGHT / 2 + 10,
    }, port[0].toUpperCase())).filter(Boolean);
    const width = Math.max(BOX_WIDTH, 8.2 * name.length + 14);
    const own = view.edges.slice(0, view.layouts[state.layout].routes.length);
    const reads = own.filter((edge) => edge[1] === name).length, writes = own.filter((edge) => edge[0] === name).length;
    return s("g", {
      class: used ? "circuit-node" : "circuit-node idle", role: "button", tabindex: -1, "data-node": name, "data-x": x, "data-y": y,
      "aria-label": say`${name}: reads through ${reads} edges, writes into ${writes}`,
      on: {
        pointerenter: () => { if (!state.pinned) select(name, false); },
        pointerleave: () => { if (!state.pinned) select(null, false); },
        focus: () => { if (!state.pinned) select(name, false); },
        click: () => pick(name),
        keydown: (event) => pressed(event, name),
      },
    }, s("rect", { x: x - width / 2, y: y - BOX_HEIGHT / 2, width, height: BOX_HEIGHT, rx: 8 }), s("text", { x, y: y + 4.5 }, name), marks);
  }

  function pick(name) {
    select(name, !(state.pinned && state.node === name));
    if (state.pinned) onPick(name);
  }

  function pressed(event, name) {
    if (event.key === "Escape") select(null, false);
    else if (event.key === "Enter" || event.key === " ") pick(name);
    else if (event.key in ARROW_STEPS) {
      state.pinned = false;
      nearestNode(event.currentTarget, ARROW_STEPS[event.key])?.focus();
    } else return;
    event.preventDefault();
  }

  // The nearest node in the direction of an arrow key; along a row, or in another one.
  function nearestNode(from, [right, up]) {
    const place = (node) => [Number(node.dataset.x), -Number(node.dataset.y)];
    const [x, y] = place(from);
    const ahead = [...graph.querySelectorAll(".circuit-node")].filter((node) => {
      const [otherX, otherY] = place(node);
      return right ? otherY === y && (otherX - x) * right > 0 : (otherY - y) * up > 0;
    });
    const distance = (node) => { const [otherX, otherY] = place(node); return Math.abs(otherX - x) + 4 * Math.abs(otherY - y); };
    return ahead.sort((first, second) => distance(first) - distance(second))[0];
  }

  function select(name, pinned) {
    Object.assign(state, { node: name, pinned });
    const nodes = [...graph.querySelectorAll(".circuit-node")];
    const near = new Set([name]);
    graph.firstChild.classList.toggle("chosen", name !== null);
    for (const line of graph.querySelectorAll(".circuit-edge")) {
      const touches = line.dataset.writer === name || line.dataset.reader === name;
      line.classList.toggle("lit", touches);
      if (touches) near.add(line.dataset.writer).add(line.dataset.reader);
    }
    for (const node of nodes) {
      node.classList.toggle("lit", near.has(node.dataset.node));
      node.setAttribute("aria-pressed", pinned && node.dataset.node === name);
      node.setAttribute("tabindex", node.dataset.node === name ? 0 : -1);
    }
    // One node is always in the order of the Tab key.
    if (name === null) nodes[nodes.length - 1]?.setAttribute("tabindex", 0);
    listEdges(name);
  }

  function listEdges(name) {
    const edges = visibleEdges().map(({ edge }) => edge);
    const parts = name === null ? [[say`The strongest edges`, edges.slice(0, LISTED_EDGES)]] : [
      [say`${name} reads`, edges.filter((edge) => edge[1] === name)], [say`${name} writes into`, edges.filter((edge) => edge[0] === name)],
    ];
    side.replaceChildren(...parts.filter(([, own]) => own.length).flatMap(([title, own]) => [
      h("h3", {}, title),
      h("table", {}, h("tbody", {}, own.map((edge) => h("tr", {},
        h("th", { scope: "row" }, sign(edge[3] < 0 ? "hurts" : "helps", edgeName(edge))), h("td", {}, withError(edge[3], edge[4])))))),
    ]));
    if (!edges.length) side.replaceChildren(h("p", {}, say`No edge is left: choose what they are read by.`));
    else if (name === null) side.append(h("p", { class: "circuit-hint" }, say`Point at a node, or move to one with the keyboard, to see its edges; a click keeps it.`));
  }

  draw();
}

function preferredLayout(view) {
  const readable = window.innerWidth < 700 ? 20 : 40;
  const index = view.layouts.findLastIndex((layout) => layout.routes.length <= readable);
  return Math.max(0, index);
}

function sign(kind, text) {
  const line = s("svg", { class: "circuit-sign", width: 26, height: 10, "aria-hidden": true }, s("path", { class: `circuit-edge ${kind}`, d: "M0 5H26", "stroke-width": 3 }));
  return h("span", {}, line, ` ${text}`);
}

// A line through points, vertical at each of them.
function smoothLine(points) {
  let line = `M${points[0].map((value) => value.toFixed(1)).join(" ")}`;
  for (let index = 1; index < points.length; index += 1) {
    const [[x, y], [toX, toY]] = [points[index - 1], points[index]];
    const middle = (y + toY) / 2;
    line += `C${[x, middle, toX, middle, toX, toY].map((value) => value.toFixed(1)).join(" ")}`;
  }
  return line;
}

function drawBands(layout, width, upward) {
  return [...new Set(layout.layers)].filter(Boolean).flatMap((layer, index) => {
    const top = upward(layout.layers.lastIndexOf(layer)) - ROW_HEIGHT / 2, bottom = upward(layout.layers.indexOf(layer)) + ROW_HEIGHT / 2;
    const band = s("rect", { class: index % 2 ? "circuit-band" : "circuit-band even", x: 0, y: top, width, height: bottom - top });
    return [band, s("text", { class: "circuit-layer", x: 8, y: (top + bottom) / 2 + 4 }, say`layer ${layer}`)];
  });
}

// Faithfulness by the number of edges on a logarithmic scale, with the number of edges of the picture.
function drawFaithfulness(curve, edges) {
  const width = 300, height = 150, left = 34, bottom = 26, top = 12;
  const points = curve.filter(([size]) => size > 0);
  const sizes = points.map(([size]) => Math.log(size));
  const [low, high] = [Math.min(...sizes, Math.log(edges)), Math.max(...sizes, Math.log(edges))];
  const values = points.flatMap(([, value, error]) => [value - (error ?? 0), value + (error ?? 0)]);
  const [least, most] = [Math.min(0, ...values), Math.max(1, ...values)];
  const across = (size) => left + (width - left - 12) * (Math.log(size) - low) / (high - low || 1);
  const up = (value) => height - bottom - (height - bottom - top) * (value - least) / (most - least);
  const grid = [0, 1].map((value) => [s("line", { x1: left, x2: width - 6, y1: up(value), y2: up(value) }), s("text", { x: left - 6, y: up(value) + 4, class: "end" }, String(value))]);
  const whiskers = points.filter((point) => point[2]).map(([size, value, error]) => s("line", { class: "whisker", x1: across(size), x2: across(size), y1: up(value - error), y2: up(value + error) }));
  const line = s("polyline", { points: points.map(([size, value]) => `${across(size).toFixed(1)},${up(value).toFixed(1)}`).join(" ") });
  const dots = points.map(([size, value, error]) => s("circle", { cx: across(size), cy: up(value), r: 3.5 }, s("title", {}, say`${counted(size)} edges: ${withError(value, error)}`)));
  return h("figure", {},
    h("figcaption", {}, say`Faithfulness by the number of edges kept`),
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": points.map(([size, value]) => say`${counted(size)} edges: ${decimal(value)}`).join("; ") },
      grid.flat(), s("line", { class: "now", x1: across(edges), x2: across(edges), y1: top, y2: height - bottom }), line, whiskers, dots,
      s("text", { x: across(points[0][0]), y: height - 8 }, counted(points[0][0])),
      s("text", { x: width - 8, y: height - 8, class: "end" }, counted(points[points.length - 1][0]))));
}
