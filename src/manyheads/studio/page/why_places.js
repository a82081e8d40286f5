// Which place matters? The state of one token in one layer at a time is taken from another prompt, and the map shows
// how far the answer moves to that prompt's. Layers come one by one, and can be stopped.

import { wasAborted } from "./api.js";
import { css, diverging, inkOn } from "./color.js";
import { announce, debounce, h, renew } from "./dom.js";
import { counted, percent } from "./format.js";
import { say } from "./language.js";
import { shortToken } from "./token_text.js";
import { namedWords, Question, quoted } from "./why_question.js";

// With more layers cells have no room for numbers.
const NUMBERED = 10;
// Rows without a cell of this size are folded once everything is measured.
const QUIET = 0.01;
// As the server says it.
const IMAGES = "patching compares two prompts, and this model reads images: use a text model.";

export class Places {
  constructor(side, target) {
    Object.assign(this, { side, target, component: "residual", columns: [], running: false, all: false, cell: [0, 0] });
    this.question = new Question(
      say`Which place matters?`,
      say`Each cell is a run of the unchanged model in which only this token's state in this layer comes from the other prompt. 100% means that the answer becomes the other prompt's, 0% that nothing changes.`,
    );
    this.element = this.question.element;
    this.countSoon = debounce(200, () => this.#count());
    this.source = h("textarea", { rows: 2, "aria-label": say`Prompt to compare with`, placeholder: say`The same text with one word changed`, spellcheck: "false", on: { input: () => this.countSoon() } });
    this.counts = h("p", { class: "why-counts quiet", role: "status" });
    this.parts = h("div", { class: "segments", role: "group", "aria-label": say`State to replace` });
    for (const [name, label] of [["residual", say`Residual stream`], ["attention", say`Attention`], ["feedforward", "MLP"]]) {
      this.parts.append(h("button", { type: "button", "data-part": name, on: { click: () => this.#choose(name) } }, label));
    }
    this.start = h("button", { type: "button", class: "primary", on: { click: () => (this.running ? this.stop() : this.run()) } });
    this.tip = h("p", { class: "place-tip" });
    this.map = h("div", { class: "places" });
    this.map.addEventListener("keydown", (event) => this.#key(event));
    this.map.addEventListener("pointerover", (event) => this.#point(event.target));
    this.map.addEventListener("focusin", (event) => this.#point(event.target));
    this.question.heading.after(h("div", { class: "places-source" }, this.source, this.counts, h("div", { class: "row" }, this.parts, this.start)));
    this.question.body.append(this.map, this.tip);
  }

  // Another text or token.
  reset() {
    this.stop();
    Object.assign(this, { columns: [], response: null, all: false, cell: [0, 0] });
    this.source.value = this.side.example?.source ?? this.side.source ?? "";
  }

  show() {
    const images = this.side.isVision;
    this.question.answered(images ? { reason: IMAGES } : {});
    this.source.parentElement.hidden = images;
    this.draw();
    this.#count();
  }

  #choose(name) {
    this.stop();
    Object.assign(this, { component: name, columns: [], response: null });
    this.draw();
  }

  stop() {
    if (!this.running) return;
    this.running = false;
    this.side.api.stop("why_places");
    this.draw();
  }

  async #count() {
    const { side } = this;
    const text = this.source.value;
    if (side.isVision) return;
    let other = 0;
    try {
      if (text) other = (await side.api.ask("token_count", { model: side.model.name, text }, "why_count")).tokens;
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
      return;
    }
    const own = side.tokens.length;
    const fits = Math.max(own, other) <= side.limits.patching_tokens;
    const ready = text !== "" && text !== side.text && own === other && fits;
    this.counts.classList.toggle("bad", text !== "" && !ready);
    this.counts.textContent = this.#verdict(text, own, other, fits);
    this.start.disabled = !ready && !this.running;
  }

  #verdict(text, own, other, fits) {
    const { side } = this;
    if (text === "") return say`Type another prompt with ${counted(own)} {0|token|tokens}: the same text with a word changed.`;
    if (text === side.text) return say`It is the same text: change a word that the answer depends on.`;
    if (own !== other) return say`It has ${counted(other)} {0|token|tokens} and the text ${counted(own)}: places are compared one by one, so both need the same number.`;
    if (!fits) return say`Both have ${counted(own)} {0|token|tokens}: use at most ${counted(side.limits.patching_tokens)}.`;
    return say`Both have ${counted(own)} {0|token|tokens}: ready.`;
  }

  async run() {
    const { side } = this;
    Object.assign(this, { columns: [], response: null, running: true });
    this.draw();
    const { edits, ...base } = side.base;
    const target = this.target();
    const body = { ...base, position: side.at, source: this.source.value, component: this.component, ...(target === null ? {} : { target }) };
    try {
      for (let layer = 0, layers = 1; layer < layers && this.running; layer += 1) {
        const response = await side.api.ask("why_places", { ...body, layer }, "why_places");
        if (!this.running) return;
        if (!this.question.answered(response)) break;
        layers = response.layers;
        this.response = response;
        this.columns.push(response.recovered);
        this.draw();
      }
      if (this.columns.length) announce(this.question.summary.textContent);
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    }
    this.running = false;
    this.draw();
  }

  draw() {
    const { side, response } = this;
    for (const button of this.parts.children) button.setAttribute("aria-pressed", String(button.dataset.part === this.component));
    const layers = response?.layers;
    this.start.textContent = this.running ? (layers ? say`Stop (layer ${this.columns.length} of ${layers})` : say`Stop`) : say`Measure each place`;
    this.start.disabled = false;
    this.question.summary.textContent = this.#summary();
    this.question.body.hidden = !response;
    if (!response) {
      this.map.replaceChildren();
      this.tip.textContent = "";
      return;
    }
    const rows = this.#rows();
    const head = h("tr", {}, h("td"), ...Array.from({ length: layers }, (_, layer) => h("th", { scope: "col" }, `L${layer}`)));
    const [first] = rows;
    const loud = rows.filter((place) => this.running || this.all || place === side.at || side.tokens[place] !== response.source[place] || this.columns.some((column) => Math.abs(column[place] ?? 0) >= QUIET));
    const shown = loud.length > rows.length - 3 ? rows : loud;
    const lines = shown.flatMap((place, row) => {
      const gap = place - (row ? shown[row - 1] : first - 1) - 1;
      const fold = gap > 0 ? [h("tr", { class: "is-fold" }, h("th", { scope: "row" }, "⋮"), h("td", { colspan: layers }, say`${gap} {0|token|tokens} below 1%`))] : [];
      return [...fold, h("tr", {}, this.#name(place), ...Array.from({ length: layers }, (_, layer) => this.#cell(place, row, layer, layers)))];
    });
    const more = shown.length < rows.length ? h("button", { type: "button", class: "plain", on: { click: () => this.#showAll() } }, say`Show all tokens`) : null;
    const skipped = first ?? 0;
    const note = skipped ? h("p", { class: "quiet" }, say`${skipped} {0|token|tokens} at the start {0|is|are} the same in both prompts and cannot matter.`) : null;
    renew(this.map, ...[note, h("div", { class: "places-scroll" }, h("table", { class: layers > NUMBERED ? "is-dense" : "", "aria-label": say`How much of the other answer each place restores` }, h("thead", {}, head), h("tbody", {}, lines))), more].filter(Boolean));
    if (!this.tip.textContent) this.tip.textContent = say`Rows are tokens, columns are layers: ${this.#states()}.`;
  }

  #showAll() {
    this.all = true;
    this.draw();
    this.map.querySelector('td[tabindex="0"]')?.focus();
  }

  #states() {
    return { residual: say`the residual stream that enters the layer`, attention: say`what attention adds in the layer`, feedforward: say`what the MLP adds in the layer` }[this.component];
  }

  // The tokens that can matter: in a decoder those from the first difference up to the position.
  #rows() {
    const { side } = this;
    const all = side.tokens.map((_, place) => place);
    if (side.model.output !== "next token") return all;
    const first = all.find((place) => side.tokens[place] !== this.response.source[place]) ?? 0;
    return all.filter((place) => place >= first && place <= side.at);
  }

  #name(place) {
    const { side } = this;
    const [own, other] = [side.tokens[place], this.response.source[place]];
    const changed = own === other ? null : h("span", { class: "swapped" }, " → ", shortToken(other, 14));
    return h("th", { scope: "row", class: changed ? "differs" : "" }, side.label(place, 14), changed);
  }

  #cell(place, row, layer, layers) {
    const value = this.columns[layer]?.[place];
    if (value === undefined) return h("td", { class: "is-waiting" });
    const color = value === null ? null : diverging(Math.max(-1, Math.min(1, value)));
    const at = this.cell[0] === row && this.cell[1] === layer;
    const label = say`“${this.side.label(place)}”, layer ${layer}: ${percent(value)} of the other answer`;
    const text = layers > NUMBERED || value === null ? "" : String(Math.round(100 * value)).replace("-", "−");
    return h("td", { "data-row": row, "data-layer": layer, tabindex: at ? 0 : -1, "aria-label": label, vars: color ? { "--fill": css(color), "--on": inkOn(color) } : {} }, text);
  }

  #point(element) {
    const cell = element.closest?.("td[data-row]");
    if (cell) this.tip.textContent = cell.getAttribute("aria-label");
  }

  #key(event) {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    const from = event.target.closest("td[data-row]");
    if (!step || !from) return;
    const [row, layer] = [Number(from.dataset.row) + step[0], Number(from.dataset.layer) + step[1]];
    const next = this.map.querySelector(`td[data-row="${row}"][data-layer="${layer}"]`);
    event.preventDefault();
    if (!next) return;
    from.tabIndex = -1;
    next.tabIndex = 0;
    this.cell = [row, layer];
    next.focus();
  }

  // Where the difference is, layer by layer; of what layers add, the strongest places.
  #summary() {
    const { side, response, columns } = this;
    if (!response) return "";
    const [from, to] = namedWords(response.target, response.answer);
    const change = say`From “${from}” to “${to}”:`;
    const name = (place) => quoted(side.label(place));
    if (this.component !== "residual") {
      const cells = columns.flatMap((column, layer) => column.map((value, place) => [value ?? 0, place, layer])).sort((one, other) => other[0] - one[0]);
      const best = cells.slice(0, 3).map(([value, place, layer]) => `${name(place)} L${layer} ${percent(value)}`);
      return `${change} ${say`most is restored at ${best.join(", ")}.`}`;
    }
    const runs = [];
    columns.forEach((column, layer) => {
      const place = column.indexOf(Math.max(...column));
      if (runs.at(-1)?.place === place) runs.at(-1).stop = layer;
      else runs.push({ place, start: layer, stop: layer });
    });
    const parts = runs.map(({ place, start, stop }) => (start === stop ? say`at ${name(place)} in L${start}` : say`at ${name(place)} in L${start} to L${stop}`));
    return `${change} ${say`the difference is ${parts.join(", ")}.`}`;
  }
}
