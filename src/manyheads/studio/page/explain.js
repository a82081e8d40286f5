// How attention works: one text through the open model, step by step. What is chosen stands in the address.

import { Api, errorMessage, showError, wasAborted } from "./api.js";
import { announce, debounce, h } from "./dom.js";
import { CHAPTERS, stepsFor } from "./explain_steps.js";
import { Stage } from "./explain_stage.js";
import { decimal } from "./format.js";
import { ImageView } from "./image_view.js";
import { say, startLanguages, translatePage } from "./language.js";
import "./russian.js";
import "./russian_heads.js";
import "./russian_kinds.js";
import "./russian_measures.js";
import "./russian_explain.js";
import { startThemes } from "./theme.js";
import { listedToken, shortToken, visibleToken } from "./token_text.js";

const TEXT = "Mozart was born in Salzburg. Moz";
const TEXTS = "The cat sat on the mat.\nIt rained.\nParis is the capital of France, and Rome of Italy.";
// Patches per side of an image, so that every token can be drawn.
const PATCHES = 4;
const byId = (id) => document.getElementById(id);
const api = new Api();
const stage = new Stage(byId("stage"), byId("readout"));
// What is chosen: model, text, layer, head, query, step, and the sentences of the third chapter.
const chosen = { model: null, text: TEXT, texts: TEXTS, layer: 0, head: 0, at: null, step: "tokens", temperature: 1 };
let models = [], images = null, data = null, batch = null, predictions = null, steps = [];

function view() {
  const narrow = stage.width < 560;
  const em = parseFloat(getComputedStyle(stage.element).fontSize);
  const count = data.tokens.length;
  return {
    ...data, width_of_model: data.width, width: stage.width, batch, predictions, em, narrow, output: chosen.model.output, at: chosen.at, temperature: chosen.temperature,
    inner: data.attention ? data.attention.heads * data.attention.size : data.width,
    row: Math.max(em * 1.35, Math.min(em * 2.2, (em * 36) / count)), label: Math.max(em * 4.2, Math.min(em * 8, stage.width * 0.19)),
    short: (token, most) => patchName(data.tokens[token])?.join("·") ?? (shortToken(data.tokens[token], most) || "␣"), called: tokenName,
    choose, open: (layer) => choose(chosen.at, layer), picture: images && data.ids === null ? pictureOf : null,
  };
}

// “row 2, column 3” of an image, as the server names its patches.
function patchName(token) {
  return data.ids ? null : /^row (\d+), column (\d+)$/.exec(token)?.slice(1) ?? null;
}

function tokenName(token) {
  const patch = patchName(data.tokens[token]);
  return patch ? say`patch ${patch[0]}·${patch[1]}` : visibleToken(data.tokens[token]).trim();
}

function pictureOf(token) {
  const first = data.tokens.length - PATCHES ** 2;
  if (token < first || !images.url) return undefined;
  return { url: images.url, across: PATCHES, down: PATCHES, column: (token - first) % PATCHES, row: Math.floor((token - first) / PATCHES) };
}

function choose(at, layer = chosen.layer) {
  chosen.at = at;
  if (layer === chosen.layer) return showingErrors(loadPredictions);
  chosen.layer = layer;
  return load();
}

// A choice that follows at once aborts the request of the one before.
async function showingErrors(work) {
  try {
    await work();
  } catch (error) {
    if (!wasAborted(error)) showError(errorMessage(error));
  }
}

const input = () => (chosen.model.input === "image" ? { image: images.pixels } : { text: chosen.text });

async function load() {
  const { name } = chosen.model;
  if (chosen.model.input === "text" && !chosen.text.trim()) return;
  byId("lesson").setAttribute("aria-busy", "true");
  try {
    const known = data?.layers[chosen.layer]?.heads ?? chosen.model.layers.find(({ layer }) => layer === chosen.layer)?.heads ?? 1;
    chosen.head = Math.min(chosen.head, Math.max(0, known - 1));
    data = await api.ask("explain_layer", { model: name, ...input(), layer: chosen.layer, head: chosen.head });
    if (chosen.at === null || chosen.at >= data.tokens.length) chosen.at = data.start;
    if (batch?.model !== name || batch.layer !== chosen.layer) await loadBatch();
    await loadPredictions();
  } catch (error) {
    if (!wasAborted(error)) showError(errorMessage(error));
  } finally {
    byId("lesson").removeAttribute("aria-busy");
  }
}

