// Which atlas is open, which heads pass the filter, and what colors them.

import { css, kindColor } from "./color.js";
import { kindsOf } from "./grid.js";
import { kindName, translateMeasures } from "./head_words.js";
import { say, translate } from "./language.js";
import { scaleOf } from "./scale.js";

export const MAP = "map";
export const KIND = "kind";
const MIXED = "mixed";
// Plain words by which a reader may look for a kind, in both languages.
const PLAIN_WORDS = {
  induction: "copy copies copying repeat копирует копия повтор индукция", repetition: "copy copies repeat копирует", "duplicate-token": "same copy repeated копия повтор",
  retrieval: "copy copies копирует", copying: "copies копирует", bracket: "brackets quote quotes parenthesis кавычки", punctuation: "comma period dot запятая точка",
  numbering: "number digit list номер цифра список", syntactic: "grammar syntax грамматика синтаксис", coreference: "pronoun местоимение", "previous-token": "before last перед",
  "next-token": "after после", self: "itself себя", positional: "position distance offset позиция расстояние", sink: "first start первый начало", broad: "uniform spread everywhere равномерно",
  capitals: "capital uppercase name имя", acronym: "abbreviation сокращение", tense: "verb глагол", recall: "fact knowledge факт знание", local: "around neighbor соседи",
};

export const state = {
  atlases: [], at: 0, across: MAP, up: MAP, color: KIND, kinds: new Set(), layers: [0, 0], most: 0, words: "", sort: "name", down: false,
};

let groups = [];
// The column of each measure of an atlas.
const columns = new WeakMap();

export function begin(atlases) {
  state.atlases = atlases;
  for (const { measures } of atlases) translateMeasures(measures);
  const heads = atlases.flatMap((atlas) => atlas.heads);
  groups = kindsOf(heads);
  state.layers = [0, Math.max(...heads.map((head) => head.layer))];
  state.most = Math.max(...atlases.map((atlas) => atlas.heads.length));
}

export function atlasNow() {
  return state.atlases[state.at];
}

// A file by its own name.
export function corpusName({ name }) {
  const [, files] = /^(\d+) files$/.exec(name ?? "") ?? [];
  return files ? say`${files} {0|file|files}` : translate(name ?? "");
}

// Kinds in the order of the legend, those of heads without any last.
export function kindGroups() {
  const mixed = state.atlases.some((atlas) => atlas.heads.some((head) => head.group === MIXED));
  return mixed ? [...groups, MIXED] : groups;
}

export function colorOfKind(group) {
  return groups.includes(group) ? kindColor(groups.indexOf(group)) : null;
}

export function measureNamed(name, atlas = atlasNow()) {
  return atlas.measures.find((measure) => measure.name === name);
}

export function valueOf(head, name, atlas = atlasNow()) {
  if (!columns.has(atlas)) columns.set(atlas, new Map(atlas.measures.map((measure, index) => [measure.name, index])));
  return head.values[columns.get(atlas).get(name)] ?? null;
}

// All values of a measure, of all atlases, so that its colors and its axis stay while the slider moves.
export function valuesOf(name) {
  return state.atlases.flatMap((atlas) => atlas.heads.map((head) => valueOf(head, name, atlas))).filter((value) => value !== null);
}

// A function from a head to its color, as numbers; null without a value.
export function coloring() {
  const measure = measureNamed(state.color);
  if (!measure) return { of: (head) => colorOfKind(head.group) };
  const scale = scaleOf(valuesOf(measure.name), measure.unit);
  const of = (head) => {
    const value = valueOf(head, measure.name);
    return value === null ? null : scale.color(value);
  };
  return { of, scale, measure };
}

// By worth, the most valuable first; empty if it was not measured.
function byWorth() {
  const { heads, importance } = atlasNow();
  if (!importance) return [];
  const worth = new Map(heads.map((head) => [head, valueOf(head, importance.measure) ?? -Infinity]));
  return [...heads].sort((one, other) => worth.get(other) - worth.get(one));
}

export function filteredHeads() {
  const [low, high] = state.layers;
  const worthy = new Set(byWorth().slice(0, state.most));
  const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
  return atlasNow().heads.filter((head) => {
    if (state.kinds.size && !state.kinds.has(head.group)) return false;
    if (head.layer < low || head.layer > high || (worthy.size && !worthy.has(head))) return false;
    const text = wordsOf(head);
    return words.every((word) => text.includes(word));
  });
}

// What the search looks in: kinds, or the nearest one, in plain words too, and the tokens that the head looks at most.
function wordsOf(head) {
  const kinds = [...head.kinds, ...(head.nearest ? [head.nearest] : [])].map((kind) => kind.name);
  return [head.name, head.kind, kindName(head.kind), ...kinds, ...kinds.map(kindName), ...kinds.map((name) => PLAIN_WORDS[name.split(" ")[0]]), ...head.flags, ...(head.looks_at ?? [])].join(" ").toLowerCase();
}

export function background(color) {
  return color ? css(color) : "";
}
