// The atlas enlarged, with the pattern of each head in its square; they appear layer by layer.

import { wasAborted } from "./api.js";
import { dark } from "./color.js";
import { h } from "./dom.js";
import { say } from "./language.js";
import { brightest, painted } from "./map_view.js";
import { floats, MAX_COMPLETE } from "./patterns.js";

// Cells per side of a small pattern, and heads per request.
const CELLS = 48;
const HEADS = 12;

export class AtlasPatterns {
  constructor(side) {
    this.side = side;
    this.on = false;
    this.button = h("button", { type: "button", class: "zoom", "aria-pressed": "false", on: { click: () => this.#toggle() } }, say`Patterns`);
  }

  #toggle() {
    this.on = !this.on;
    this.button.setAttribute("aria-pressed", String(this.on));
    this.side.frame.enlarge(this.on);
    // Moving the card has taken the focus.
    this.button.focus();
    this.draw();
  }

  async draw() {
    const { side } = this;
    const { patterns } = side;
    const fits = side.tokens.length <= MAX_COMPLETE && !side.isVision;
    this.button.disabled = !fits && !this.on;
    this.button.title = fits ? say`Show the pattern of every head` : say`Patterns of all heads are shown up to ${MAX_COMPLETE} tokens`;
    side.atlas.grid.classList.toggle("patterned", this.on);
    if (!this.on || !patterns || !fits) {
      this.#clear();
      return;
    }
    if (patterns === this.drawn && dark() === this.dark) return;
    Object.assign(this, { drawn: patterns, dark: dark() });
    const [all, heads] = [[0, side.tokens.length], [...side.atlas.cells.keys()]];
    try {
      for (let start = 0; start < heads.length; start += HEADS) {
        const body = { ...side.base, heads: heads.slice(start, start + HEADS), rows: all, keys: all, cells: CELLS };
        const { maps } = await side.api.ask("attention_map", body, "atlas patterns");
        if (patterns !== side.patterns || !this.on) return;
        for (const each of maps) this.#show(each.head, { height: each.height, width: each.width, weights: floats(each.data) });
      }
    } catch (error) {
      this.drawn = null;
      if (!wasAborted(error)) side.failed(error);
    }
  }

  #show(head, pattern) {
    const canvas = painted(pattern, brightest(pattern));
    canvas.setAttribute("aria-hidden", "true");
    const cell = this.side.atlas.cells.get(head);
    cell.querySelector("canvas")?.remove();
    cell.append(canvas);
  }

  #clear() {
    this.drawn = null;
    for (const cell of this.side.atlas.cells.values()) cell.querySelector("canvas")?.remove();
  }
}
