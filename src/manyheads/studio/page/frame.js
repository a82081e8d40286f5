// The layout of a side: its text or image, its tokens and its views.

import { h } from "./dom.js";
import { counted, fixed } from "./format.js";
import { say, translate, translateFilled } from "./language.js";

export function frame(side) {
  const prompt = h("textarea", { rows: 3, "aria-label": say`Text`, placeholder: say`Type a text…`, spellcheck: "false" });
  prompt.addEventListener("input", () => {
    side.at = null;
    // A shorter line below must not move the page while somebody types.
    shows.style.minHeight = `${shows.offsetHeight}px`;
    side.runSoon();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) side.run();
  });
  const models = h("select", { "aria-label": say`Model`, on: { change: () => side.openModel(models.value) } });
  models.append(...side.models.map((each) => h("option", { value: each.name }, each.name)));
  const about = h("span", { class: "quiet" });
  const run = h("button", { type: "button", class: "primary run", on: { click: () => side.run() } }, say`Run`);
  const examples = h("div", { class: "examples", role: "group", "aria-label": say`Examples` });
  const shows = h("p", { class: "shows", role: "note" });
  const words = h("div", {}, prompt, shows, h("div", { class: "row" }, run, side.generation.element), side.generation.hint);
  const input = h("section", { class: "card prompt place-text", "aria-label": say`Input` }, h("header", {}, h("span", { class: "model" }, models, about), examples), words, side.imageView.drop);

  const count = h("span", { class: "quiet number" });
  const note = h("p", { class: "quiet", role: "note" });
  const legend = h("div", { class: "legend" });
  const tokens = h("section", { class: "card place-tokens", "aria-label": say`Tokens` }, h("header", {}, h("h2", {}, say`Tokens`), count), side.strip.element, legend, note, side.attentionList.element);

  const tabs = h("div", { class: "segments", role: "tablist", "aria-label": say`View` });
  for (const [name, label] of [["lines", say`Lines`], ["map", say`Map`]]) {
    tabs.append(h("button", { type: "button", role: "tab", "data-view": name, on: { click: () => side.setView(name) } }, label));
  }
  const place = h("div", { class: "view", role: "tabpanel", "aria-label": say`Attention` });
  const views = h("section", { class: "card place-views", "aria-label": say`Attention` }, h("header", {}, h("h2", {}, say`Attention`), side.lines.pager, tabs), side.cuts.element, place, side.cuts.hint, side.reasons.element);

  const left = h("div", { class: "column" }, input, tokens, views);
  const right = h("div", { class: "column answers" }, side.predictions.element, side.atlas.element, side.patching.element, side.predictions.beside);
  const title = h("h2", { class: "side-title", hidden: true });
  const element = h("section", { class: "side" }, title, h("div", { class: "side-body" }, left, right), side.why.element, side.circuit.element, side.predictions.summary);
  side.predictions.legend.after(side.why.button, side.circuit.button);

  function drawExamples() {
    const buttons = (side.model.examples ?? []).map((each) => h("button", { type: "button", class: "plain", "aria-pressed": String(each.text === side.text), on: { click: () => side.open(each) } }, translate(each.name)));
    examples.replaceChildren(h("span", { class: "quiet" }, say`Try`), ...buttons);
    shows.textContent = (side.blank ? "" : translate(side.example?.about ?? "")) || say`Type any text. Click a token to see what the selected heads attend to from it, and what the model predicts there.`;
  }

  return {
    element,
    prompt,
    title,
    place,

    // A model has been selected, and a text.
    open() {
      const { model } = side;
      models.value = model.name;
      models.hidden = side.models.length < 2;
      const heads = model.layers.reduce((sum, layer) => sum + layer.heads, 0);
      about.title = translate(model.about);
      about.classList.toggle("explained", Boolean(model.about));
      about.replaceChildren(models.hidden ? h("b", {}, `${model.name} `) : "", say`${model.layers.length} {0|layer|layers}, ${counted(heads)} {1|head|heads}, ${sized(model.parameters)} parameters`);
      words.hidden = examples.hidden = side.isVision;
      side.imageView.drop.hidden = !side.isVision;
      prompt.value = side.text;
      shows.style.minHeight = "";
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
      count.textContent = say`${counted(response.tokens.length)} {0|token|tokens}`;
      note.textContent = noted(side, response);
      note.hidden = !note.textContent;
    },

    // The heads have the wide column for themselves, or are beside the text again.
    enlarge(is) {
      if (is) left.insertBefore(side.atlas.element, views);
      else right.insertBefore(side.atlas.element, side.patching.element);
    },

    busy(is) {
      element.classList.toggle("reading", is);
      element.setAttribute("aria-busy", String(is));
      run.textContent = is ? say`Running…` : say`Run`;
    },

    draw() {
      const view = side.isVision ? side.imageView : side.view === "map" ? side.map : side.lines;
      const asks = h("p", { class: "empty" }, side.isVision ? say`Drop an image to see what the heads attend to.` : say`Type a text above to start.`);
      if (side.blank) place.replaceChildren(asks);
      else if (place.firstChild !== view.element) place.replaceChildren(view.element);
      side.lines.pager.hidden = view !== side.lines;
      for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.view === side.view));
      const swatches = side.selected.map((head) => h("span", {}, h("span", { class: "swatch", vars: { "--color": side.colorOf(head) } }), ` ${head}`));
      const hint = side.tokens.length ? say`Bars below a token: attention from the selected token. Bars above: attention to the selected token.` : "";
      const unlikely = side.strip.surprises ? h("span", {}, h("span", { class: "wavy" }, say`wavy line`), say`a token that the model found unlikely`) : null;
      const made = side.strip.fresh < side.tokens.length ? h("span", {}, h("span", { class: "new-words" }, say`colored`), say`generated: point at it for its probability`) : null;
      legend.replaceChildren(...[...swatches, h("span", {}, hint), unlikely, made].filter(Boolean));
      drawExamples();
    },
  };
}

function noted(side, response) {
  if (side.model.warning) return say`This model is damaged (${side.model.warning}).`;
  if (response.note) return translateFilled(response.note);
  if (response.truncated) return say`The text was truncated to ${counted(response.tokens.length)} {0|token|tokens}, the maximum.`;
  const trained = side.model.trained_tokens;
  if (trained && response.tokens.length > trained) return say`The text is longer than the ${counted(trained)} {0|token|tokens} that the model was trained on.`;
  return "";
}

function sized(count) {
  if (count >= 1e9) return say`${fixed(count / 1e9, 1)}B`;
  if (count >= 1e6) return say`${fixed(count / 1e6, count >= 1e7 ? 0 : 1)}M`;
  return counted(count);
}