async function loadBatch() {
  batch = null;
  if (chosen.model.input === "image") return;
  batch = { ...await api.ask("explain_batch", { model: chosen.model.name, text: chosen.texts, layer: chosen.layer }), model: chosen.model.name };
}

// What the model answers at the chosen token of the text as it is drawn; the last step shows it.
async function loadPredictions() {
  draw();
  if (data.total > data.tokens.length) predictions = null;
  else predictions = await api.ask("predictions", { model: chosen.model.name, ...input(), position: chosen.at, top_k: 6 });
  if (chosen.step === "next") draw();
}

function draw(moving = true) {
  if (!data) return;
  const now = view();
  steps = stepsFor(now);
  const place = Math.max(0, steps.findIndex(({ id }) => id === chosen.step));
  const step = steps[place];
  chosen.step = step.id;
  drawControls(step);
  drawProgress(place);
  drawWords(step, now, place);
  stage.draw(step.draw(now), moving);
  remember();
}

function drawControls(step) {
  byId("layer").max = data.layers.length - 1;
  byId("layer").value = chosen.layer;
  byId("layer-now").textContent = `${chosen.layer} / ${data.layers.length - 1}`;
  const heads = data.layers[chosen.layer].heads;
  byId("head").max = Math.max(0, heads - 1);
  byId("head").value = chosen.head;
  byId("head").disabled = heads < 2;
  byId("head-now").textContent = heads ? `${chosen.head} / ${heads - 1}` : "–";
  byId("token").replaceChildren(...data.tokens.map((token, place) => h("option", { value: place }, data.ids ? `${place} ${listedToken(token)}` : tokenName(place))));
  byId("token").value = chosen.at;
  const packing = step.chapter.id === "packing";
  const image = chosen.model.input === "image";
  byId("text-field").hidden = packing || image;
  byId("texts-field").hidden = !packing;
  byId("image-field").hidden = !image;
  byId("token-field").hidden = byId("head-field").hidden = packing;
  byId("cut").textContent = cutWords(packing, image);
  byId("cut").hidden = !byId("cut").textContent;
}

function cutWords(packing, image) {
  if (packing) return batch.totals.some((total, place) => total > batch.lengths[place]) ? say`Of each sentence the first ${Math.max(...batch.lengths)} tokens are read here.` : "";
  if (image) return say`The image is shrunk to ${PATCHES} × ${PATCHES} patches, so that every number can be drawn. The third chapter, on sentences, needs a model of text.`;
  if (data.total > data.tokens.length) return say`The model reads the first ${data.tokens.length} of ${data.total} tokens here, so that every number can be drawn.`;
  return chosen.model.warning ? say`This model is damaged (${chosen.model.warning}).` : "";
}

function drawProgress(place) {
  const old = document.activeElement?.closest?.("#progress button")?.dataset.step;
  const now = view();
  byId("progress").replaceChildren(...CHAPTERS.filter((chapter) => steps.some((step) => step.chapter.id === chapter.id)).map((chapter) => {
    const own = steps.filter((step) => step.chapter.id === chapter.id);
    const items = own.map((step) => {
      const number = steps.indexOf(step);
      const title = step.title(now);
      return h("li", {}, h("button", { type: "button", "data-step": step.id, title, "aria-label": say`Step ${number + 1}: ${title}`, "aria-current": number === place ? "step" : null, class: number < place ? "done" : null, on: { click: () => go(number) } }));
    });
    const section = h("section", {}, h("h2", {}, chapter.title()), h("ol", {}, items));
    section.style.flexGrow = String(own.length);
    return section;
  }));
  if (old) byId("progress").querySelector(`[data-step="${chosen.step}"]`)?.focus();
  const current = byId("progress").querySelector("[aria-current]");
  const line = byId("progress");
  if (line.scrollWidth > line.clientWidth) line.scrollLeft = current.offsetLeft - line.offsetLeft - line.clientWidth / 2;
}

