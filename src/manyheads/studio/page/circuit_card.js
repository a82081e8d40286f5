// "Circuit": which edges between heads and MLPs carry what sets the open text apart from a corrupted one. The
// search runs in the background and can be stopped; the edges in the picture can be evaluated on their own.

import { errorMessage, wasAborted } from "./api.js";
import { headLink } from "./atlas.js";
import { showCircuit } from "./circuit.js";
import { announce, debounce, h } from "./dom.js";
import { counted, decimal, fixed, percent } from "./format.js";
import { say, sayParts, translateFilled } from "./language.js";
import { WordChoice } from "./why_card.js";
import { namedWords } from "./why_question.js";
import "./russian_circuit.js";
import "./russian_circuit_card.js";

const HEAD = /^L\d+H\d+$/;
// What the methods cost; names are those of the papers.
const METHODS = {
  "eap-ig": () => say`EAP-IG: gradients along the way between both texts`,
  eap: () => say`EAP: one gradient, fastest`,
  "eap-ig-activations": () => say`EAP-IG over activations: slower`,
  "atp*": () => say`AtP*: softmax computed again`,
  relp: () => say`RelP: relevance instead of gradients`,
  exact: () => say`exact: one run per edge, slowest`,
};

export class CircuitCard {
  constructor(side) {
    Object.assign(this, { side, running: false, edges: [], turn: 0 });
    this.button = h("button", { type: "button", class: "circuit-open", "aria-expanded": "false", on: { click: () => this.toggle() } }, say`Which circuit?`);
    this.title = h("h2", { tabindex: -1 }, say`A circuit`);
    this.source = h("textarea", { rows: 2, "aria-label": say`Corrupted text`, placeholder: say`The same text with one word changed`, spellcheck: "false", on: { input: () => this.#typed() } });
    this.suggest = h("button", { type: "button", on: { click: () => this.#suggest() } }, say`Suggest one`);
    this.answer = new WordChoice(say`The answer`, () => this.#ask());
    this.foil = new WordChoice(say`The wrong answer`, () => this.#ask());
    const named = (choice, label) => h("span", { class: "circuit-word" }, h("span", { class: "quiet" }, label), choice.element);
    this.words = h("div", { class: "circuit-run", hidden: true }, named(this.answer, say`The answer`), named(this.foil, say`The wrong answer`));
    this.method = h("select", { "aria-label": say`Method` }, Object.entries(METHODS).map(([name, label]) => h("option", { value: name }, label())));
    this.start = h("button", { type: "button", class: "primary", on: { click: () => (this.running ? this.stop() : this.#find()) } });
    this.reason = h("p", { class: "why-reason", role: "status", hidden: true });
    this.summary = h("p", { class: "why-summary" });
    this.warning = h("p", { class: "why-reason", role: "note", hidden: true });
    this.graph = h("div", {});
    this.keep = h("button", { type: "button", class: "primary", on: { click: () => this.#evaluate() } }, say`Keep only these edges`);
    this.picked = h("p", { class: "quiet", role: "status" });
    this.verdict = h("div", { class: "circuit-verdict", role: "status" });
    this.result = h("div", { class: "circuit-result", hidden: true }, this.summary, this.warning, this.graph, this.picked, h("div", { class: "row" }, this.keep), this.verdict);
    const close = h("button", { type: "button", class: "plain", on: { click: () => this.toggle() } }, say`Close`);
    this.element = h(
      "section",
      { class: "card circuit-card", "aria-label": say`A circuit`, hidden: true },
      h("header", {}, this.title, close),
      h("p", { class: "quiet why-about" }, say`Which heads and MLPs work together, and along which edges? The text above is the clean one. A corrupted text has as many tokens but another answer; every edge is scored by how much of the difference it carries. Switched-off heads and cut links are not used here.`),
      h("div", { class: "places-source" }, h("div", { class: "circuit-label" }, h("h3", {}, say`Corrupted text`), this.suggest), this.source),
      this.reason,
      this.words,
      h("div", { class: "row circuit-run" }, this.method, this.start),
      this.result,
    );
    this.askSoon = debounce(250, () => this.#ask());
    this.#drawStart();
  }

  get isOpen() {
    return !this.element.hidden;
  }

  toggle() {
    this.element.hidden = this.isOpen;
    this.button.setAttribute("aria-expanded", String(this.isOpen));
    if (!this.isOpen) {
      this.stop();
      this.button.focus();
      return;
    }
    this.update();
    this.title.focus({ preventScroll: true });
    this.element.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  // Another text, token or model has its own corrupted text; edits of heads change nothing here.
  update() {
    const { side } = this;
    const able = side.prediction !== null && ["next token", "masked token"].includes(side.model.output);
    this.button.hidden = !able;
    if (!able && this.isOpen) this.toggle();
    if (!this.isOpen) return;
    const question = JSON.stringify([side.model.name, side.text, side.at]);
    if (question === this.question) return;
    this.question = question;
    this.source.value = side.example?.source ?? side.source ?? "";
    this.#typed(0);
  }

  stop() {
    this.turn += 1;
    for (const kind of ["circuit", "circuit_evaluation"]) this.side.api.stop(kind);
    this.running = false;
    this.#drawStart();
  }

  get #body() {
    const { side } = this;
    return { model: side.model.name, text: side.text, position: side.at, source: this.source.value };
  }

  get #words() {
    return { ...this.answer.field("answer"), ...this.foil.field("foil") };
  }

  #drawStart(fraction = null) {
    this.start.textContent = !this.running ? say`Find the circuit` : fraction === null ? say`Stop` : say`Stop (${percent(fraction)})`;
    this.start.disabled = !this.running && !this.ready;
    this.element?.setAttribute("aria-busy", String(this.running));
  }

  #typed(wait = 1) {
    this.ready = false;
    this.stop();
    this.answer.reset();
    this.foil.reset();
    this.result.hidden = true;
    if (wait) this.askSoon();
    else this.#ask();
  }

  // The words that both texts predict, or why the texts cannot be compared.
  async #ask() {
    if (!this.isOpen) return;
    this.stop();
    this.result.hidden = true;
    const empty = this.source.value === "";
    let words = { reason: "" };
    try {
      if (!empty) words = await this.side.api.ask("circuit_words", { ...this.#body, ...this.#words });
    } catch (error) {
      if (!wasAborted(error)) this.side.failed(error);
      return;
    }
    this.ready = words.reason === undefined;
    this.#refuse(empty ? say`Type a corrupted text, or take a suggestion.` : translateFilled(words.reason ?? ""));
    this.words.hidden = !this.ready;
    if (this.ready) {
      this.answer.show(words.answers, words.answer, []);
      this.foil.show(words.foils, words.foil, []);
    }
    this.#drawStart();
  }

  #refuse(reason) {
    this.reason.textContent = reason.charAt(0).toUpperCase() + reason.slice(1);
    this.reason.hidden = !reason;
  }

  async #suggest() {
    const { side } = this;
    const { source, ...body } = this.#body;
    this.suggest.disabled = true;
    try {
      const { text } = await side.api.ask("circuit_suggestion", body);
      if (text) this.source.value = text;
      this.#typed(0);
      if (!text) this.#refuse(say`No token of this text can be replaced by one other: type a corrupted text.`);
    } catch (error) {
      if (!wasAborted(error)) side.failed(error);
    }
    this.suggest.disabled = false;
  }

  async #find() {
    const turn = ++this.turn;
    this.running = true;
    this.result.hidden = true;
    this.#refuse("");
    this.#drawStart();
    try {
      await this.side.api.stream("circuit", { ...this.#body, ...this.#words, method: this.method.value }, (line) => {
        if (turn !== this.turn) return;
        if (line.done) this.#show(line);
        else this.#drawStart(line.fraction);
      });
    } catch (error) {
      if (turn === this.turn && !wasAborted(error)) this.#refuse(errorMessage(error));
    }
    if (turn !== this.turn) return;
    this.running = false;
    this.#drawStart();
  }

  #show(response) {
    const [answer, foil] = namedWords(response.answer, response.foil);
    this.summary.textContent = say`Logit of “${answer}” minus that of “${foil}”: ${decimal(response.clean)} in the clean text, ${decimal(response.corrupted)} in the corrupted one. Blue edges help the answer, orange ones work against it.`;
    this.warning.textContent = response.warning ? say`Beware: ${translateFilled(response.warning)}.` : say`One pair of texts: scores have no standard error, and another pair may have another circuit.`;
    this.warning.hidden = false;
    this.verdict.replaceChildren();
    this.picked.replaceChildren();
    this.result.hidden = false;
    // The width of the graph is known once it can be seen.
    showCircuit(this.graph, response.view, [], {
      onDraw: (edges) => this.#drawn(edges),
      onPick: (node) => this.#pick(node),
    });
    announce(this.summary.textContent);
  }

  // A head is selected in the whole page; other nodes have no attention to show.
  #pick(node) {
    if (!HEAD.test(node)) return;
    this.side.lead(node);
    this.picked.replaceChildren(...sayParts`${headLink(this.side, node)} is selected: its attention is drawn above.`);
  }

  // What was said about other edges is no longer true.
  #drawn(edges) {
    this.edges = edges.map(([writer, node, port]) => [writer, port ? `${node} ${port}` : node]);
    this.verdict.replaceChildren();
    this.side.api.stop("circuit_evaluation");
    this.keep.disabled = !edges.length;
  }

  async #evaluate() {
    const { side, edges } = this;
    this.keep.disabled = true;
    this.verdict.textContent = say`Evaluating…`;
    try {
      const response = await side.api.ask("circuit_evaluation", { ...this.#body, ...this.#words, edges });
      this.verdict.replaceChildren(...judged(response));
    } catch (error) {
      if (!wasAborted(error)) this.verdict.textContent = errorMessage(error);
    }
    this.keep.disabled = !this.edges.length;
  }
}

function judged({ edges, faithfulness, random, value, clean, corrupted }) {
  if (faithfulness === null) return [h("p", {}, say`Both texts give the same logits: there is nothing to keep.`)];
  const mean = random.reduce((sum, each) => sum + each, 0) / random.length;
  return [
    h("p", {}, h("b", {}, say`Faithfulness ${hundredths(faithfulness)}`)),
    h("p", {}, say`With ${counted(edges)} {0|edge|edges} alone, and all others from the corrupted text, the difference is ${decimal(value)}: ${percent(faithfulness)} of the way from ${decimal(corrupted)} (the corrupted text, 0) to ${decimal(clean)} (the clean one, 1).`),
    h("p", {}, say`As many random edges: ${hundredths(mean)} on average, ${hundredths(Math.max(...random))} at most, of ${random.length} draws.`),
    h("p", { class: "quiet" }, say`These runs are exact, but one pair has no standard error: try others before you trust the circuit.`),
  ];
}

function hundredths(value) {
  const text = fixed(value, 2);
  return /[1-9]/.test(text) ? text : text.replace("−", "");
}
