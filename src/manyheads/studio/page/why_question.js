// What the parts of the card "Why this word?" have in common.

import { h } from "./dom.js";
import { fixed } from "./format.js";
import { say, translateFilled } from "./language.js";
import { listedToken, shortToken } from "./token_text.js";

// One question of the card: its title, what to know about the answer, and the answer or why there is none.
export class Question {
  constructor(title, about) {
    this.summary = h("p", { class: "why-summary" });
    this.reason = h("p", { class: "why-reason", role: "note", hidden: true });
    this.body = h("div", { class: "why-body" });
    this.about = h("p", { class: "quiet why-about" }, about);
    this.heading = h("h3", {}, title);
    this.element = h("section", { class: "why-part", "aria-label": title }, this.heading, this.summary, this.reason, this.body, this.about);
  }

  set title(text) {
    this.heading.textContent = text;
    this.element.setAttribute("aria-label", text);
  }

  // Whether there is an answer.
  answered(response) {
    const reason = response.reason ? translateFilled(response.reason) : "";
    this.reason.textContent = reason.charAt(0).toUpperCase() + reason.slice(1);
    this.reason.hidden = !reason;
    this.body.hidden = this.summary.hidden = this.about.hidden = Boolean(reason);
    return !reason;
  }
}

// Words as they stand in a sentence; where two differ only in their spaces, these are shown.
export function namedWords(...words) {
  const texts = words.map((word) => word?.text ?? "");
  const names = texts.map((text) => shortToken(text, 30));
  return new Set(names).size === new Set(texts).size ? names : texts.map(listedToken);
}

export function quoted(text) {
  return say`“${text}”`;
}

// A logit with its sign.
export function added(value) {
  const text = fixed(Math.abs(value), 2);
  return /[1-9]/.test(text) ? `${value < 0 ? "−" : "+"}${text}` : text;
}