function drawWords(step, now, place) {
  byId("chapter").textContent = step.chapter.title();
  byId("title").textContent = step.title(now);
  byId("words").textContent = step.words(now);
  byId("formula").replaceChildren(...step.formula(now).filter(Boolean).map((part) => {
    if (typeof part === "string") return part;
    return part.mark ? h("mark", {}, part.mark) : h("sub", {}, part.sub);
  }));
  byId("facts").replaceChildren(...(step.facts?.(now) ?? []).filter(Boolean).map((fact) => h("li", { class: fact.good ? "good" : null }, fact.good ?? fact)));
  byId("back").disabled = place === 0;
  byId("next").disabled = place === steps.length - 1;
  byId("count").textContent = `${place + 1} / ${steps.length}`;
  const wanted = step.slot === "temperature" && now.attention.has_scores ? "temperature" : "";
  if (byId("slot").dataset.has !== wanted) {
    byId("slot").dataset.has = wanted;
    byId("slot").replaceChildren(...(wanted ? [temperature()] : []));
  }
  if (wanted) showTemperature();
}

// From 0.1 to 10 by powers of ten, so that 1 stands in the middle.
function temperature() {
  const slider = h("input", { type: "range", id: "temperature", min: -1, max: 1, step: 0.02, value: Math.log10(chosen.temperature), list: "temperature-marks" });
  slider.addEventListener("input", () => {
    const power = Number(slider.value);
    chosen.temperature = Math.abs(power) < 0.03 ? 1 : 10 ** power;
    draw();
  });
  const mark = (left, text) => {
    const label = h("span", {}, text);
    label.style.left = left;
    return label;
  };
  const marks = h("div", { class: "marks", "aria-hidden": "true" }, mark("6%", say`sharp`), mark("50%", say`1: the model`), mark("94%", say`flat`));
  const options = h("datalist", { id: "temperature-marks" }, h("option", { value: 0 }));
  return h("div", { class: "temperature" }, h("label", { for: "temperature" }, say`Temperature`, " ", h("b", { id: "temperature-now" })), slider, marks, options);
}

function showTemperature() {
  const text = chosen.temperature === 1 ? say`1, as the model has it` : decimal(chosen.temperature);
  byId("temperature-now").textContent = text;
  byId("temperature").setAttribute("aria-valuetext", text);
}

function go(place) {
  const step = steps[Math.max(0, Math.min(steps.length - 1, place))];
  if (!step || step.id === chosen.step) return;
  chosen.step = step.id;
  draw();
  announce(`${byId("title").textContent}. ${byId("words").textContent}`);
}

const here = () => steps.findIndex(({ id }) => id === chosen.step);

function save() {
  const said = new URLSearchParams({ m: chosen.model.name, l: chosen.layer, h: chosen.head, at: chosen.at, s: chosen.step });
  if (chosen.model.input === "text") said.set("t", chosen.text);
  if (chosen.texts !== TEXTS) said.set("b", chosen.texts);
  if (chosen.temperature !== 1) said.set("x", chosen.temperature.toPrecision(3));
  if (document.documentElement.classList.contains("presenting")) said.set("p", "1");
  history.replaceState(null, "", `#${said}`);
}

const remember = debounce(200, save);

