// Ablation, and the predictions at the selected token with and without it.

import { headLink } from "./atlas.js";
import { h, announce } from "./dom.js";
import { counted, fixed, percent } from "./format.js";
import { say, sayParts } from "./language.js";
import { visibleToken } from "./token_text.js";

const TITLES = {
  "next token": () => say`Next token`,
  "masked token": () => say`Predicted token`,
  classes: () => say`Predicted class`,
  "token classes": () => say`Class of this token`,
  none: () => say`Vector`,
};

const MAX_NAMES = 12;

export class Predictions {
  constructor(side) {
    this.side = side;
    this.title = h("h2", {}, TITLES["next token"]());
    this.after = h("p", { class: "quiet" });
    this.bars = h("ol", { class: "bars" });
    this.legend = h("p", { class: "legend" });
    // Where the predictions are not beside the text, the first one stays in sight.
    this.summary = h("p", { class: "summary", "aria-hidden": "true" });
    this.loss = h("div", { class: "loss" });
    this.replaceWith = h("div", { class: "segments", role: "group", "aria-label": say`Replace the output of ablated heads with` }, this.#option("zero", say`Zero`), this.#option("mean", say`Mean`));
    this.count = h("p", { class: "quiet" });
    this.reset = h("button", { type: "button", class: "plain", hidden: true, on: { click: () => side.restoreHeads() } }, say`Restore all heads`);
    this.element = h(
      "section",
      { class: "card place-predictions", "aria-label": say`Predictions` },
      h("header", {}, this.title, this.after),
      this.bars,
      this.legend,
      this.loss,
      h("h3", {}, say`Ablation`),
      this.count,
      h("div", { class: "row" }, h("span", { class: "quiet" }, say`Replace with`), this.replaceWith, this.reset),
    );
  }

  #option(how, label) {
    return h("button", { type: "button", "data-how": how, on: { click: () => this.side.setReplacement(how) } }, label);
  }

  clear() {
    for (const part of [this.after, this.bars, this.legend, this.loss, this.summary]) part.replaceChildren();
  }

  // Which heads are ablated, and what replaces them.
  draw() {
    const { side } = this;
    for (const button of this.replaceWith.children) button.setAttribute("aria-pressed", String(button.dataset.how === side.replaceWith));
    this.reset.hidden = !side.changed;
    const names = side.ablated.size > MAX_NAMES ? [] : [...side.ablated].flatMap((head, place) => [place ? ", " : ": ", headLink(side, head)]);
    if (side.ablated.size) this.count.replaceChildren(say`${counted(side.ablated.size)} {0|head|heads} switched off`, ...names, ".");
    else this.count.textContent = side.model.output === "none" ? say`Switch heads off to see how far the vector moves.` : say`Switch heads off to see how the predictions change.`;
  }

  show(response) {
    const { side } = this;
    this.title.textContent = TITLES[response.output]();
    const word = h("span", { class: "word" }, side.label(response.position));
    this.after.replaceChildren();
    if (response.output === "next token") this.after.append(...sayParts`after ${word}`);
    if (response.output === "masked token") this.after.append(...sayParts`in place of ${word}`);
    this.legend.replaceChildren();
    if (!response.top.length) {
      this.#similarities(response);
      return;
    }
    const most = Math.max(...response.top.map((each) => Math.max(each.probability, each.before ?? 0)), 0.01);
    this.bars.replaceChildren(...response.top.map((each) => this.#bar(each, most)));
    this.#losses(response);
    const [first] = response.top;
    const change = first.before === null ? [] : [` ${say`(${percent(first.before)} before)`}`];
    this.summary.replaceChildren(`${TITLES[response.output]()}: `, h("span", { class: "word" }, visibleToken(first.text)), ` ${percent(first.probability)}`, ...change);
    if (first.before !== null) this.legend.append(h("span", {}, h("span", { class: "tick" }), say`before the heads were changed`));
    if (side.changed) announce(say`With ${counted(side.ablated.size + side.patched.size)} {0|head|heads} edited: ${first.text.trim()} ${percent(first.probability)}`);
  }

  // A model of vectors: how similar they are to those of the unchanged model.
  #similarities({ position, similarity }) {
    this.loss.replaceChildren();
    if (!similarity) {
      this.bars.replaceChildren(h("li", { class: "empty" }, say`This model outputs vectors and predicts no tokens. Switch heads off: the similarity to the unchanged vector appears here.`));
      this.summary.replaceChildren();
      return;
    }
    const bar = (name, value) => h("li", {}, h("span", { class: "word" }, name), h("span", { class: "track", vars: { "--now": `${100 * Math.max(0, value)}%` }, "aria-hidden": "true" }, h("i")), h("span", { class: "number" }, fixed(value, 3)));
    this.bars.replaceChildren(bar(this.side.isVision ? say`image` : say`whole text`, similarity.input), bar(this.side.label(position), similarity.token));
    this.legend.replaceChildren(say`Similarity to the unchanged vector, as a cosine: 1 means that nothing changed.`);
    this.summary.replaceChildren(say`Similarity to the unchanged vector: ${fixed(similarity.input, 3)}`);
    announce(this.summary.textContent);
  }

  #bar(each, most) {
    const change = each.before === null ? null : each.probability - each.before;
    const vars = { "--now": `${(100 * each.probability) / most}%`, "--then": each.before === null ? "0" : `${(100 * each.before) / most}%` };
    return h(
      "li",
      {},
      h("span", { class: "word", title: say`token number ${each.id}` }, visibleToken(each.text)),
      h("span", { class: "track", vars, "aria-hidden": "true" }, h("i"), change === null ? null : h("u")),
      h("span", { class: "number" }, percent(each.probability), change === null ? null : h("span", { class: change >= 0 ? "up" : "down", title: say`Change in percentage points` }, ` ${say`${(change < 0 ? "" : "+") + percent(change).replace(/\s?%/, "")} pp`}`)),
    );
  }

  #losses(response) {
    if (response.loss === null) {
      this.loss.replaceChildren(...(response.divergence === null ? [] : [diverges(response)]));
      return;
    }
    const parts = [h("span", {}, h("span", { class: "quiet" }, say`Loss on this text`, " "), h("b", { "data-loss": response.loss }, fixed(response.loss, 3)))];
    if (response.loss_before !== null) {
      const change = response.loss - response.loss_before;
      parts.push(h("span", { class: `number ${change > 0 ? "down" : "up"}` }, say`${signed(change, 3)} from ${fixed(response.loss_before, 3)}`));
      parts.push(diverges(response));
    }
    this.loss.replaceChildren(...parts);
  }
}

function diverges(response) {
  return h("span", { class: "quiet", title: say`Kullback–Leibler divergence from the predictions of the unedited model` }, say`KL divergence ${fixed(response.divergence, 3)} nats`);
}

export function signed(value, digits = 1) {
  return `${value < 0 ? "−" : "+"}${fixed(Math.abs(value), digits)}`;
}
