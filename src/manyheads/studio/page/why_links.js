// Single links of attention: a click on a line or a cell explains the link, and from there it can be cut. The other
// weights of the token grow to the same sum, and the predictions show the change. Each link can be restored.

import { h, s } from "./dom.js";
import { percent } from "./format.js";
import { say } from "./language.js";

// Thinner lines are hard to hit.
const WIDE = 11;
const FAINTEST = 0.02;

export class CutLinks {
  constructor(side) {
    this.side = side;
    this.element = h("div", { class: "cut-links", role: "group", "aria-label": say`Links that are cut`, hidden: true });
    this.hint = h("p", { class: "quiet cut-hint" }, say`Click a line of the selected token to see why the head looks there, and to cut this link.`);
  }

  draw() {
    const { side } = this;
    const { links } = side;
    this.element.hidden = !links.length;
    this.hint.hidden = links.length > 0 || side.isVision || side.blank || !side.selected.length;
    this.hint.textContent = side.view === "map" ? say`Click a cell in the row of the selected token to see why the head looks there, and to cut this link.` : say`Click a line of the selected token to see why the head looks there, and to cut this link.`;
    const chips = links.map(([head, query, key]) =>
      h("button", { type: "button", class: "cut-link", "aria-label": say`Restore the link of ${head} from “${side.label(query)}” to “${side.label(key)}”`, on: { click: () => side.toggleLink(head, query, key) } }, `${head} `, h("s", {}, `${side.label(query, 10)} → ${side.label(key, 10)}`), " ↺"),
    );
    const all = links.length > 1 ? [h("button", { type: "button", class: "plain", on: { click: () => side.restoreLinks() } }, say`Restore all links`)] : [];
    this.element.replaceChildren(h("span", { class: "quiet" }, say`Cut:`), ...chips, ...all);
  }

  isCut(head, query, key) {
    return this.side.links.some((each) => each[0] === head && each[1] === query && each[2] === key);
  }

  // An invisible broad line over a thin one, which can be clicked and reached by keyboard.
  over(path, head, query, key, weight) {
    const { side } = this;
    if (query !== side.at || weight < FAINTEST) return null;
    const name = say`Explain the link of ${head} from “${side.label(query)}” to “${side.label(key)}”, weight ${percent(weight)}`;
    const open = (event) => {
      if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      side.reasons.open(head, query, key);
    };
    return s("path", { d: path, class: "link-target", role: "button", tabindex: 0, "aria-label": name, "stroke-width": WIDE, on: { click: open, keydown: open } }, s("title", {}, name));
  }
}