// Anybody may have written the address: what the models do not have is left out.
function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const number = (name, most) => (/^\d{1,4}$/.test(said.get(name) ?? "") && Number(said.get(name)) <= most ? Number(said.get(name)) : null);
  chosen.model = models.find(({ name }) => name === said.get("m")) ?? models[0];
  const first = /^L(\d+)H(\d+)$/.exec(chosen.model.examples?.[0]?.heads?.[0] ?? "");
  const layers = chosen.model.layers;
  chosen.layer = number("l", 999) ?? Number(first?.[1] ?? layers[0].layer);
  if (chosen.layer > layers.at(-1).layer) chosen.layer = layers.at(-1).layer;
  const heads = layers.find(({ layer }) => layer === chosen.layer)?.heads ?? 1;
  chosen.head = number("h", heads - 1) ?? (first && Number(first[1]) === chosen.layer ? Number(first[2]) : 0);
  chosen.at = number("at", 9999);
  chosen.text = said.get("t") ?? TEXT;
  chosen.texts = said.get("b") ?? TEXTS;
  chosen.step = said.get("s") ?? "tokens";
  const warm = Number(said.get("x") ?? 1);
  chosen.temperature = warm >= 0.1 && warm <= 10 ? warm : 1;
  if (said.get("p") === "1") present(true);
}

function present(is) {
  document.documentElement.classList.toggle("presenting", is);
  byId("present").setAttribute("aria-pressed", String(is));
}

function openModel() {
  data = batch = predictions = null;
  images = null;
  byId("text").value = chosen.text;
  byId("texts").value = chosen.texts;
  if (chosen.model.input !== "image") return load();
  const { patch, registers } = chosen.model.image;
  images = new ImageView({
    model: { image: { side: PATCHES * patch, patch, registers } }, hover() {}, select() {}, failed: (_, words) => showError(words),
    run() {
      images.url = images.picture.toDataURL();
      load();
    },
  });
  return images.example();
}

function controls() {
  const slide = (id, changed) => byId(id).addEventListener("input", () => changed(Number(byId(id).value)));
  const soon = debounce(120, load);
  slide("layer", (layer) => {
    chosen.layer = layer;
    byId("layer-now").textContent = `${layer} / ${byId("layer").max}`;
    soon();
  });
  slide("head", (head) => {
    chosen.head = head;
    byId("head-now").textContent = `${head} / ${byId("head").max}`;
    soon();
  });
  byId("token").addEventListener("change", () => choose(Number(byId("token").value)));
  const typed = debounce(450, () => {
    chosen.text = byId("text").value;
    chosen.at = null;
    load();
  });
  byId("text").addEventListener("input", typed);
  byId("texts").addEventListener("input", debounce(450, async () => {
    chosen.texts = byId("texts").value;
    try {
      await loadBatch();
      draw();
    } catch (error) {
      if (!wasAborted(error)) showError(errorMessage(error));
    }
  }));
  byId("image").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", () => images.take(byId("file").files[0]));
  if (window.innerWidth <= 900) byId("choices").open = false;
  byId("model").replaceChildren(...models.map(({ name }) => h("option", { value: name }, name)));
  byId("model").value = chosen.model.name;
  byId("model-field").hidden = models.length < 2;
  byId("model").addEventListener("change", () => {
    location.hash = new URLSearchParams({ m: byId("model").value, s: chosen.step, t: chosen.text });
  });
  byId("back").addEventListener("click", () => go(here() - 1));
  byId("next").addEventListener("click", () => go(here() + 1));
  byId("present").addEventListener("click", () => {
    present(!document.documentElement.classList.contains("presenting"));
    draw(false);
  });
  document.addEventListener("keydown", keys);
  window.addEventListener("hashchange", () => location.reload());
  let width = stage.width;
  new ResizeObserver(debounce(60, () => {
    // Steps change the height; only another width needs another drawing.
    if (stage.width !== width) draw(false);
    width = stage.width;
  })).observe(byId("stage"));
}

function keys(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const typing = event.target.matches("input, select, textarea");
  const step = { PageDown: 1, PageUp: -1, ...(typing ? {} : { ArrowRight: 1, ArrowLeft: -1 }) }[event.key];
  if (step) {
    event.preventDefault();
    go(here() + step);
  }
  if (event.key === "Escape" && byId("present").getAttribute("aria-pressed") === "true") {
    present(false);
    draw(false);
  }
}

async function begin() {
  startThemes(() => draw(false));
  translatePage();
  startLanguages(byId("language"), save);
  try {
    ({ models } = await api.models());
  } catch (error) {
    showError(errorMessage(error));
    return;
  }
  readAddress();
  controls();
  await openModel();
}

begin();
