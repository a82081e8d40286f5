// One model on one text: what is read, picked, switched off and shown. Two of them make a comparison.

import { Answers } from "./answers.js";
import { Api, dropped, sentence } from "./api.js";
import { Atlas } from "./atlas.js";
import { headColour, MOST_HEADS } from "./colour.js";
import { complain, later, say } from "./dom.js";
import { frame } from "./frame.js";
import { Eye } from "./image.js";
import { Lines } from "./lines.js";
import { Looks } from "./looks.js";
import { HeadMap } from "./map.js";
import { inOrder, learn, telling } from "./measures.js";
import { Patching } from "./patching.js";
import { Patterns } from "./patterns.js";
import { restored, stateOf } from "./state.js";
import { Tokens } from "./tokens.js";
import { Writing } from "./writing.js";

const NOTHING = { places: [], weights: [] };

export class Side {
  constructor(models, changed) {
    this.models = models;
    this.tell = changed;
    this.api = new Api();
    this.failed = (error, words = sentence(error)) => {
      if (!dropped(error)) complain(words);
    };
    Object.assign(this, { tokens: [], losses: null, picked: [], off: new Set(), patched: new Set(), source: "", how: "zero" });
    Object.assign(this, { at: null, pointed: null, view: "lines", statistic: "induction", statistics: null, kinds: {}, text: "", answer: null });
    this.strip = new Tokens({ hover: (index) => this.over(index), pick: (index) => this.choose(index) });
    this.atlas = new Atlas(this);
    this.answers = new Answers(this);
    this.looks = new Looks(this);
    this.lines = new Lines(this);
    this.map = new HeadMap(this);
    this.eye = new Eye(this);
    this.writing = new Writing(this);
    this.patching = new Patching(this);
    this.soon = later(450, () => this.read());
    this.#look = later(30, () => this.#show());
    this.frame = frame(this);
    this.element = this.frame.element;
  }

  #look;

  // How many texts were begun to be read.
  #turn = 0;

  get sees() {
    return this.model.reads === "image";
  }

  // The token that is shown: the one pointed at, else the chosen one.
  get focus() {
    return this.pointed ?? this.at;
  }

  // Whether there is nothing to read.
  get blank() {
    return this.sees ? !this.eye.pixels : !this.text;
  }

  get changed() {
    return this.off.size + this.patched.size > 0;
  }

  get base() {
    const given = this.sees ? { image: this.eye.pixels } : { text: this.text };
    return { model: this.model.name, ...given, edit: this.#edit() };
  }

  #edit() {
    if (!this.changed) return {};
    const patched = this.patched.size ? { patched: [...this.patched], source: this.source } : {};
    return { off: [...this.off], how: this.how, ...patched };
  }

  colourOf(head) {
    const place = this.picked.indexOf(head);
    return place < 0 ? null : headColour(place);
  }

  kindOf(head) {
    return this.kinds[head]?.[0]?.name ?? null;
  }

  // What the address bar keeps.
  state() {
    return stateOf(this);
  }

  async restore(given) {
    Object.assign(this, restored(given, this.models, MOST_HEADS));
    this.patching.source.value = this.source;
    this.atlas.build(this.model.layers);
    this.frame.open(given.t);
    // Another model may want the image in another size.
    if (this.sees) this.eye.fit();
    await this.read();
  }

  openModel(name) {
    this.api.stopAll();
    Object.assign(this, { statistics: null, tokens: [], kinds: {}, patterns: null });
    this.restore({ ...this.state(), m: name, o: "", p: "", h: undefined });
  }

  setText(text, at = null) {
    this.frame.prompt.value = text;
    this.at = at;
    this.read();
  }

  // Everything anew: tokens first, then what heads do, then what they are called.
  async read() {
    this.soon.cancel();
    this.writing.stop();
    this.text = this.frame.prompt.value;
    this.pointed = null;
    const turn = ++this.#turn;
    if (this.blank) {
      this.#empty();
      return;
    }
    this.frame.busy(true);
    try {
      const told = await this.api.ask("read", this.base);
      Object.assign(this, { tokens: told.tokens, losses: told.losses, cut: told.cut });
      this.at = this.sees ? Math.min(this.at ?? 0, told.tokens.length - 1) : Math.min(this.at ?? told.tokens.length - 1, told.tokens.length - 1);
      this.patterns = new Patterns(this.api, this.base, told.tokens.length);
      this.frame.read(told);
      this.strip.show(this.tokens, this.losses);
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
      // One that was left for a newer text leaves the sign to that.
      if (turn === this.#turn) this.frame.busy(false);
    }
  }

  // Heads that were picked or switched off stay so for the next text.
  #empty() {
    this.api.stopAll();
    Object.assign(this, { tokens: [], losses: null, at: null, patterns: null, statistics: null, atlasTokens: null, answer: null });
    this.frame.busy(false);
    this.frame.empty();
    this.redraw();
  }

