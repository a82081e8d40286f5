// The atlas: a row per layer, a square per head, colored by a measure. Selected heads have a ring of
// their own color; ablated heads are crossed out.

import { AtlasPatterns } from "./atlas_patterns.js";
import { css, diverging, inkOn, kindColor, sequential } from "./color.js";
import { h, announce } from "./dom.js";
import { counted, formatted } from "./format.js";
import { stepOf } from "./grid.js";
import { kindName } from "./head_words.js";
import { kindElement, kindLegend, shortOf } from "./kinds.js";
import { say } from "./language.js";
import { definitionOf, inOrder, isDefined, isOwn, isSplit, labelOf, optionOf, rangeOf, splitPart, unitOf, whyUndefined } from "./measures.js";

const MANY_LAYERS = 14;
const TOUCH = window.matchMedia("(pointer: coarse), (max-width: 600px)");

// The name of a head in a result, which selects it.
export function headLink(side, head) {
  return h("button", { type: "button", class: "head-link", title: say`Select ${head}`, on: { click: () => side.showHead(head) } }, head);
}

export class Atlas {
  constructor(side) {
    this.side = side;
    this.cells = new Map();
    this.focused = null;
    this.select = h("select", { "aria-label": say`Measure that colors the heads`, on: { change: () => side.colorBy(this.select.value) } });
    this.grid = h("div", { class: "atlas", role: "grid", "aria-label": say`Heads of the model`, "aria-multiselectable": "true" });
    this.grid.addEventListener("keydown", (event) => this.#key(event));
    this.bar = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    this.low = h("span", { class: "number" });
    this.high = h("span", { class: "number" });
    this.colors = h("div", { class: "scale" }, this.low, this.bar, this.high);
    this.patterns = new AtlasPatterns(side);
    this.kindColors = h("div", { class: "legend" });
    // How far the kinds are, in the place of the labels to come.
    this.measuring = h("p", { class: "quiet measuring" });
    this.labels = h("p", { class: "quiet kind-labels" });
    this.instead = h("p", { class: "instead", role: "note", hidden: true });
    // The head under the pointer has a line of its own, so that nothing jumps.
    this.tip = h("p", { class: "head-tip" });
    this.about = h("p", { class: "quiet" });
    this.picks = h("ul", { class: "picks", "aria-label": say`Selected heads` });
    this.element = h(
      "section",
      { class: "card place-heads", "aria-label": say`Heads` },
      h("header", {}, h("h2", {}, say`Heads`), this.select, this.patterns.button),
      this.instead,
      this.grid,
      this.colors,
      this.kindColors,
      this.measuring,
      this.labels,
      side.worth.element,
      this.tip,
      this.about,
      this.picks,
    );
  }

  build(layers) {
    this.cells.clear();
    const widest = Math.max(...layers.map(({ heads }) => heads));
    const numbers = Array.from({ length: widest }, (_, head) => h("span", { class: "head-number", role: "columnheader", title: say`Head ${head}` }, `H${head}`));
    this.grid.classList.toggle("tall", layers.length > MANY_LAYERS);
    const rows = layers.map(({ layer, heads }) => {
      const cells = Array.from({ length: heads }, (_, head) => this.#cell(`L${layer}H${head}`));
      return h("div", { role: "row" }, h("span", { class: "layer", role: "rowheader", title: say`Layer ${layer}` }, `L${layer}`), cells);
    });
    this.grid.replaceChildren(h("div", { role: "row" }, h("span", { class: "layer", role: "columnheader", "aria-label": say`Layer` }), numbers), ...rows);
    this.focused = this.cells.keys().next().value;
  }

  #cell(head) {
    const toggle = (event) => {
      event.preventDefault();
      this.side.toggleAblated(head);
    };
    const cell = h("button", {
      type: "button", class: "cell", role: "gridcell", tabindex: -1, "data-head": head,
      on: {
        click: (event) => (event.shiftKey ? toggle(event) : this.side.toggleSelected(head)),
        contextmenu: toggle,
        pointerenter: () => this.tell(head),
        pointerleave: () => this.tell(null),
        focus: () => this.#focus(head),
      },
    }, h("span", { "aria-hidden": "true" }));
    this.cells.set(head, cell);
    return cell;
  }

  // Update colors, rings and labels.
  draw() {
    const { side } = this;
    const found = side.statistics;
    const names = found ? inOrder(found).filter((name) => name !== "worth") : [];
    this.#options(found ? ["kind", ...(side.worth.able ? ["worth"] : []), ...names] : []);
    const { measure } = side;
    const kinds = [...new Set([...this.cells.keys()].map((head) => side.kindOf(head)?.split(" ")[0]).filter(Boolean))].sort();
    const values = found?.[measure] ?? [];
    const [low, high] = rangeOf(measure, values);
    const split = isSplit(measure);
    const scale = split ? (part) => diverging(splitPart(measure, part)) : sequential;
    [...this.cells].forEach(([head, cell], place) => {
      const value = values[place] ?? null;
      const part = value === null ? 0 : (value - low) / (high - low || 1);
      const kind = measure === "kind" ? kinds.indexOf(side.kindOf(head)?.split(" ")[0]) : -1;
      const color = kind >= 0 ? kindColor(kind) : scale(split ? part * 2 - 1 : part);
      cell.style.setProperty("--fill", value === null && kind < 0 ? "var(--well)" : css(color));
      cell.classList.toggle("estimate", measure === "worth" && !side.worth.exact.has(head));
      cell.style.setProperty("--on", inkOn(color));
      cell.style.setProperty("--color", side.colorOf(head) ?? "transparent");
      cell.classList.toggle("selected", side.selected.includes(head));
      cell.classList.toggle("ablated", side.ablated.has(head));
      cell.classList.toggle("patched", side.patched.has(head));
      cell.setAttribute("aria-selected", String(side.selected.includes(head)));
      cell.setAttribute("aria-label", this.#described(head, value));
      cell.firstChild.textContent = shortOf(side.kindOf(head));
      cell.firstChild.classList.toggle("faint", side.kindOf(head) === "sink");
      cell.tabIndex = head === this.focused ? 0 : -1;
    });
    this.colors.hidden = measure === "kind";
    this.kindColors.replaceChildren(...(measure === "kind" ? kinds : []).map((kind, place) => h("span", {}, h("span", { class: "swatch", vars: { "--color": css(kindColor(place)) } }), kindName(kind))));
    const labels = kindLegend(kinds);
    this.labels.replaceChildren(...(labels.length ? [...labels, ". ", say`Kinds are measured on texts made to test them.`] : []));
    side.worth.draw();
    this.#scale(scale, split, low, high);
    this.#list();
    this.#explain();
    this.tell(null);
    this.patterns.draw();
  }

  // Measures that this text does not define are listed, and cannot be selected.
  #options(names) {
    const { side } = this;
    const options = names.map((name) => h("option", { value: name, disabled: !isOwn(name) && !isDefined(side.statistics, name) }, optionOf(side.statistics, name)));
    const same = options.length === this.select.options.length && options.every((each, place) => each.isEqualNode(this.select.options[place]));
    // An open list would close.
    if (!same) this.select.replaceChildren(...options);
    this.select.value = side.measure;
    // Hidden without a text, but still there, so that the layout does not jump.
    for (const each of [this.select, this.colors]) each.style.visibility = names.length ? "" : "hidden";
  }

  #scale(scale, split, low, high) {
    const ink = this.bar.getContext("2d");
    for (let place = 0; place < 256; place += 1) {
      ink.fillStyle = css(scale(split ? place / 127.5 - 1 : place / 255));
      ink.fillRect(place, 0, 1, 1);
    }
    const unit = unitOf(this.side.measure);
    this.low.textContent = formatted(low, unit);
    this.high.textContent = formatted(high, unit);
  }

