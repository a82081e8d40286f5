// One model on one text: its selection, its edits and its views. Two sides make a comparison.

import { Predictions } from "./predictions.js";
import { Api, errorMessage, showError, wasAborted } from "./api.js";
import { Atlas } from "./atlas.js";
import { CircuitCard } from "./circuit_card.js";
import { headColor, MOST_HEADS } from "./color.js";
import { debounce, announce } from "./dom.js";
import { counted, percent } from "./format.js";
import { frame } from "./frame.js";
import { ImageView } from "./image_view.js";
import { kindInWords } from "./kinds.js";
import { say, translateFilled } from "./language.js";
import { LineView } from "./line_view.js";
import { AttentionList } from "./attention_list.js";
import { MapView } from "./map_view.js";
import { inOrder, isDefined, setMeasures, clearestHeads } from "./measures.js";
import { Patching } from "./patching.js";
import { Patterns } from "./patterns.js";
import { exampleOf, MOST_LINKS, restored, stateOf } from "./state.js";
import { joinedTokens, tokenLabel } from "./token_text.js";
import { spacedTokens, Tokens } from "./tokens.js";
import { Generation } from "./generation.js";
import { Why } from "./why_card.js";
import { CutLinks } from "./why_links.js";
import { LinkReasons } from "./why_reasons.js";
import { Worth } from "./worth.js";

const NOTHING = { positions: [], weights: [] };

export class Side {
  constructor(models, limits, changed) {
    this.models = models;
    this.limits = limits;
    this.onChange = changed;
    this.api = new Api();
    this.failed = (error, words = errorMessage(error)) => {
      if (!wasAborted(error)) showError(words);
    };
    Object.assign(this, { tokens: [], groups: new Map(), losses: null, selected: [], ablated: new Set(), patched: new Set(), links: [], linksOf: "", source: "", replaceWith: "zero" });
    Object.assign(this, { at: null, hovered: null, view: "lines", statistic: "induction", statistics: null, kinds: {}, nearest: {}, text: "", prediction: null });
    this.strip = new Tokens({ hover: (index) => this.hover(index), pick: (index) => this.select(index) });
    this.worth = new Worth(this);
    this.atlas = new Atlas(this);
    this.predictions = new Predictions(this);
    this.attentionList = new AttentionList(this);
    this.lines = new LineView(this);
    this.map = new MapView(this);
    this.imageView = new ImageView(this);
    this.generation = new Generation(this);
    this.patching = new Patching(this);
    this.cuts = new CutLinks(this);
    this.reasons = new LinkReasons(this);
    this.why = new Why(this);
    this.circuit = new CircuitCard(this);
    this.runSoon = debounce(450, () => this.run());
    this.#showSoon = debounce(30, () => this.#show());
    this.frame = frame(this);
    this.element = this.frame.element;
  }

  #showSoon;

  // Which tokens are generated, and which have white space before them.
  #marks = {};

  // The number of texts that were started.
  #turn = 0;

  get isVision() {
    return this.model.input === "image";
  }

  // The current token: the one under the pointer, else the selected one.
  get focus() {
    return this.hovered ?? this.at;
  }

  // Whether there is no input.
  get blank() {
    return this.isVision ? !this.imageView.pixels : !this.text;
  }

  get input() {
    return this.isVision ? this.imageView.pixels : this.text;
  }

  // The example that is shown, if it is one.
  get example() {
    return exampleOf(this.model, this.text);
  }

  // The measure that colors the heads: the selected one, or another if this text does not define it.
  get measure() {
    if (this.#colorsByItself) return this.statistic;
    if (!this.statistics || isDefined(this.statistics, this.statistic)) return this.statistic;
    return inOrder(this.statistics).find((name) => isDefined(this.statistics, name)) ?? this.statistic;
  }

  // Whether the heads are colored by their kinds, or their worth for the prediction.
  get #colorsByItself() {
    return this.statistic === "kind" || (this.statistic === "worth" && this.worth.able);
  }

  get changed() {
    return this.ablated.size + this.patched.size + this.links.length > 0;
  }

