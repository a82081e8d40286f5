// The cards of a side: its text or image, its tokens, its views.

import { counted, h, shown } from "./dom.js";

const EXAMPLES = [
  ["Names", "When Mary and John went to the shop, John gave a bottle of milk to"],
  ["Again and again", "The quick brown fox met a lazy dog. The quick brown fox met a lazy"],
  ["A story", "Once upon a time there was a little girl who lived in a house by the sea. Every morning she"],
];

export function frame(side) {
  const prompt = h("textarea", { rows: 3, "aria-label": "Text to read", placeholder: "Type a text…", spellcheck: "false" });
  prompt.addEventListener("input", () => {
    side.at = null;
    side.soon();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) side.read();
  });
  const models = h("select", { "aria-label": "Model", on: { change: () => side.openModel(models.value) } });
  models.append(...side.models.map((each) => h("option", { value: each.name }, each.name)));
  const about = h("span", { class: "quiet" });
  const read = h("button", { type: "button", class: "primary", on: { click: () => side.read() } }, "Read");
  const examples = h("span", { class: "examples" }, h("span", { class: "quiet" }, "Try"));
  for (const [name, text] of EXAMPLES) examples.append(h("button", { type: "button", class: "plain", on: { click: () => side.setText(text) } }, name));
  const words = h("div", {}, prompt, h("div", { class: "row" }, read, side.writing.element, h("span", { class: "push" }, examples)));
  const given = h("section", { class: "card prompt place-text", "aria-label": "Text" }, h("header", {}, h("span", { class: "model" }, models, about)), words, side.eye.drop);

  const count = h("span", { class: "quiet number" });
  const note = h("p", { class: "quiet", role: "note" });
  const legend = h("div", { class: "legend" });
  const tokens = h("section", { class: "card place-tokens", "aria-label": "Tokens" }, h("header", {}, h("h2", {}, "Tokens"), count), side.strip.element, legend, note, side.looks.element);

  const tabs = h("div", { class: "segments", role: "tablist", "aria-label": "View" });
  for (const [name, label] of [["lines", "Lines"], ["map", "Map"]]) {
    tabs.append(h("button", { type: "button", role: "tab", "data-view": name, on: { click: () => side.turnTo(name) } }, label));
  }
  const place = h("div", { class: "view", role: "tabpanel", "aria-label": "Where heads look" });
  const views = h("section", { class: "card place-views", "aria-label": "Where heads look" }, h("header", {}, h("h2", {}, "Where heads look"), side.lines.pager, tabs), place);

  const left = h("div", { class: "column" }, given, tokens, views);
  const right = h("div", { class: "column" }, side.atlas.element, side.answers.element, side.patching.element);
  const title = h("h2", { class: "side-title", hidden: true });
  const element = h("section", { class: "side" }, title, h("div", { class: "side-body" }, left, right));

  return {
    element,
    prompt,
    title,
    place,

    // A model has been chosen, perhaps with a text from the address.
    open(text) {
      const { model } = side;
      models.value = model.name;
      models.hidden = side.models.length < 2;
      const heads = model.layers.reduce((sum, layer) => sum + layer.heads, 0);
      about.replaceChildren(models.hidden ? h("b", {}, `${model.name} `) : "", `${model.layers.length} layers, ${heads} heads, ${sized(model.parameters)} parameters`);
      words.hidden = side.sees;
      side.eye.drop.hidden = !side.sees;
      prompt.value = side.sees ? "" : (text ?? EXAMPLES[0][1]);
      side.writing.show(model.writes);
      side.patching.show(model.answers === "next");
      tokens.hidden = side.sees;
      tabs.hidden = side.sees;
      element.setAttribute("aria-label", model.name);
    },

    // Nothing is read: as at the start.
    empty() {
      count.textContent = "";
      note.hidden = true;
      for (const part of [side.strip, side.looks, side.answers, side.lines, side.map, side.eye]) part.clear();
    },

    read(told) {
      count.textContent = `${counted(told.tokens.length, "token")}${told.loss === null ? "" : ` · loss ${told.loss.toFixed(3)}`}`;
      note.textContent = noted(side, told);
      note.hidden = !note.textContent;
    },

    busy(is) {
      element.classList.toggle("reading", is);
      element.setAttribute("aria-busy", String(is));
      read.textContent = is ? "Reading…" : "Read";
    },

    draw() {
      const view = side.sees ? side.eye : side.view === "map" ? side.map : side.lines;
      const asks = h("p", { class: "empty" }, side.sees ? "Drop an image to see what heads look at." : "Type something above to begin.");
      if (side.blank) place.replaceChildren(asks);
      else if (place.firstChild !== view.element) place.replaceChildren(view.element);
      side.lines.pager.hidden = view !== side.lines;
      for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.view === side.view));
      const focus = side.tokens[side.at] === undefined ? "" : shown(side.tokens[side.at]).trim();
      const swatches = side.picked.map((head) => h("span", {}, h("span", { class: "swatch", vars: { "--colour": side.colourOf(head) } }), ` ${head}`));
      const hint = focus ? "Bars below a token: the selected token attends to it. Bars above: it attends to the selected token." : "";
      legend.replaceChildren(...swatches, h("span", {}, hint));
    },
  };
}

function noted(side, told) {
  if (told.cut) return `The text was cut after ${counted(told.tokens.length, "token")}, the most that is read here.`;
  const { trained } = side.model;
  if (trained && told.tokens.length > trained) return `This is longer than the ${counted(trained, "token")} the model was made for.`;
  return "";
}

function sized(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} billion`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(count >= 1e7 ? 0 : 1)} million`;
  return count.toLocaleString("en");
}
