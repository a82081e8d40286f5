// The page: its sides, the toolbar, and the address that restores the view.

import "./russian.js";
import "./russian_heads.js";
import "./russian_kinds.js";
import "./russian_measures.js";
import { Api, errorMessage, showError } from "./api.js";
import { Difference } from "./compare.js";
import { h, debounce, announce } from "./dom.js";
import { exportView } from "./export.js";
import { say, startLanguages, translatePage } from "./language.js";
import { Side } from "./side.js";
import { readAddress, writeAddress } from "./state.js";
import { startThemes } from "./theme.js";
import { Tour, tourWasSeen } from "./tour.js";

const byId = (id) => document.getElementById(id);
const place = byId("sides");
const sides = [];
const difference = new Difference(byId("difference"));
const tour = new Tour();
// Whether the tour starts by itself, with the first prediction.
let tourWaits = false;
let models = [];
let limits = {};

const save = () => writeAddress(sides.map((side) => side.state()));
const keep = debounce(250, save);

function changed() {
  keep();
  if (sides.length === 2) difference.update(sides);
  if (tourWaits && sides[0].prediction) {
    tourWaits = false;
    tour.start(sides[0]);
  } else tour.update();
}

function add(given) {
  const side = new Side(models, limits, changed);
  sides.push(side);
  place.append(side.element);
  arrange();
  return side.restore(given);
}

function arrange() {
  place.dataset.count = sides.length;
  byId("compare").setAttribute("aria-pressed", String(sides.length === 2));
  sides.forEach((side, index) => {
    side.frame.title.hidden = sides.length < 2;
    side.frame.title.textContent = index ? "B" : "A";
  });
  if (sides.length < 2) difference.hide();
}

// The second side has another model if there is one; else it has the heads back that are changed, or the
// other prompt of the example; else it is a copy.
function compare() {
  if (sides.length === 2) {
    const gone = sides.pop();
    gone.api.stopAll();
    gone.element.remove();
    arrange();
    changed();
    announce(say`Comparison closed`);
    return;
  }
  const given = sides[0].state();
  const other = models.find((each) => each.name !== given.m && each.input === sides[0].model.input);
  const intact = { ...given, o: "", p: "", k: undefined, q: undefined };
  difference.start();
  if (other) add({ ...intact, m: other.name, h: undefined });
  else add(sides[0].changed ? intact : { ...given, t: sides[0].example?.source || given.t });
  announce(say`Comparing two sides`);
}

function menus() {
  const [button, list] = [byId("export"), byId("exports")];
  const open = (is) => {
    list.hidden = !is;
    button.setAttribute("aria-expanded", String(is));
    if (is) list.firstChild.focus();
  };
  const exports = [
    ["png", "PNG", say`an image, for slides`],
    ["svg", "SVG", say`vector graphics, for print`],
    ["json", "JSON", say`the numbers of this view`],
  ];
  for (const [kind, name, words] of exports) {
    const act = () => {
      open(false);
      exportView(kind, sides).then(() => announce(say`${name} saved`), (error) => showError(errorMessage(error)));
    };
    list.append(h("button", { type: "button", role: "menuitem", on: { click: act } }, name, h("small", {}, words)));
  }
  button.addEventListener("click", () => open(list.hidden));
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".menu")) open(false);
  });
  // The menu stays open when another window gets the focus.
  list.parentElement.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !relatedTarget.closest(".menu")) open(false);
  });
  list.addEventListener("keydown", (event) => {
    const items = [...list.children];
    const here = items.indexOf(document.activeElement);
    if (event.key === "ArrowDown") items[(here + 1) % items.length].focus();
    if (event.key === "ArrowUp") items[(here + items.length - 1) % items.length].focus();
    if (event.key === "Escape") {
      open(false);
      button.focus();
    }
  });
}

// The column beside the text ends where the window does: `--above` is what is in sight above it.
function fitColumn() {
  const above = place.getBoundingClientRect().top - 10;
  place.style.setProperty("--above", `${Math.max(0, Math.round(above))}px`);
}

function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const side of sides) {
      side.generation.stop();
      side.hover(null);
    }
  });
  // Keep the browser from opening an image that is wasAborted beside its field.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
}

async function begin() {
  translatePage();
  startLanguages(byId("language"), save);
  startThemes(() => {
    for (const side of sides) side.redraw();
    changed();
  });
  menus();
  keys();
  fitColumn();
  for (const name of ["scroll", "resize"]) window.addEventListener(name, fitColumn, { passive: true });
  byId("compare").addEventListener("click", compare);
  byId("help").addEventListener("click", () => {
    byId("tour").hidden = sides[0]?.isVision ?? true;
    byId("guide").showModal();
  });
  byId("tour").addEventListener("click", () => {
    byId("guide").close();
    tour.start(sides[0]);
  });
  let indexes = [];
  try {
    ({ models, limits, indexes } = await new Api().models());
  } catch (error) {
    showError(errorMessage(error));
    return;
  }
  byId("search-link").hidden = !indexes.length;
  if (indexes.length && location.hash.length < 2) {
    // A studio that was started with an index opens on its search.
    location.replace("search.html");
    return;
  }
  tourWaits = location.hash.length < 2 && models[0].input === "text" && !tourWasSeen();
  for (const given of readAddress()) add(given);
  window.addEventListener("hashchange", () => location.reload());
}

begin();
