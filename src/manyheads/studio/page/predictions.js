// Ablation, and the predictions at the selected token with and without it.

import { pluralise, h, announce } from "./dom.js";
import { percent } from "./format.js";
import { visibleToken } from "./token_text.js";

const TITLES = {
  "next token": "Next token",
  "masked token": "Predicted token",
  classes: "Predicted class",
  "token classes": "Class of this token",
  none: "Predictions",
};

const MAX_NAMES = 12;

export class Predictions {
  constructor(side) {
    this.side = side;
    this.title = h("h2", {}, TITLES["next token"]);
    this.after = h("p", { class: "quiet" });
    this.bars = h("ol", { class: "bars" });
    this.loss = h("div", { class: "loss" });
    this.replaceWith = h("div", { class: "segments", role: "group", "aria-label": "Replace the output of ablated heads with" }, this.#option("zero", "Zero"), this.#option("mean", "Mean"));
    this.count = h("p", { class: "quiet" });
    this.reset = h("button", { type: "button", class: "plain", hidden: true, on: { click: () => side.restoreHeads() } }, "Restore all heads");
    this.element = h(
      "section",
      { class: "card place-predictions", "aria-label": "Predictions" },
      h("header", {}, this.title, this.after),
      this.bars,
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
    for (const part of [this.after, this.bars, this.loss]) part.replaceChildren();
  }

  // Which heads are ablated, and what replaces them.
  draw() {
    const { side } = this;
    for (const button of this.replaceWith.children) button.setAttribute("aria-pressed", String(button.dataset.how === side.replaceWith));
    this.reset.hidden = !side.changed;
    const names = side.ablated.size > MAX_NAMES ? "" : `: ${[...side.ablated].join(", ")}`;
    this.count.textContent = side.ablated.size ? `${pluralise(side.ablated.size, "head")} switched off${names}.` : "Switch heads off to see how the predictions change.";
  }

  show(response) {
    const { side } = this;
    this.title.textContent = TITLES[response.output];
    const word = h("span", { class: "word" }, side.label(response.position));
    this.after.replaceChildren();
    if (response.output === "next token") this.after.append("after ", word);
    if (response.output === "masked token") this.after.append("in place of ", word);
    if (!response.top.length) {
      this.bars.replaceChildren(h("li", { class: "empty" }, "This model outputs vectors and predicts no tokens."));
      this.loss.replaceChildren();
      return;
    }
    const most = Math.max(...response.top.map((each) => Math.max(each.probability, each.before ?? 0)), 0.01);
    this.bars.replaceChildren(...response.top.map((each) => this.#bar(each, most)));
    this.#losses(response);
    if (side.changed) announce(`With ${pluralise(side.ablated.size + side.patched.size, "head")} edited: ${response.top[0].text.trim()} ${percent(response.top[0].probability)}, loss ${response.loss?.toFixed(2) ?? "unknown"}`);
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
