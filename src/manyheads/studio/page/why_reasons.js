// Why does the head look there? The score of one link, compared with the mean of all tokens that the head sees, as a
// sum over pairs of writers: what was written at the token that looks, and at the token it looks at.

import { headLink } from "./atlas.js";
import { wasAborted } from "./api.js";
import { h, renew } from "./dom.js";
import { fixed } from "./format.js";
import { kindName } from "./head_words.js";
import { say } from "./language.js";
import { added, Question } from "./why_question.js";

export class LinkReasons {
  constructor(side) {
    this.side = side;
    this.link = null;
    this.question = new Question(
      "",
      say`The score of a link is a product of what was written at both tokens: by heads, MLPs and the embedding. With norms at their values of this run it is an exact sum over pairs of writers. A softmax sees only differences, so the mean score of all tokens that the head sees is subtracted. Each side sums the pairs over all writers of the other.`,
    );
    this.question.heading.tabIndex = -1;
    this.cut = h("button", { type: "button", on: { click: () => side.toggleLink(...this.link) } });
    const close = h("button", { type: "button", class: "plain", on: { click: () => this.close() } }, say`Close`);
    this.element = h("div", { class: "link-reasons", hidden: true }, this.question.element, h("p", { class: "row" }, this.cut, close));
  }

  open(head, query, key) {
    this.link = [head, query, key];
    this.asked = "";
    this.element.hidden = false;
    this.draw();
    this.question.heading.focus({ preventScroll: true });
    this.element.scrollIntoView({ behavior: "smooth", block: "nearest" });
  }

  close() {
    this.link = null;
    this.element.hidden = true;
    this.side.api.stop("why_link");
  }

  // The selection, the edits or the text has changed.
  draw() {
    const { side } = this;
    if (!this.link) return;
    const [head, query, key] = this.link;
    const text = [side.model.name, side.input].join();
    if (this.asked && text !== this.text) this.close();
    else if (query !== side.at) this.close();
    if (!this.link) return;
    this.text = text;
    this.question.title = say`Why does ${head} look from “${side.label(query)}” at “${side.label(key)}”?`;
    this.cut.textContent = side.cuts.isCut(head, query, key) ? say`Restore this link` : say`Cut this link`;
    const body = { ...side.base, head, query, key };
    const asked = JSON.stringify(body);
    if (asked !== this.asked) this.#load(body, asked);
    else if (this.response) this.#show(this.response);
  }

  async #load(body, asked) {
    const { side, question } = this;
    this.asked = asked;
    this.response = null;
    question.element.setAttribute("aria-busy", "true");
    try {
      const response = await side.api.ask("why_link", body);
      if (asked !== this.asked) return;
      this.response = question.answered(response) ? response : null;
      if (this.response) this.#show(response);
      question.element.setAttribute("aria-busy", "false");
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    }
  }

  #show({ score, position, capped, pairs, query_side, key_side }) {
    const { side, question } = this;
    const [, query, key] = this.link;
    const alone = pairs.every((pair) => !pair.value);
    const parts = [
      alone ? say`It sees no other token, so that it looks there in any case.` : score < 0 ? say`Its score is ${fixed(-score, 2)} below the mean of all tokens that the head sees.` : say`Its score is ${fixed(score, 2)} above the mean of all tokens that the head sees.`,
      position ? say`The distance of the two tokens adds ${added(position)}.` : "",
      capped ? say`(Before this model's cap on scores.)` : "",
    ];
    question.summary.textContent = parts.filter(Boolean).join(" ");
    if (alone) {
      question.body.replaceChildren();
      return;
    }
    const named = (writer) => this.#writer(writer);
    renew(
      question.body,
      h("h4", {}, say`The strongest pairs`),
      bars(pairs, (pair) => [named(pair.query), h("span", { class: "quiet", "aria-hidden": "true" }, "×"), named(pair.key)]),
      h("div", { class: "reason-sides" },
        h("div", {}, h("h4", {}, say`Written at “${side.label(query)}”, which looks`), bars(query_side, (part) => [named(part.writer)])),
        h("div", {}, h("h4", {}, say`Written at “${side.label(key)}”, where it looks`), bars(key_side, (part) => [named(part.writer)])),
      ),
    );
  }

  // A head with its kind, or another writer in words.
  #writer(name) {
    const { side } = this;
    const [layer, part] = name.split(" ");
    if (/^L\d+H\d+$/.test(name)) {
      const [label] = side.kinds[name] ?? [];
      return h("span", { class: "writer" }, headLink(side, name), label ? h("small", { class: "quiet" }, kindName(label.name)) : null);
    }
    return h("span", { class: "writer" }, /^L\d+$/.test(layer) ? (part === "mixer" ? say`L${layer.slice(1)} mixer` : `${layer} MLP`) : otherWriter(name));
  }
}

function otherWriter(name) {
  if (name === "biases") return say`Biases`;
  if (name === "position embedding") return say`Position embedding`;
  if (name === "type embedding") return say`Type embedding`;
  return say`Embedding`;
}

// Parts as bars to both sides of zero.
function bars(parts, names) {
  const most = Math.max(...parts.map((part) => Math.abs(part.value))) || 1;
  const items = parts
    .filter((part) => Math.abs(part.value) >= 0.005)
    .map((part) => h("li", { class: part.value < 0 ? "against" : "for" }, h("span", { class: "writers" }, ...names(part)), h("span", { class: "both-ways", vars: { "--wide": `${(50 * Math.abs(part.value)) / most}%` }, "aria-hidden": "true" }, h("i")), h("span", { class: "number" }, added(part.value))));
  return h("ol", { class: "reasons" }, ...items);
}