  get base() {
    const given = this.isVision ? { image: this.imageView.pixels } : { text: this.text };
    return { model: this.model.name, ...given, edits: this.#edits() };
  }

  #edits() {
    if (!this.changed) return {};
    const patched = this.patched.size ? { patched: [...this.patched], source: this.source } : {};
    return { ablated: [...this.ablated], replace_with: this.replaceWith, ...patched, links: this.links };
  }

  colorOf(head) {
    const place = this.selected.indexOf(head);
    return place < 0 ? null : headColor(place);
  }

  kindOf(head) {
    return this.kinds[head]?.[0]?.name ?? null;
  }

  // Its kind with score, interval and sample, once that is measured.
  describeKind(head) {
    return head in this.kinds ? kindInWords(this.kinds[head], this.nearest[head]) : null;
  }

  // The name of a token in lists and drawings.
  label(index, most) {
    return tokenLabel(this.tokens[index] ?? "", this.groups.get(index), most);
  }

  // The state for the address bar.
  state() {
    return stateOf(this);
  }

  async restore(given) {
    Object.assign(this, restored(given, this.models, MOST_HEADS));
    this.patching.source.value = this.source;
    this.atlas.build(this.model.layers);
    this.frame.open();
    // Another model may want the image in another size.
    if (this.isVision) this.imageView.fit();
    await this.run();
  }

  openModel(name) {
    this.api.stopAll();
    this.generation.past = [];
    const { example } = this;
    Object.assign(this, { statistics: null, tokens: [], kinds: {}, nearest: {}, patterns: null });
    const state = { ...this.state(), m: name, o: "", p: "", k: undefined, q: undefined, h: undefined, at: undefined };
    // Another model has other examples, but keeps what was typed.
    this.restore(example ? { ...state, t: undefined, c: undefined } : state);
  }

  // An example starts afresh, with its own heads.
  open(example) {
    this.api.stopAll();
    this.restore({ m: this.model.name, t: example.text, v: this.view });
  }

  setText(text, at = null) {
    this.frame.prompt.value = text;
    this.at = at;
    this.run();
  }

  // Run the model: tokens first, then statistics, then kinds.
  async run() {
    this.runSoon.cancel();
    this.generation.stop();
    this.worth.stop();
    this.text = this.frame.prompt.value;
    this.hovered = null;
    // Links belong to the tokens of one text.
    if (this.input !== this.linksOf) Object.assign(this, { links: [], linksOf: this.input });
    const turn = ++this.#turn;
    if (this.blank) {
      this.#empty();
      return;
    }
    this.frame.busy(true);
    try {
      const response = await this.api.ask("tokens", this.base);
      const { tokens, losses } = response;
      const groups = joinedTokens(response.letters).flatMap((group) => tokens.slice(group.start, group.stop).map((_, place) => [group.start + place, group]));
      Object.assign(this, { tokens, losses, groups: new Map(groups) });
      this.#marks = { fresh: this.generation.firstGenerated(response.letters), spaced: spacedTokens(this.text, response.letters) };
      this.at = Math.min(this.at ?? response.start, tokens.length - 1);
      this.patterns = new Patterns(this.api, this.base, tokens.length);
      this.frame.read(response);
      this.strip.show(tokens, losses, this.groups, this.#marks);
      this.strip.reveal(this.at);
      this.lines.follow(this.at);
      this.map.follow(this.at);
      this.redraw();
      this.ask();
      await this.#measure();
      this.frame.busy(false);
      await this.#name();
    } catch (error) {
      this.failed(error);
    } finally {
      // A newer text has its own busy state.
      if (turn === this.#turn) this.frame.busy(false);
    }
  }

  // Selected and ablated heads stay for the next text.
  #empty() {
    this.api.stopAll();
    Object.assign(this, { tokens: [], groups: new Map(), losses: null, at: null, patterns: null, statistics: null, atlasTokens: null, prediction: null });
    this.frame.busy(false);
    this.frame.empty();
    this.why.update();
    this.circuit.update();
    this.redraw();
  }

  async #measure() {
    const { edits, ...base } = this.base;
    const response = await this.api.ask("statistics", base);
    setMeasures(response.measures);
    this.statistics = response.statistics;
    this.atlasTokens = response.tokens;
    if (!Object.hasOwn(this.statistics, this.statistic) && !this.#colorsByItself) this.statistic = inOrder(this.statistics)[0];
    if (this.automaticHeads) this.selected = clearestHeads(this.statistics, response.heads);
    this.automaticHeads = false;
    this.redraw();
    this.#measureWorth();
  }

  #measureWorth() {
    if (this.measure === "worth") this.worth.start();
  }

