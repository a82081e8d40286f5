// The page in the reader's language. English stands in the code, say followed by `${count} heads`; other languages stand in
// tables from the English sentence, "{0} heads", to theirs: "{0} {0|голова|головы|голов}", where the last form
// of a noun is the one after 5.

const STORED_LANGUAGE = "manyheads-language";
// {0}, or {0|form|form|form}.
const PLACE = /\{(\d[^}]*)\}/;
const tables = { ru: {} };
const filled = new Map();
let patterns = null;
let language = chosenLanguage();

function chosenLanguage() {
  let stored = null;
  try {
    stored = localStorage.getItem(STORED_LANGUAGE);
  } catch {
    // Without storage the browser's language decides each time.
  }
  const first = stored ?? navigator.language ?? "en";
  return first.toLowerCase().startsWith("ru") ? "ru" : "en";
}

export function currentLanguage() {
  return language;
}

// The page is loaded again in that language.
export function changeLanguage(code) {
  try {
    localStorage.setItem(STORED_LANGUAGE, code);
  } catch {
    // Without storage the page stays as it is.
  }
  location.reload();
}

export function addSentences(code, sentences) {
  Object.assign(tables[code], sentences);
  patterns = null;
}

export function say(parts, ...values) {
  const english = parts.reduce((text, part, index) => `${text}{${index - 1}}${part}`);
  return fillSentence(translate(english), values);
}

// The same as a list of texts and elements, for append(), where some values are elements.
export function sayParts(parts, ...values) {
  const english = parts.reduce((text, part, index) => `${text}{${index - 1}}${part}`);
  return translate(english).split(PLACE).map((text, index) => (index % 2 ? fillPlace(text, values) : text)).filter((part) => part !== "");
}

// A sentence without values, such as a label that the server sent; unknown ones stay as they are.
export function translate(english) {
  return tables[language]?.[english] ?? english;
}

// A sentence or a label that the server sent with its values filled in, "the text has 9 tokens."; with `deep`
// its values may be sentences too.
export function translateFilled(english, deep = false) {
  const table = tables[language];
  if (!table || english in table) return translate(english);
  const known = `${deep} ${english}`;
  if (!filled.has(known)) filled.set(known, fillAlike(english, deep));
  return filled.get(known);
}

function fillAlike(english, deep) {
  patterns ??= Object.keys(tables[language]).filter((key) => key.includes("{0}") && /\p{L}/u.test(key.replace(/\{\d\}/g, ""))).sort((one, other) => other.length - one.length).map(patternOfKey);
  for (const [key, expression, order] of patterns) {
    const match = key.endsWith(".") === english.endsWith(".") && expression.exec(english);
    if (!match) continue;
    const values = [];
    order.forEach((place, index) => { values[place] = localNumbers(deep ? translateFilled(match[index + 1], deep) : match[index + 1]); });
    return fillSentence(tables[language][key], values);
  }
  return english;
}

// What a sentence looks like with its values, and the order of these.
function patternOfKey(key) {
  const order = [];
  const parts = key.replace(/[.*+?^$()[\]\\]/g, "\\$&").split(PLACE).map((text, index) => {
    if (index % 2 === 0) return text;
    const [place, ...forms] = text.split("|");
    if (forms.length) return `(?:${forms.join("|")})`;
    order.push(Number(place));
    // What is counted is a number.
    return key.includes(`{${place}|`) ? "(\\d[^A-Za-z]*|\\d+ to \\d+)" : "(.+?)";
  });
  return [key, new RegExp(`^${parts.join("")}$`, "s"), order];
}

// "1,084" and "2.65%" as they are written in the language.
export function localNumbers(text) {
  if (language !== "ru") return text;
  return text.replace(/(?<=\d),(?=\d{3}(?!\d))/g, "\u00a0").replace(/(?<![\d.])(\d+)\.(\d+)(?![\d.])/g, "$1,$2").replace(/(?<=\d)%/g, "\u00a0%");
}

function fillSentence(sentence, values) {
  return sentence.replace(new RegExp(PLACE, "g"), (_, place) => String(fillPlace(place, values)));
}

function fillPlace(place, values) {
  const [index, ...forms] = place.split("|");
  const value = values[Number(index)];
  return forms.length ? pluralForm(value, forms) : value;
}

function pluralForm(count, forms) {
  // A sentence that has no translation has two forms.
  const names = forms.length > 2 ? ["one", "few", "many"] : ["one", "other"];
  const name = new Intl.PluralRules(forms.length > 2 ? language : "en").select(Number(String(count).replace(/[\s,\u00a0]/g, "")));
  return forms[names.indexOf(name)] ?? forms[forms.length - 1];
}

// A button that changes between the languages and is named in the language that it changes to; `save` is
// called before the page is loaded again.
export function startLanguages(button, save = () => {}) {
  const [code, name] = language === "ru" ? ["en", "Read in English"] : ["ru", "Читать по-русски"];
  button.textContent = code.toUpperCase();
  for (const [attribute, value] of [["lang", code], ["aria-label", name], ["title", name]]) button.setAttribute(attribute, value);
  button.addEventListener("click", () => {
    save();
    changeLanguage(code);
  });
}

// Texts, titles and names of elements that stand in the HTML.
export function translatePage(root = document.body) {
  document.documentElement.lang = language;
  document.title = translate(document.title);
  if (language === "en") return;
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const english = texts.currentNode.data.replace(/\s+/g, " ").trim();
    if (english) texts.currentNode.data = texts.currentNode.data.replace(/\S[\s\S]*\S|\S/, () => translate(english));
  }
  for (const name of ["title", "aria-label", "placeholder", "alt"]) {
    for (const element of root.querySelectorAll(`[${name}]`)) {
      element.setAttribute(name, translate(element.getAttribute(name)));
    }
  }
}
