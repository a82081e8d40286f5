// The kinds of heads in words, each with its meaning, its score, its interval and what it was measured on.

import { h } from "./dom.js";
import { kindName, sampleOf, two } from "./head_words.js";
import { currentLanguage, say } from "./language.js";

// For each kind a word short enough for a square, and what its heads do.
const KIND_WORDS = {
  "previous-token": () => [say`prev`, say`attends to the token just before`],
  "next-token": () => [say`next`, say`attends to the token just after`],
  self: () => [say`self`, say`attends to its own token`],
  positional: () => [say`pos`, say`attends to one fixed distance`],
  "duplicate-token": () => [say`dup`, say`attends to earlier copies of the token`],
  induction: () => [say`ind`, say`attends to the token that followed an earlier copy, to repeat it`],
  copying: () => [say`copy`, say`raises the probability of the token that it attends to`],
  sink: () => [say`sink`, say`rests on the first or a special token when it finds nothing`],
  punctuation: () => [say`punc`, say`attends to punctuation`],
  broad: () => ["", say`spreads its attention over all tokens`],
  bracket: () => [say`brkt`, say`attends from a bracket or quote to its partner`],
  numbering: () => [say`num`, say`attends from a number to the previous one of the list`],
  syntactic: () => [say`syn`, say`follows a relation of grammar`],
  coreference: () => [say`cor`, say`attends from a pronoun to what it means`],
  alignment: () => [say`algn`, say`moves through the source together with the text`],
  retrieval: () => [say`retr`, say`attends to the token that the model copies from far away`],
  repetition: () => [say`rep`, say`raises the token that came next in a repetition`],
  recall: () => [say`rec`, say`its weights connect words such as France and Paris`],
  acronym: () => [say`acr`, say`attends from a letter of an acronym to its word`],
  tense: () => [say`tns`, say`attends to verbs in the same tense`],
  "sentence-start": () => [say`sent`, say`attends to the first word of the sentence`],
  capitals: () => [say`caps`, say`attends to words with a capital letter`],
  "bias-gap": () => [say`bias`, say`finds what a pronoun means more often where it fits a stereotype`],
  "context-blind": () => ["", say`attends alike in unrelated texts`],
  local: () => [say`loc`, say`attends to the patches around`],
  row: () => [say`row`, say`attends to patches of the same row`],
  column: () => [say`col`, say`attends to patches of the same column`],
  "class-token": () => [say`cls`, say`attends to the class token`],
};
// A name is a kind and perhaps a detail: "bracket quotes", "positional -2".
function kindWords(name) {
  const [short, meaning] = KIND_WORDS[(name ?? "").split(" ")[0]]?.() ?? ["", ""];
  return { short, meaning };
}

export function shortOf(name) {
  return kindWords(name).short;
}

// "0.41 (0.39 to 0.43, 5 of 5 draws)".
function scored(label) {
  const [low, high] = label.interval ?? [null, null];
  const between = low == null || high == null ? null : say`${two(low)} to ${two(high)}`;
  const parts = [between, sampleOf(label)].filter(Boolean);
  return `${two(label.score)}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

export function meaningOf(name) {
  return kindWords(name).meaning;
}

// What the kind means, in English the evidence of this head, and what the draws are.
function titleOf(label) {
  const draws = label.draws ? say`the test was repeated on ${label.draws[1]} independent random samples, and the head passed ${label.draws[0]} of them` : null;
  return [kindWords(label.name).meaning, currentLanguage() === "en" ? label.evidence : null, draws].filter(Boolean).join("; ");
}

// The short words in the squares: "prev attends to the token just before".
export function kindLegend(names) {
  return [...new Set(names.map((name) => name.split(" ")[0]))].map(kindWords).filter(({ short }) => short).flatMap(({ short, meaning }, place) => [place ? "; " : "", h("b", {}, short), ` ${meaning}`]);
}

// One line about a head: its first kind, or the nearest one if it has none.
export function kindInWords(labels, near) {
  if (labels?.length) return `${kindName(labels[0].name)} ${scored(labels[0])}`;
  return near ? say`no kind; nearest: ${kindName(near.name)} ${two(near.score)}` : say`no kind`;
}

// The same for the list of selected heads, with further kinds; meaning and evidence are its title.
export function kindElement(measured, labels, near) {
  if (!measured) return h("span", { class: "kind" }, say`measuring its kind…`);
  if (!labels?.length) {
    const why = near ? h("small", {}, say`nearest: ${kindName(near.name)} ${scored(near)}`) : null;
    return h("span", { class: "kind", title: near ? titleOf(near) : null }, say`no kind`, why);
  }
  const [first, ...rest] = labels;
  const also = rest.length ? `; ${say`also ${rest.map((each) => `${kindName(each.name)} ${two(each.score)}`).join(", ")}`}` : "";
  return h("span", { class: "kind", title: titleOf(first) }, kindName(first.name), h("small", {}, say`score ${scored(first)}`, also));
}