  #described(head, value) {
    const [, layer, number] = head.match(/L(\d+)H(\d+)/);
    const parts = [say`Layer ${layer}, head ${number}`, this.side.describeKind(head), value === null ? null : `${labelOf(this.side.measure)} ${formatted(value, unitOf(this.side.measure))}`];
    if (this.side.measure === "worth" && value !== null && !this.side.worth.exact.has(head)) parts.push(say`estimated`);
    if (this.side.ablated.has(head)) parts.push(say`switched off`);
    return parts.filter(Boolean).join(", ");
  }

  // What the colors mean, and why it may not be what was selected.
  #explain() {
    const { side } = this;
    const { measure, statistic } = side;
    const over = side.atlasTokens && side.atlasTokens < side.tokens.length ? ` ${say`Measured on the first ${counted(side.atlasTokens)} tokens.`}` : isOwn(measure) ? "" : ` ${say`Measured on this text.`}`;
    this.about.textContent = side.statistics ? `${labelOf(measure)}: ${definitionOf(measure)}${over}` : "";
    this.instead.hidden = !side.statistics || measure === statistic;
    this.instead.textContent = this.instead.hidden ? "" : `${whyUndefined(statistic)} ${say`The colors show “${labelOf(measure)}” instead.`}`;
  }

  tell(head) {
    const { side } = this;
    if (head === null) {
      this.tip.textContent = TOUCH.matches ? say`Tap a head to select it; switch it off below.` : say`Click to select, right-click to switch off.`;
      return;
    }
    const place = [...this.cells.keys()].indexOf(head);
    const value = side.statistics?.[side.measure]?.[place] ?? null;
    const number = value === null ? null : `${labelOf(side.measure)} ${formatted(value, unitOf(side.measure))}`;
    this.tip.replaceChildren(h("b", {}, head), ` ${[number, side.describeKind(head)].filter(Boolean).join(" · ")}`);
  }

  #list() {
    const { side } = this;
    const items = side.selected.map((head) => {
      const off = side.ablated.has(head);
      return h(
        "li",
        {},
        h("span", { class: "swatch", vars: { "--color": side.colorOf(head) } }),
        h("b", {}, head),
        kindElement(head in side.kinds, side.kinds[head], side.nearest[head]),
        h("button", { type: "button", "aria-pressed": String(off), "aria-label": off ? say`Switch ${head} on` : say`Switch ${head} off`, on: { click: () => side.toggleAblated(head) } }, off ? say`Off` : say`On`),
        h("button", { type: "button", "aria-label": say`Deselect ${head}`, on: { click: () => side.toggleSelected(head) } }, "✕"),
      );
    });
    if (!items.length) items.push(h("li", { class: "quiet" }, say`Select heads above; each gets its own color.`));
    this.picks.replaceChildren(...items);
  }

  #focus(head) {
    this.cells.get(this.focused)?.setAttribute("tabindex", "-1");
    this.focused = head;
    this.cells.get(head).tabIndex = 0;
    this.tell(head);
  }

  #key(event) {
    const head = event.target.dataset?.head;
    if (!head) return;
    if (event.key === "o" || event.key === "O") {
      this.side.toggleAblated(head);
      announce(this.side.ablated.has(head) ? say`${head} switched off` : say`${head} switched on`);
      return;
    }
    const [, layer, number] = head.match(/L(\d+)H(\d+)/).map(Number);
    const step = stepOf(event);
    if (!step) return;
    event.preventDefault();
    const [down, right] = step;
    this.cells.get(`L${layer + down}H${number + right}`)?.focus();
  }
}
