// The text that is written in the page, in the reader's language; tokens, commands and names stay as they are.

import { kindName } from "./head_words.js";
import { currentLanguage, localNumbers, translateFilled } from "./language.js";
import { shorten } from "./token_text.js";

const AS_IT_IS = "bdi, code, pre, script, style, noscript, strong, h1 em, [lang=en], #predicted-text, #view-text";

function translateReport() {
  document.documentElement.lang = currentLanguage();
  if (currentLanguage() === "en") return;
  document.title = translateFilled(document.title);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { data: text, parentElement } = texts.currentNode;
    const english = text.replace(/\s+/g, " ").trim();
    if (english && !parentElement.closest(AS_IT_IS)) texts.currentNode.data = text.replace(/\S[\s\S]*\S|\S/, () => inRussian(english));
  }
  for (const name of document.querySelectorAll(".graph .kind-name")) name.textContent = shorten(name.closest("a").querySelector("title").textContent.replace(/^.*?: /, ""), 12);
  for (const name of ["title", "aria-label"]) {
    for (const element of document.querySelectorAll(`[${name}]`)) element.setAttribute(name, inRussian(element.getAttribute(name)));
  }
}

function inRussian(english) {
  const [, head, about] = /^((?:\w+ )?L\d+H\d+(?: cross)?): (.+)$/s.exec(english) ?? [];
  if (head) return `${head}: ${inRussian(about)}`;
  // "6 broad, 2 induction"
  if (/^\d+ [a-z-]+(, \d+ [a-z-]+)*$/.test(english) && !translateFilled(english, true).match(/[а-яё]/)) {
    return english.split(", ").map((part) => part.replace(/(\d+) (.+)/, (_, count, kind) => `${kindName(kind)}: ${count}`)).join(", ");
  }
  return /[a-z]{2}/i.test(english) ? translateFilled(english, true) : localNumbers(english);
}

translateReport();
