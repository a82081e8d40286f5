// The layout of a side: its text or image, its tokens and its views.

import { pluralise, h, visibleToken } from "./dom.js";

const EXAMPLES = [
  ["Names", "When Mary and John went to the shop, John gave a bottle of milk to"],
  ["Repetition", "The quick brown fox met a lazy dog. The quick brown fox met a lazy"],
  ["A story", "Once upon a time there was a little girl who lived in a house by the sea. Every morning she"],
];

export function frame(side) {
  const prompt = h("textarea", { rows: 3, "aria-label": "Text", placeholder: "Type a text…", spellcheck: "false" });
  prompt.addEventListener("input", () => {
    side.at = null;
    side.runSoon();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) side.run();
  });
  const models = h("select", { "aria-label": "Model", on: { change: () => side.openModel(models.value) } });
  models.append(...side.models.map((each) => h("option", { value: each.name }, each.name)));
  const about = h("span", { class: "quiet" });
  const read = h("button", { type: "button", class: "primary", on: { click: () => side.run() } }, "Run");
  const examples = h("span", { class: "examples" }, h("span", { class: "quiet" }, "Try"));
  for (const [name, text] of EXAMPLES) examples.append(h("button", { type: "button", class: "plain", on: { click: () => side.setText(text) } }, name));
  const words = h("div", {}, prompt, h("div", { class: "row" }, read, side.generation.element, h("span", { class: "push" }, examples)));
  const given = h("section", { class: "card prompt place-text", "aria-label": "Input" }, h("header", {}, h("span", { class: "model" }, models, about)), words, side.imageView.drop);

  const count = h("span", { class: "quiet number" });
  const note = h("p", { class: "quiet", role: "note" });
  const legend = h("div", { class: "legend" });
  const tokens = h("section", { class: "card place-tokens", "aria-label": "Tokens" }, h("header", {}, h("h2", {}, "Tokens"), count), side.strip.element, legend, note, side.attentionList.element);

  const tabs = h("div", { class: "segments", role: "tablist", "aria-label": "View" });
  for (const [name, label] of [["lines", "Lines"], ["map", "Map"]]) {
    tabs.append(h("button", { type: "button", role: "tab", "data-view": name, on: { click: () => side.setView(name) } }, label));
  }
  const place = h("div", { class: "view", role: "tabpanel", "aria-label": "Attention" });
  const views = h("section", { class: "card place-views", "aria-label": "Attention" }, h("header", {}, h("h2", {}, "Attention"), side.lines.pager, tabs), place);

  const left = h("div", { class: "column" }, given, tokens, views);
  const right = h("div", { class: "column" }, side.atlas.element, side.predictions.element, side.patching.element);
  const title = h("h2", { class: "side-title", hidden: true });
  const element = h("section", { class: "side" }, title, h("div", { class: "side-body" }, left, right));

  return {
    element,
    prompt,
    title,
    place,

    // A model has been selected, perhaps with a text from the address.
    open(text) {
      const { model } = side;
      models.value = model.name;
      models.hidden = side.models.length < 2;
      const heads = model.layers.reduce((sum, layer) => sum + layer.heads, 0);
      about.replaceChildren(models.hidden ? h("b", {}, `${model.name} `) : "", `${model.layers.length} layers, ${heads} heads, ${sized(model.parameters)} parameters`);
      words.hidden = side.isVision;
      side.imageView.drop.hidden = !side.isVision;
      prompt.value = side.isVision ? "" : (text ?? EXAMPLES[0][1]);
      side.generation.show(model.generates);
      side.patching.show(model.output === "next token");
      tokens.hidden = side.isVision;
      tabs.hidden = side.isVision;
      element.setAttribute("aria-label", model.name);
    },

    // There is no input, as at the start.
    empty() {
      count.textContent = "";
      note.hidden = true;
      for (const part of [side.strip, side.attentionList, side.predictions, side.lines, side.map, side.imageView]) part.clear();
    },

    read(response) {
      count.textContent = `${pluralise(response.tokens.length, "token")}${response.loss === null ? "" : ` · loss ${response.loss.toFixed(3)}`}`;
      note.textContent = noted(side, response);
      note.hidden = !note.textContent;
    },

    busy(is) {
      element.classList.toggle("reading", is);
      element.setAttribute("aria-busy", String(is));
      read.textContent = is ? "Running…" : "Run";
    },

    draw() {
      const view = side.isVision ? side.imageView : side.view === "map" ? side.map : side.lines;
      const asks = h("p", { class: "empty" }, side.isVision ? "Drop an image to see what the heads attend to." : "Type a text above to start.");
      if (side.blank) place.replaceChildren(asks);
      else if (place.firstChild !== view.element) place.replaceChildren(view.element);
      side.lines.pager.hidden = view !== side.lines;
      for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.view === side.view));
      const focus = side.tokens[side.at] === undefined ? "" : visibleToken(side.tokens[side.at]).trim();
      const swatches = side.selected.map((head) => h("span", {}, h("span", { class: "swatch", vars: { "--colour": side.colourOf(head) } }), ` ${head}`));
      const hint = focus ? "Bars below a token: attention from the selected token. Bars above: attention to the selected token." : "";
      legend.replaceChildren(...swatches, h("span", {}, hint));
    },
  };
}

function noted(side, response) {
  if (response.truncated) return `The text was truncated to ${pluralise(response.tokens.length, "token")}, the maximum.`;
  const trained = side.model.trained_tokens;
  if (trained && response.tokens.length > trained) return `The text is longer than the ${pluralise(trained, "token")} that the model was trained on.`;
  return "";
}

function sized(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} billion`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(count >= 1e7 ? 0 : 1)} million`;
  return count.toLocaleString("en");
}
