// Ablation, and the predictions at the selected token with and without it.

import { headLink } from "./atlas.js";
import { h, announce } from "./dom.js";
import { counted, fixed, percent } from "./format.js";
import { say, sayParts, translate } from "./language.js";
import { visibleToken } from "./token_text.js";

const TITLES = {
  "next token": () => say`Next token`,
  "masked token": () => say`Predicted token`,
  classes: () => say`Predicted class`,
  "token classes": () => say`Class of this token`,
  none: () => say`Vector`,
};

const MAX_NAMES = 12;
const CALM = window.matchMedia("(prefers-reduced-motion: reduce)");
const MOVES = { duration: 900, easing: "ease-in-out" };

export class Predictions {
  constructor(side) {
    this.side = side;
    this.title = h("h2", {}, TITLES["next token"]());
    this.after = h("p", { class: "quiet" });
    this.bars = h("ol", { class: "bars" });
    this.legend = h("p", { class: "legend" });
    // Switches the heads of the example off and on, to see what they are for.
    this.experiment = h("button", { type: "button", class: "primary experiment", hidden: true, on: { click: () => this.#switch() } });
    // Where the predictions are not beside the text, the first one stays in sight.
    this.summary = h("p", { class: "summary", "aria-hidden": "true" });
    // The same at the end of the column, while the bars are scrolled out of it.
    this.beside = h("p", { class: "summary beside", "aria-hidden": "true" });
    new IntersectionObserver(([bars]) => this.beside.classList.toggle("needed", !bars.isIntersecting)).observe(this.bars);
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
      this.experiment,
      this.loss,
      h("div", { class: "row ablation" }, h("h3", {}, say`Ablation`), h("span", { class: "with" }, h("span", { class: "quiet" }, say`Replace with`), this.replaceWith)),
      this.count,
      this.reset,
    );
  }

  #option(how, label) {
    return h("button", { type: "button", "data-how": how, on: { click: () => this.side.setReplacement(how) } }, label);
  }

  clear() {
    for (const part of [this.after, this.bars, this.legend, this.loss, this.summary, this.beside]) part.replaceChildren();
  }

  // Which heads are ablated, and what replaces them.
  draw() {
    const { side } = this;
    for (const button of this.replaceWith.children) button.setAttribute("aria-pressed", String(button.dataset.how === side.replaceWith));
    this.reset.hidden = !side.changed;
    const { ablate = [], button } = (!side.blank && side.example) || {};
    this.experiment.hidden = !ablate.length;
    if (ablate.length) this.experiment.textContent = !this.#isOff() ? translate(button) : ablate.length > 1 ? say`Switch them on again` : say`Switch it on again`;
    const names = side.ablated.size > MAX_NAMES ? [] : [...side.ablated].flatMap((head, place) => [place ? ", " : ": ", headLink(side, head)]);
    if (side.ablated.size) this.count.replaceChildren(say`${counted(side.ablated.size)} {0|head|heads} switched off`, ...names, ".");
    else this.count.textContent = side.model.output === "none" ? say`Switch heads off to see how far the vector moves.` : say`Switch heads off to see how the predictions change.`;
  }

  #isOff() {
    return this.side.example.ablate.every((head) => this.side.ablated.has(head));
  }

  #switch() {
    this.side.switchHeads(this.side.example.ablate, this.#isOff());
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
    this.#showBars(response);
    this.#losses(response);
    const [first] = response.top;
    const change = first.before === null ? [] : [` ${say`(${percent(first.before)} before)`}`];
    this.#summarize(`${TITLES[response.output]()}: `, h("span", { class: "word" }, visibleToken(first.text)), ` ${percent(first.probability)}`, ...change);
    if (first.before !== null) this.legend.append(h("span", {}, h("span", { class: "tick" }), say`before the change`));
    const edited = side.ablated.size + side.patched.size;
    if (!edited && side.links.length) announce(say`With ${counted(side.links.length)} {0|link|links} cut: ${first.text.trim()} ${percent(first.probability)}`);
    if (edited) announce(say`With ${counted(edited)} {0|head|heads} edited: ${first.text.trim()} ${percent(first.probability)}`);
  }

