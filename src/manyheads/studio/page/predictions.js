// Ablation, and the predictions at the selected token with and without it.

import { headLink } from "./atlas.js";
import { pluralise, h, announce } from "./dom.js";
import { percent } from "./format.js";
import { visibleToken } from "./token_text.js";

const TITLES = {
  "next token": "Next token",
  "masked token": "Predicted token",
  classes: "Predicted class",
  "token classes": "Class of this token",
  none: "Vector",
};

const MAX_NAMES = 12;

export class Predictions {
  constructor(side) {
    this.side = side;
    this.title = h("h2", {}, TITLES["next token"]);
    this.after = h("p", { class: "quiet" });
    this.bars = h("ol", { class: "bars" });
    this.legend = h("p", { class: "legend" });
    // Where the predictions are not beside the text, the first one stays in sight.
    this.summary = h("p", { class: "summary", "aria-hidden": "true" });
    this.loss = h("div", { class: "loss" });
    this.replaceWith = h("div", { class: "segments", role: "group", "aria-label": "Replace the output of ablated heads with" }, this.#option("zero", "Zero"), this.#option("mean", "Mean"));
    this.count = h("p", { class: "quiet" });
    this.reset = h("button", { type: "button", class: "plain", hidden: true, on: { click: () => side.restoreHeads() } }, "Restore all heads");
    this.element = h(
      "section",
      { class: "card place-predictions", "aria-label": "Predictions" },
      h("header", {}, this.title, this.after),
      this.bars,
      this.legend,
      this.loss,
      h("h3", {}, "Ablation"),
      this.count,
      h("div", { class: "row" }, h("span", { class: "quiet" }, "Replace with"), this.replaceWith, this.reset),
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
    const effect = side.model.output === "none" ? "how far the vector moves" : "how the predictions change";
    if (side.ablated.size) this.count.replaceChildren(`${pluralise(side.ablated.size, "head")} switched off`, ...names, ".");
    else this.count.textContent = `Switch heads off to see ${effect}.`;
  }

  show(response) {
    const { side } = this;
    this.title.textContent = TITLES[response.output];
    const word = h("span", { class: "word" }, side.label(response.position));
    this.after.replaceChildren();
    if (response.output === "next token") this.after.append("after ", word);
    if (response.output === "masked token") this.after.append("in place of ", word);
    this.legend.replaceChildren();
    if (!response.top.length) {
      this.#similarities(response);
      return;
    }
    const most = Math.max(...response.top.map((each) => Math.max(each.probability, each.before ?? 0)), 0.01);
    this.bars.replaceChildren(...response.top.map((each) => this.#bar(each, most)));
    this.#losses(response);
    const [first] = response.top;
    const change = first.before === null ? [] : [` (${percent(first.before)} before)`];
    this.summary.replaceChildren(`${TITLES[response.output]}: `, h("span", { class: "word" }, visibleToken(first.text)), ` ${percent(first.probability)}`, ...change);
    if (first.before !== null) this.legend.append(h("span", {}, h("span", { class: "tick" }), "before the heads were changed"));
    if (side.changed) announce(`With ${pluralise(side.ablated.size + side.patched.size, "head")} edited: ${response.top[0].text.trim()} ${percent(response.top[0].probability)}, loss ${response.loss?.toFixed(2) ?? "unknown"}`);
  }

  // A model of vectors: how similar they are to those of the unchanged model.
  #similarities({ position, similarity }) {
    this.loss.replaceChildren();
    if (!similarity) {
      this.bars.replaceChildren(h("li", { class: "empty" }, "This model outputs vectors and predicts no tokens. Switch heads off: the similarity to the unchanged vector appears here."));
      this.summary.replaceChildren();
      return;
    }
    const bar = (name, value) => h("li", {}, h("span", { class: "word" }, name), h("span", { class: "track", vars: { "--now": `${100 * Math.max(0, value)}%` }, "aria-hidden": "true" }, h("i")), h("span", { class: "number" }, value.toFixed(3)));
    this.bars.replaceChildren(bar(this.side.isVision ? "image" : "whole text", similarity.input), bar(this.side.label(position), similarity.token));
    this.legend.replaceChildren("Similarity to the unchanged vector, as a cosine: 1 means that nothing changed.");
    this.summary.replaceChildren(`Similarity to the unchanged vector: ${similarity.input.toFixed(3)}`);
    announce(this.summary.textContent);
  }

  #bar(each, most) {
    const change = each.before === null ? null : each.probability - each.before;
    const vars = { "--now": `${(100 * each.probability) / most}%`, "--then": each.before === null ? "0" : `${(100 * each.before) / most}%` };
    return h(
      "li",
      {},
      h("span", { class: "word", title: `token ${each.id}` }, visibleToken(each.text)),
      h("span", { class: "track", vars, "aria-hidden": "true" }, h("i"), change === null ? null : h("u")),
      h("span", { class: "number" }, percent(each.probability), change === null ? null : h("span", { class: change >= 0 ? "up" : "down", title: "Change in percentage points" }, ` ${change < 0 ? "" : "+"}${percent(change).replace("%", " pp")}`)),
    );
  }

  #losses(response) {
    if (response.loss === null) {
      this.loss.replaceChildren(...(response.divergence === null ? [] : [diverges(response)]));
      return;
    }
    const parts = [h("span", {}, h("span", { class: "quiet" }, "Loss on this text "), h("b", { "data-loss": response.loss }, response.loss.toFixed(3)))];
    if (response.loss_before !== null) {
      const change = response.loss - response.loss_before;
      parts.push(h("span", { class: `number ${change > 0 ? "down" : "up"}` }, `${signed(change, 3)} from ${response.loss_before.toFixed(3)}`));
      parts.push(diverges(response));
    }
    this.loss.replaceChildren(...parts);
  }
}

function diverges(response) {
  return h("span", { class: "quiet", title: "Kullback–Leibler divergence from the predictions of the unedited model" }, `KL divergence ${response.divergence.toFixed(3)} nats`);
}

export function signed(value, digits = 1) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
}
