// The page of search: a query, its results, and why the selected one matched.

import "./russian.js";
import "./russian_heads.js";
import "./russian_kinds.js";
import "./russian_measures.js";
import { Api, errorMessage, showError, wasAborted } from "./api.js";
import { announce, h } from "./dom.js";
import { counted, decimal } from "./format.js";
import { say, startLanguages, translatePage } from "./language.js";
import { drawHeads, drawMatch } from "./match_view.js";
import { startThemes } from "./theme.js";

const byId = (id) => document.getElementById(id);
const [form, query, chosenIndex, count, results, why, status] = ["form", "query", "index", "count", "results", "why", "status"].map(byId);
const found = document.querySelector("main.found");
const api = new Api();
let indexes = [];
// The answer that is shown, the number of the selected result, and its explanation.
let shown = { query: "", index: "", hits: [] };
let selected = -1;
let explained = null;
let headMaps = null;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  query.value = given.get("q") ?? "";
  if (indexes.some((each) => each.name === given.get("i"))) chosenIndex.value = given.get("i");
  if ([...count.options].some((each) => each.value === given.get("n"))) count.value = given.get("n");
}

function writeAddress() {
  const said = new URLSearchParams({ q: shown.query, i: shown.index, n: count.value });
  history.replaceState(null, "", `#${said}`);
}

// Before the first search: what can be asked.
function showExamples() {
  found.classList.add("fresh");
  why.hidden = true;
  const ask = (text) => {
    query.value = text;
    search();
  };
  const { queries } = indexes.find((each) => each.name === chosenIndex.value);
  const buttons = queries.map((text) => h("button", { type: "button", dir: "auto", on: { click: () => ask(text) } }, text));
  const words = say`Search for something, then select a result: its words and the heads of the model show why it matched.`;
  results.replaceChildren(h("li", { class: "card" }, h("p", {}, words), h("div", { class: "row", role: "group", "aria-label": say`Queries to try` }, h("span", { class: "quiet" }, say`Try`), buttons)));
}

async function search() {
  const asked = { query: query.value, index: chosenIndex.value, top_k: Number(count.value) };
  if (!asked.query.trim()) {
    status.textContent = say`Type at least one word.`;
    query.focus();
    return;
  }
  form.setAttribute("aria-busy", "true");
  status.textContent = say`Searching…`;
  api.stop("explain_match");
  api.stop("heads");
  try {
    const { hits, seconds } = await api.ask("search", asked);
    shown = { ...asked, hits };
    found.classList.remove("fresh");
    why.hidden = false;
    status.textContent = hits.length ? say`${counted(hits.length)} {0|result|results} in ${decimal(1000 * seconds)} ms` : say`No document was found: try other words.`;
    announce(status.textContent);
    drawResults();
    writeAddress();
  } catch (error) {
    if (wasAborted(error)) return;
    status.textContent = say`The search failed.`;
    showError(errorMessage(error));
  } finally {
    form.removeAttribute("aria-busy");
  }
}

// The text with its marks: pairs of a first character and the one after the last.
function marked(text, marks) {
  const letters = Array.from(text);
  const parts = [];
  let end = 0;
  for (const [start, stop] of marks) {
    parts.push(letters.slice(end, start).join(""), h("mark", {}, letters.slice(start, stop).join("")));
    end = stop;
  }
  return [...parts, letters.slice(end).join("")];
}

function drawResults() {
  selected = -1;
  results.replaceChildren(...shown.hits.map((hit, place) => {
    const from = [hit.title && hit.id !== hit.title ? hit.id : null, hit.source !== hit.id ? hit.source : null, ...Object.entries(hit.metadata).map(([key, value]) => `${key}: ${value}`)];
    const button = h(
      "button",
      { type: "button", class: "hit", "aria-label": say`Result ${place + 1}: ${hit.title || hit.id}`, on: { click: () => select(place) } },
      h("header", {}, h("h2", { dir: "auto" }, `${place + 1}. ${hit.title || hit.id}`), h("span", { class: "number" }, decimal(hit.score))),
      h("p", { class: "from" }, from.filter(Boolean).join(" · ")),
      h("p", { class: "passage", dir: "auto" }, ...marked(hit.text, hit.marks)),
    );
    return h("li", {}, button);
  }));
  if (shown.hits.length) select(0, false);
  else why.replaceChildren(h("p", { class: "empty" }, say`There is nothing to explain.`));
}

const buttons = () => [...results.querySelectorAll(".hit")];

async function select(place, follow = true) {
  selected = place;
  buttons().forEach((each, index) => each.setAttribute("aria-current", String(index === place)));
  const hit = shown.hits[place];
  const about = indexes.find((each) => each.name === shown.index);
  explained = headMaps = null;
  api.stop("explain_match");
  api.stop("heads");
  if (!about.explains) {
    why.replaceChildren(title(hit), h("p", { class: "quiet" }, say`This index finds words, without a model: those of the query are marked.`), h("div", { class: "explained", dir: "auto" }, ...marked(hit.text, hit.marks)));
    return;
  }
  why.replaceChildren(title(hit), h("p", { class: "quiet" }, say`Explaining…`));
  if (follow && window.innerWidth < 1000) why.scrollIntoView({ block: "start" });
  const body = { index: shown.index, query: shown.query, title: hit.title, text: hit.text };
  try {
    explained = await api.ask("explain_match", body);
    draw();
    announce(say`Why result ${place + 1} matched is shown`);
    headMaps = await api.ask("explain_match", { ...body, heads: true }, "heads");
    draw();
  } catch (error) {
    if (wasAborted(error)) return;
    const problem = h("p", { class: "bad", role: "alert" }, errorMessage(error));
    if (explained) why.append(problem);
    else why.replaceChildren(title(hit), problem);
  }
}

function title(hit) {
  return h("h2", { dir: "auto" }, say`Why ${hit.title || hit.id} matched`);
}

function draw() {
  if (!explained) return;
  const heads = headMaps ? drawHeads(headMaps) : h("section", {}, h("h3", {}, say`Heads`), h("p", { class: "quiet" }, say`Running the model without each head…`));
  why.replaceChildren(title(shown.hits[selected]), ...drawMatch(explained), heads);
}

function keys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      query.focus();
      query.select();
    } else if (event.key === "Escape" && !typing) query.focus();
    else if (["ArrowDown", "ArrowUp"].includes(event.key) && event.target.closest("#results, #query")) {
      const all = buttons();
      const here = all.indexOf(document.activeElement);
      const next = all[here + (event.key === "ArrowDown" ? 1 : -1)];
      if (!next) {
        if (event.key === "ArrowUp" && here === 0) query.focus();
        return;
      }
      event.preventDefault();
      next.focus();
    }
  });
}

async function begin() {
  translatePage();
  startLanguages(byId("language"));
  startThemes(draw);
  keys();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  why.hidden = true;
  try {
    ({ indexes } = await api.models());
  } catch (error) {
    showError(errorMessage(error));
    return;
  }
  if (!indexes.length) {
    status.textContent = say`There is no index: start the studio with --index INDEX.`;
    return;
  }
  chosenIndex.append(...indexes.map((each) => h("option", { value: each.name }, say`${each.name} (${each.kind}, ${counted(each.documents)} {2|document|documents})`)));
  readAddress();
  window.addEventListener("hashchange", () => location.reload());
  if (query.value.trim()) search();
  else {
    showExamples();
    chosenIndex.addEventListener("change", () => found.classList.contains("fresh") && showExamples());
    query.focus();
  }
}

begin();
