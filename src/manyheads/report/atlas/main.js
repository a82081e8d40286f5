// Start the page: read the index, and show the finder or the head that the address names.

import { readAddress } from "./address.js";
import { readChunk } from "./chunks.js";
import { h } from "./dom.js";
import { buildFinder, drawFinder } from "./finder.js";
import { pluralise } from "./format.js";
import { drawHead } from "./head.js";
import { drawNavigator } from "./navigator.js";
import { KIND, atlasNow, begin, kindGroups, state } from "./state.js";
import { startThemes } from "./theme.js";

const element = (name) => document.getElementById(name);

function describeAtlas({ corpus, about, complete, origin }) {
  const size = [corpus.passages == null ? "" : pluralise(corpus.passages, "passage"), corpus.tokens == null ? "" : pluralise(corpus.tokens, "token")].filter(Boolean).join(", ");
  const read = [corpus.name, size && `(${size})`].filter(Boolean).join(" ");
  element("about").textContent = [about, read && `Measured on ${read}.`, complete === false ? "The corpus was not read to its end." : "", origin].filter(Boolean).join(" ");
}

function draw() {
  const { at, head } = readAddress(location.hash);
  if (state.atlases[at]) state.at = at;
  element("step").value = state.at;
  element("step-name").textContent = atlasNow().name;
  describeAtlas(atlasNow());
  element("missing").hidden = head !== undefined;
  element("missing").textContent = head === undefined ? `There is no head ${location.hash.slice(1)} in this atlas.` : "";
  element("finder").hidden = Boolean(head);
  element("head").hidden = !head;
  document.title = `${head ? `${head.name} · ` : ""}${atlasNow().name}: atlas of heads`;
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