  #summarize(...words) {
    this.summary.replaceChildren(...words);
    this.beside.replaceChildren(...[...this.summary.childNodes].map((node) => node.cloneNode(true)));
  }

  // A model of vectors: how similar they are to those of the unchanged model.
  #similarities({ position, similarity }) {
    this.loss.replaceChildren();
    if (!similarity) {
      this.bars.replaceChildren(h("li", { class: "empty" }, say`This model outputs vectors and predicts no tokens. Switch heads off: the similarity to the unchanged vector appears here.`));
      this.#summarize();
      return;
    }
    const bar = (name, value) => h("li", {}, h("span", { class: "word" }, name), h("span", { class: "track", vars: { "--now": `${100 * Math.max(0, value)}%` }, "aria-hidden": "true" }, h("i")), h("span", { class: "number" }, fixed(value, 3)));
    this.bars.replaceChildren(bar(this.side.isVision ? say`image` : say`whole text`, similarity.input), bar(this.side.label(position), similarity.token));
    this.legend.replaceChildren(say`Similarity to the unchanged vector, as a cosine: 1 means that nothing changed.`);
    this.#summarize(say`Similarity to the unchanged vector: ${fixed(similarity.input, 3)}`);
    announce(this.summary.textContent);
  }

  // At the same place of the same text, rows move to their new places and values run to the new ones.
  #showBars({ top, position }) {
    const about = JSON.stringify([this.side.model.name, this.side.text, position]);
    const moves = about === this.about && !CALM.matches;
    this.about = about;
    const before = new Map([...this.bars.children].map((row) => [row.dataset.token, { top: row.offsetTop, value: Number(row.dataset.value) }]));
    const rows = top.map((each) => this.#bar(each));
    this.bars.replaceChildren(...rows);
    if (!moves) return;
    rows.forEach((row, place) => {
      const old = before.get(row.dataset.token);
      if (!old) return;
      row.animate([{ transform: `translateY(${old.top - row.offsetTop}px)` }, { transform: "none" }], MOVES);
      row.querySelector("i").animate([{ width: `${100 * old.value}%` }, { width: `${100 * top[place].probability}%` }], MOVES);
      runNumber(row.querySelector(".value"), old.value, top[place].probability);
    });
  }

  // A full bar is 100%.
  #bar(each) {
    const change = each.before === null ? null : each.probability - each.before;
    const vars = { "--now": `${100 * each.probability}%`, "--then": each.before === null ? "0" : `${100 * each.before}%` };
    return h(
      "li",
      { "data-token": each.id, "data-value": each.probability },
      h("span", { class: "word", title: say`token number ${each.id}` }, visibleToken(each.text)),
      h("span", { class: "track", vars, "aria-hidden": "true" }, h("i"), change === null ? null : h("u")),
      h("span", { class: "number" }, h("span", { class: "value" }, percent(each.probability)), change === null ? null : h("span", { class: change >= 0 ? "up" : "down", title: say`Change in percentage points` }, ` ${say`${(change < 0 ? "" : "+") + percent(change).replace(/\s?%/, "")} pp`}`)),
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

// A percentage that runs from one value to another.
function runNumber(place, from, to) {
  const begun = performance.now();
  const step = (now) => {
    const part = Math.min(1, Math.max(0, now - begun) / MOVES.duration);
    place.textContent = percent(from + (to - from) * (part < 0.5 ? 2 * part ** 2 : 1 - 2 * (1 - part) ** 2));
    if (part < 1 && place.isConnected) requestAnimationFrame(step);
  };
  if (from !== to) step(begun);
}

function diverges(response) {
  return h("span", { class: "quiet", title: say`Kullback–Leibler divergence from the predictions of the unedited model` }, say`KL divergence ${fixed(response.divergence, 3)} nats`);
}

export function signed(value, digits = 1) {
  return `${value < 0 ? "−" : "+"}${fixed(Math.abs(value), digits)}`;
}