  async #measure() {
    const { edit, ...base } = this.base;
    const told = await this.api.ask("atlas", base);
    learn(told.measures);
    this.statistics = told.statistics;
    this.atlasTokens = told.tokens;
    if (!Object.hasOwn(this.statistics, this.statistic)) this.statistic = inOrder(this.statistics)[0];
    if (this.choosesHeads) this.picked = telling(this.statistics, told.heads);
    this.choosesHeads = false;
    this.redraw();
  }

  async #name() {
    if (Object.keys(this.kinds).length) return;
    try {
      this.kinds = (await this.api.ask("kinds", { model: this.model.name })).heads ?? {};
    } catch {
      // Names are a help; without them the atlas still tells numbers.
    }
    this.atlas.draw();
    this.tell();
  }

  // What the model says at the chosen token.
  async ask() {
    if (this.at === null || !this.tokens.length) return;
    try {
      this.answer = await this.api.ask("answers", { ...this.base, at: this.at });
      this.answers.show(this.answer);
      this.tell();
    } catch (error) {
      this.failed(error);
    }
  }

  // All that follows from picks, switches and the chosen token.
  redraw() {
    this.atlas.draw();
    this.answers.draw();
    this.patching.draw();
    this.frame.draw();
    this.#show();
    this.tell();
  }

  over(index, scrolls = false) {
    if (index === this.pointed) return;
    this.pointed = index;
    this.strip.choose(this.at, index);
    if (scrolls && index !== null) this.strip.reveal(index);
    this.#look();
  }

  choose(index) {
    if (index === null) return;
    const again = index === this.at;
    this.at = index;
    this.strip.choose(this.at, this.pointed);
    this.strip.reveal(index);
    this.lines.follow(index);
    this.map.follow(index);
    this.#look();
    if (!again) this.ask();
    this.tell();
  }

  async #show() {
    const { patterns } = this;
    if (!patterns || !this.tokens.length) return;
    const at = this.focus;
    // A text that was read meanwhile, or cleared, is shown by a later call.
    const left = () => at !== this.focus || patterns !== this.patterns;
    this.strip.choose(this.at, this.pointed);
    try {
      if (this.sees) await this.eye.draw();
      else await (this.view === "map" ? this.map : this.lines).draw();
      if (at === null || left()) return;
      const from = await patterns.from(this.picked, at);
      if (left()) return;
      this.#mark(from, {});
      const to = await patterns.to(this.picked, at);
      if (left()) return;
      this.#mark(from, to);
      this.looks.show(at, from, to);
    } catch (error) {
      this.failed(error);
    }
  }

  #mark(from, to) {
    const marks = this.picked.map((head) => ({ colour: this.colourOf(head), from: asMap(from[head]), to: asMap(to[head]) }));
    this.strip.mark(marks);
  }

  // A token has just been written: show it, and where the picked heads look from it.
  written(tokens, begin, told) {
    this.tokens = tokens;
    this.at = told.at;
    this.strip.show(tokens, this.losses, begin);
    this.#mark(told.heads, {});
    this.strip.choose(told.at);
    this.strip.reveal(told.at);
    this.looks.show(told.at, told.heads, {});
  }

  togglePick(head) {
    const is = this.picked.includes(head);
    if (!is && this.picked.length >= MOST_HEADS) {
      complain(`${MOST_HEADS} heads are selected, the maximum: deselect one first.`);
      return;
    }
    this.choosesHeads = false;
    this.picked = is ? this.picked.filter((each) => each !== head) : [...this.picked, head];
    if (!is) this.map.head = head;
    say(`${head} ${is ? "deselected" : "selected"}`);
    this.redraw();
  }

  toggleOff(head) {
    if (!this.off.delete(head)) this.off.add(head);
    this.#edited();
  }

  allOn() {
    this.off.clear();
    this.patched.clear();
    this.#edited();
  }

  replaceBy(how) {
    this.how = how;
    this.#edited();
  }

  patch(heads, source) {
    this.patched = new Set(heads);
    this.source = source;
    this.#edited();
  }

  #edited() {
    if (this.tokens.length) this.patterns = new Patterns(this.api, this.base, this.tokens.length);
    this.redraw();
    this.ask();
  }

  measure(name) {
    this.statistic = name;
    this.redraw();
  }

  addStatistic(name, heads, values) {
    const by = new Map(heads.map((head, place) => [head, values[place]]));
    this.statistics = { ...this.statistics, [name]: [...this.atlas.cells.keys()].map((head) => by.get(head) ?? null) };
    this.measure(name);
  }

  turnTo(view) {
    this.view = view;
    this.redraw();
  }
}

function asMap(found) {
  const { places, weights } = found ?? NOTHING;
  return new Map(places.map((place, index) => [place, weights[index]]));
}