  async #name() {
    if (Object.keys(this.kinds).length) return;
    const { model } = this;
    const watch = setInterval(() => this.#tellProgress(model), 1000);
    try {
      const { heads, nearest } = await this.api.ask("kinds", { model: this.model.name });
      Object.assign(this, { kinds: heads ?? {}, nearest: nearest ?? {} });
    } catch {
      // The page works without kinds.
    } finally {
      clearInterval(watch);
    }
    this.atlas.measuring.textContent = "";
    this.atlas.draw();
    this.why.named();
    this.reasons.draw();
    this.onChange();
  }

  // How far the measurement of kinds is, which may take minutes.
  async #tellProgress(model) {
    try {
      const progress = await this.api.kindsProgress();
      if (model !== this.model || !progress.model || Object.keys(this.kinds).length) return;
      const doing = progress.model === model.name ? `${translateFilled(progress.label)}${progress.fraction === null ? "" : ` ${percent(progress.fraction)}`}` : say`waiting for ${progress.model}`;
      this.atlas.measuring.textContent = say`Kinds of ${counted(this.atlas.cells.size)} {0|head|heads}: ${doing}; ${counted(progress.seconds)} {2|second|seconds} so far.`;
    } catch {
      // The next one may arrive.
    }
  }

  // The predictions at the selected token.
  async ask() {
    if (this.at === null || !this.tokens.length) return;
    try {
      this.prediction = await this.api.ask("predictions", { ...this.base, position: this.at, top_k: 6 });
      this.predictions.show(this.prediction);
      this.#measureWorth();
      this.why.update();
      this.circuit.update();
      this.onChange();
    } catch (error) {
      this.failed(error);
    }
  }

  // Redraw after a change of selection, edits or token.
  redraw() {
    this.atlas.draw();
    this.predictions.draw();
    this.patching.draw();
    this.cuts.draw();
    this.reasons.draw();
    this.why.draw();
    this.frame.draw();
    this.#show();
    this.onChange();
  }

  hover(index, scrolls = false) {
    if (index === this.hovered) return;
    this.hovered = index;
    this.strip.choose(this.at, index);
    if (scrolls && index !== null) this.strip.reveal(index);
    this.#showSoon();
  }

  select(index) {
    if (index === null) return;
    const again = index === this.at;
    this.at = index;
    this.strip.choose(this.at, this.hovered);
    this.strip.reveal(index);
    this.lines.follow(index);
    this.map.follow(index);
    this.#showSoon();
    if (!again) this.ask();
    this.onChange();
  }

  async #show() {
    const { patterns } = this;
    if (!patterns || !this.tokens.length) return;
    const at = this.focus;
    // A later call shows a newer text.
    const left = () => at !== this.focus || patterns !== this.patterns;
    this.strip.choose(this.at, this.hovered);
    try {
      if (this.isVision) await this.imageView.draw();
      else await (this.view === "map" ? this.map : this.lines).draw();
      if (at === null || left()) return;
      const from = await patterns.from(this.selected, at);
      if (left()) return;
      this.#mark(from, {});
      const to = await patterns.to(this.selected, at);
      if (left()) return;
      this.#mark(from, to);
      this.attentionList.show(at, from, to);
    } catch (error) {
      this.failed(error);
    }
  }

  #mark(from, to) {
    const marks = this.selected.map((head) => ({ color: this.colorOf(head), from: asMap(from[head]), to: asMap(to[head]) }));
    this.strip.mark(marks);
  }

  // Show a generated token, and what the selected heads attend to from it.
  addToken(tokens, begin, response) {
    this.tokens = tokens;
    this.at = response.position;
    this.losses = [...(this.losses ?? [null]), -Math.log(response.probability)];
    this.strip.show(tokens, this.losses, this.groups, { ...this.#marks, fresh: Math.min(begin, this.#marks.fresh ?? begin) });
    this.#mark(response.heads, {});
    this.strip.choose(response.position);
    this.strip.reveal(response.position);
    this.attentionList.show(response.position, response.heads, {});
  }

  toggleSelected(head) {
    const is = this.selected.includes(head);
    if (!is && this.selected.length >= MOST_HEADS) {
      showError(say`${MOST_HEADS} heads are selected, the maximum: deselect one first.`);
      return;
    }
    this.automaticHeads = false;
    this.selected = is ? this.selected.filter((each) => each !== head) : [...this.selected, head];
    if (!is) this.map.head = head;
    announce(is ? say`${head} deselected` : say`${head} selected`);
    this.redraw();
  }

  // Select a head that a result names, and bring it into view.
  showHead(head) {
    if (!this.selected.includes(head)) this.toggleSelected(head);
    if (this.selected.includes(head)) this.map.head = head;
    this.redraw();
    this.atlas.cells.get(head)?.scrollIntoView({ block: "nearest" });
    this.atlas.cells.get(head)?.focus({ preventScroll: true });
  }

  // Select a head before all others.
  lead(head) {
    this.automaticHeads = false;
    this.selected = [head, ...this.selected.filter((each) => each !== head)].slice(0, MOST_HEADS);
    this.map.head = head;
    this.redraw();
  }

  toggleAblated(head) {
    if (!this.ablated.delete(head)) this.ablated.add(head);
    this.#edited();
  }

  switchHeads(heads, on) {
    for (const head of heads) {
      if (on) this.ablated.delete(head);
      else this.ablated.add(head);
    }
    this.#edited();
  }

  restoreHeads() {
    this.ablated.clear();
    this.patched.clear();
    this.links = [];
    this.#edited();
  }

  toggleLink(head, query, key) {
    const rest = this.links.filter((link) => link.join() !== [head, query, key].join());
    const cut = rest.length === this.links.length;
    if (cut && rest.length >= MOST_LINKS) {
      showError(say`${MOST_LINKS} links are cut, the maximum: restore one first.`);
      return;
    }
    this.links = cut ? [...rest, [head, query, key]] : rest;
    announce(cut ? say`Link cut` : say`Link restored`);
    this.#edited();
  }

  restoreLinks() {
    this.links = [];
    this.#edited();
  }

  setReplacement(how) {
    this.replaceWith = how;
    this.#edited();
  }

  patch(heads, source) {
    this.patched = new Set(heads);
    this.source = source;
    this.#edited();
  }

  endPatch(why) {
    this.patched.clear();
    this.patching.result.textContent = why;
    announce(why);
  }

  #edited() {
    if (this.tokens.length) {
      this.patterns = new Patterns(this.api, this.base, this.tokens.length);
      this.#measureLosses();
    }
    this.redraw();
    this.ask();
  }

  // The loss at every token changes with the heads.
  async #measureLosses() {
    const { patterns } = this;
    try {
      const { losses } = await this.api.ask("tokens", this.base, "losses");
      if (patterns !== this.patterns) return;
      this.losses = losses;
      this.strip.show(this.tokens, losses, this.groups, this.#marks);
      this.frame.draw();
    } catch (error) {
      this.failed(error);
    }
  }

  colorBy(name) {
    this.statistic = name;
    this.redraw();
    this.#measureWorth();
  }

  addStatistic(name, heads, values) {
    const by = new Map(heads.map((head, place) => [head, values[place]]));
    this.statistics = { ...this.statistics, [name]: [...this.atlas.cells.keys()].map((head) => by.get(head) ?? null) };
    this.colorBy(name);
  }

  setView(view) {
    this.view = view;
    this.redraw();
  }
}

function asMap(found) {
  const { positions, weights } = found ?? NOTHING;
  return new Map(positions.map((position, index) => [position, weights[index]]));
}
