// Start the page: read the index, and show the finder or the head that the address names.

import { readAddress } from "./address.js";
import { readChunk } from "./chunks.js";
import { h } from "./dom.js";
import { buildFinder, drawFinder } from "./finder.js";
import { counted } from "./format.js";
import { drawHead } from "./head.js";
import { currentLanguage, say, startLanguages, translateFilled, translatePage } from "./language.js";
import "./russian_heads.js";
import "./russian_kinds.js";
import "./russian_measures.js";
import "./russian_pages.js";
import "./russian_atlas.js";
import { drawNavigator } from "./navigator.js";
import { KIND, atlasNow, begin, corpusName, kindGroups, state } from "./state.js";
import { startThemes } from "./theme.js";

const element = (name) => document.getElementById(name);

function describeAtlas({ corpus, about, complete, origin }) {
  const passages = corpus.passages == null ? "" : say`${counted(corpus.passages)} {0|passage|passages}`;
  const tokens = corpus.tokens == null ? "" : say`${counted(corpus.tokens)} {0|token|tokens}`;
  const size = [passages, tokens].filter(Boolean).join(", ");
  const read = [corpusName(corpus), size && `(${size})`].filter(Boolean).join(" ");
  element("about").textContent = [translateFilled(about ?? ""), read && say`Measured on ${read}.`, complete === false ? say`The corpus was not read to its end.` : "", madeOn(origin ?? "")].filter(Boolean).join(" ");
}

// "Made on 18 November 2026." with the date as people write it in the language of the page.
function madeOn(origin) {
  const [, written] = /^Made on (.+)\.$/.exec(origin) ?? [];
  const date = new Date(`${written} 12:00`);
  if (Number.isNaN(date.valueOf()) || currentLanguage() === "en") return origin;
  return say`Made on ${date.toLocaleDateString(currentLanguage(), { dateStyle: "long" }).replace(/ г\.$/, "")}.`;
}

function draw() {
  const { at, head } = readAddress(location.hash);
  if (state.atlases[at]) state.at = at;
  element("step").value = state.at;
  element("step-name").textContent = atlasNow().name;
  describeAtlas(atlasNow());
  element("missing").hidden = head !== undefined;
  element("missing").textContent = head === undefined ? say`There is no head ${location.hash.slice(1)} in this atlas.` : "";
  element("finder").hidden = Boolean(head);
  element("head").hidden = !head;
  document.title = `${head ? `${head.name} · ` : ""}${say`${atlasNow().name}: atlas of heads`}`;
  drawNavigator(element("navigator"), head ?? null);
  if (!head) { drawFinder(); return; }
  drawHead(element("head"), head).catch((error) => element("head").append(h("p", { role: "alert" }, error.message)));
}

function opened() {
  draw();
  if (element("head").hidden) return;
  scrollTo(0, 0);
  element("title").focus({ preventScroll: true });
}

function slide(event) {
  state.at = Number(event.target.value);
  const { head } = readAddress(location.hash);
  if (head) location.hash = location.hash.split("@")[0] + (state.at ? `@${state.at}` : "");
  else { history.replaceState(null, "", "#"); draw(); }
}

translatePage();
startLanguages(element("language"));
startThemes(() => draw());
readChunk("atlas.js").then(({ atlases }) => {
  begin(atlases);
  if (!kindGroups().length) state.color = atlases[0].measures[0]?.name ?? KIND;
  element("steps").hidden = atlases.length < 2;
  element("step").max = atlases.length - 1;
  element("step").addEventListener("input", slide);
  buildFinder(element("finder"), draw);
  addEventListener("hashchange", opened);
  opened();
}).catch((error) => {
  element("missing").hidden = false;
  element("missing").textContent = error.message;
});
