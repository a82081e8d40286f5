// What the model predicts at each token, and the texts where important heads are sharpest.

import { css, inkOn, sequential } from "./color.js";
import { h } from "./dom.js";
import { exampleElement } from "./example.js";
import { percent } from "./format.js";
import { tokenStep } from "./grid.js";
import { say, sayParts } from "./language.js";
import { listedToken } from "./token_text.js";

const AFTER = {
  "next token": (token, place) => sayParts`After ${token} (token ${place})`,
  "masked token": (token, place) => sayParts`In place of ${token} (token ${place})`,
  "token classes": (token, place) => sayParts`The class of ${token} (token ${place})`,
};
const predicted = { elements: new Map(), rows: new Map(), at: null };

function buildPredictions() {
  const place = document.getElementById("predicted-text");
  const { output, rows } = data.predictions;
  const tokens = data.tokens.decoder ?? data.tokens.main;
  if (!place || output === "classes") return;
  for (const row of rows) predicted.rows.set(row[0], row);
  const elements = tokens.map((token, index) => {
    const element = h("span", { class: predicted.rows.has(index) ? "token chosen" : "token", "data-index": index }, token.replace(/\n/g, "⏎\n"));
    predicted.elements.set(index, element);
    return element;
  });
  place.replaceChildren(...elements);
  const pick = (event) => { const { index } = event.target.dataset; if (predicted.rows.has(Number(index))) showPrediction(Number(index)); };
  for (const name of ["mouseover", "click"]) place.addEventListener(name, pick);
  place.addEventListener("keydown", (event) => {
    const by = tokenStep(event);
    if (!by) return;
    event.preventDefault();
    const places = [...predicted.rows.keys()];
    const next = places[places.indexOf(predicted.at) + by];
    if (next !== undefined) showPrediction(next);
  });
  shadePredictions();
  showPrediction(rows.at(-1)[0]);
}

// A token is shaded by how probable it was where it stands.
function shadePredictions() {
  const shift = data.predictions.output === "next token" ? 1 : 0;
  for (const [position, [, , , probability]] of predicted.rows) {
    const element = predicted.elements.get(position + shift);
    if (probability === null || !element) continue;
    const color = sequential(probability);
    element.style.background = css(color);
    element.style.color = inkOn(color);
    element.title = say`${percent(probability)} probable`;
  }
}

function showPrediction(position) {
  const { output, names } = data.predictions;
  const [, top, answer, probability] = predicted.rows.get(position);
  predicted.elements.get(predicted.at)?.classList.remove("at");
  predicted.elements.get(position).classList.add("at");
  predicted.at = position;
  const token = (text) => h("bdi", { class: "word" }, listedToken(text));
  const rows = [...top];
  if (answer !== null && !top.some(([name]) => name === answer)) rows.push([answer, probability]);
  const bars = rows.map(([name, part]) => h("li", { class: name === answer ? "answer" : null },
    token(names[name]), h("span", { class: "bar", "aria-hidden": "true" }, h("b", { vars: { width: `${100 * part}%` } })), h("span", { class: "number" }, percent(part))));
  document.getElementById("predicted-after").replaceChildren(...AFTER[output](token(predicted.elements.get(position).textContent), position));
  document.getElementById("predicted-top").replaceChildren(...bars);
}

function buildExamples() {
  const { heads, passages } = data.examples;
  for (const [index, examples] of heads) {
    const { stack, keys } = data.heads[index];
    const elements = examples.map((example) => {
      const tokens = passages[example.text];
      return exampleElement(example, tokens?.[stack], keys === stack ? null : tokens?.[keys]);
    });
    document.querySelector(`[data-examples="${index}"]`).replaceChildren(...elements);
  }
}

buildPredictions();
buildExamples();
document.addEventListener("recolor", () => {
  shadePredictions();
  buildExamples();
});
