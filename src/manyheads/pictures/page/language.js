// The page in the reader's language. English stands in the code, say`${count} heads`; other languages stand in
// tables from the English sentence, "{0} heads", to theirs: "{0} {0|голова|головы|голов}", where the last form
// of a noun is the one after 5.

const KEY = "manyheads-language";
const tables = { ru: {} };
let language = chosenLanguage();

function chosenLanguage() {
  let stored = null;
  try {
    stored = localStorage.getItem(KEY);
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
    localStorage.setItem(KEY, code);
  } catch {
    // Without storage the page stays as it is.
  }
  location.reload();
}

export function addSentences(code, sentences) {
  Object.assign(tables[code], sentences);
}

export function say(parts, ...values) {
  const english = parts.reduce((text, part, index) => `${text}{${index - 1}}${part}`);
  return fillSentence(translate(english), values);
}

// A sentence without values, such as a label that the server sent; unknown ones stay as they are.
export function translate(english) {
  return tables[language]?.[english] ?? english;
}

function fillSentence(sentence, values) {
  return sentence.replace(/\{(\d)(?:\|([^}]*))?\}/g, (_, index, forms) => {
    const value = values[Number(index)];
    return forms ? pluralForm(value, forms.split("|")) : String(value);
  });
}

function pluralForm(count, forms) {
  const names = language === "ru" ? ["one", "few", "many"] : ["one", "other"];
  const name = new Intl.PluralRules(language).select(Number(String(count).replace(/[\s,\u00a0]/g, "")));
  return forms[names.indexOf(name)] ?? forms[forms.length - 1];
}

// Texts, titles and names of elements that stand in the HTML.
export function translatePage(root = document.body) {
  document.documentElement.lang = language;
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
