// What the model says at the chosen token, beside what it says with all heads on.

import { clipped, counted, h, say, shown } from "./dom.js";
import { percent } from "./format.js";

const TITLES = {
  next: "What comes next",
  here: "What could stand here",
  classes: "What it is",
  "token classes": "What this token is",
  nothing: "Answers",
};

export class Answers {
  constructor(side) {
    this.side = side;
    this.title = h("h2", {}, TITLES.next);
    this.after = h("p", { class: "quiet" });
    this.bars = h("ol", { class: "bars" });
    this.loss = h("div", { class: "loss" });
    this.how = h("div", { class: "segments", role: "group", "aria-label": "What stands in for heads that are off" }, this.#way("zero", "Zero"), this.#way("mean", "Mean"));
    this.reset = h("button", { type: "button", class: "plain", hidden: true, on: { click: () => side.allOn() } }, "All heads on");
    this.element = h(
      "section",
      { class: "card place-answers", "aria-label": "Answers" },
      h("header", {}, this.title, this.after),
      this.bars,
      this.loss,
      h("div", { class: "row" }, h("span", { class: "quiet" }, "Replace heads that are off with"), this.how, this.reset),
    );
  }

  #way(how, label) {
    return h("button", { type: "button", "data-how": how, on: { click: () => this.side.replaceBy(how) } }, label);
  }

  clear() {
    for (const part of [this.after, this.bars, this.loss]) part.replaceChildren();
  }

  // Which heads are off, and what stands in for them.
  draw() {
    const { side } = this;
    for (const button of this.how.children) button.setAttribute("aria-pressed", String(button.dataset.how === side.how));
    this.reset.hidden = !side.changed;
  }

  show(told) {
    const { side } = this;
    this.title.textContent = TITLES[told.answers];
    const word = side.tokens[told.at] ?? "";
    this.after.replaceChildren();
    if (told.answers === "next") this.after.append("after ", h("span", { class: "word" }, clipped(word)));
    if (told.answers === "here") this.after.append("in place of ", h("span", { class: "word" }, clipped(word)));
    if (!told.top.length) {
      this.bars.replaceChildren(h("li", { class: "empty" }, "This model has no readout: it gives vectors, not words."));
      this.loss.replaceChildren();
      return;
    }
    const most = Math.max(...told.top.map((each) => Math.max(each.chance, each.before ?? 0)), 0.01);
    this.bars.replaceChildren(...told.top.map((each) => this.#bar(each, most)));
    this.#losses(told);
    if (side.changed) say(`With ${counted(side.off.size + side.patched.size, "head")} changed: ${told.top[0].word.trim()} ${percent(told.top[0].chance)}, loss ${told.loss?.toFixed(2) ?? "unknown"}`);
  }

  #bar(each, most) {
    const change = each.before === null ? null : each.chance - each.before;
    const vars = { "--now": `${(100 * each.chance) / most}%`, "--then": each.before === null ? "0" : `${(100 * each.before) / most}%` };
    return h(
      "li",
      {},
      h("span", { class: "word", title: `token ${each.id}` }, shown(each.word)),
      h("span", { class: "track", vars, "aria-hidden": "true" }, h("i"), change === null ? null : h("u")),
      h("span", { class: "number" }, percent(each.chance), change === null ? null : h("span", { class: change >= 0 ? "up" : "down" }, ` ${signed(change * 100)}`)),
    );
  }

  #losses(told) {
    if (told.loss === null) {
      this.loss.replaceChildren(...(told.divergence === null ? [] : [diverges(told)]));
      return;
    }
    const parts = [h("span", {}, h("span", { class: "quiet" }, "Loss on this text "), h("b", { "data-loss": told.loss }, told.loss.toFixed(3)))];
    if (told.loss_before !== null) {
      const change = told.loss - told.loss_before;
      parts.push(h("span", { class: `number ${change > 0 ? "down" : "up"}` }, `${signed(change, 3)} from ${told.loss_before.toFixed(3)}`));
      parts.push(diverges(told));
    }
    this.loss.replaceChildren(...parts);
  }
}

function diverges(told) {
  return h("span", { class: "quiet", title: "Kullback–Leibler divergence of this answer from that of the full model" }, `KL divergence ${told.divergence.toFixed(3)} nats`);
}

export function signed(value, digits = 1) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
}
