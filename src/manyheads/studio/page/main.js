// The page: sides, the bar above them, and the address that keeps what is seen.

import { Api, sentence } from "./api.js";
import { Difference } from "./compare.js";
import { complain, h, later, say } from "./dom.js";
import { exportView } from "./exports.js";
import { Side } from "./side.js";
import { readAddress, writeAddress } from "./state.js";

const EXPORTS = [
  ["png", "PNG", "a picture, for slides"],
  ["svg", "SVG", "a drawing, for print"],
  ["json", "JSON", "all numbers of the view"],
];

const byId = (id) => document.getElementById(id);
const place = byId("sides");
const sides = [];
const difference = new Difference(byId("difference"));
let models = [];

const keep = later(250, () => writeAddress(sides.map((side) => side.state())));

function changed() {
  keep();
  if (sides.length === 2) difference.update(sides);
}

function add(given) {
  const side = new Side(models, changed);
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

// The second side begins as the first; with two models, as the other one.
function compare() {
  if (sides.length === 2) {
    const gone = sides.pop();
    gone.api.stopAll();
    gone.element.remove();
    arrange();
    changed();
    say("One side");
    return;
  }
  const given = sides[0].state();
  const other = models.find((each) => each.name !== given.m && each.reads === sides[0].model.reads);
  add(other ? { ...given, m: other.name, o: "", p: "", h: undefined } : given);
  say("Two sides");
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "☀" : "☾";
}

function themes() {
  const wished = window.matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try {
    kept = localStorage.getItem("manyheads-theme");
  } catch {
    // A browser that keeps nothing asks the system each time.
  }
  chooseTheme(kept ?? (wished.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    chooseTheme(next);
    try {
      localStorage.setItem("manyheads-theme", next);
    } catch {
      // As above.
    }
    for (const side of sides) side.redraw();
    changed();
  });
}

function menus() {
  const [button, list] = [byId("export"), byId("exports")];
  const open = (is) => {
    list.hidden = !is;
    button.setAttribute("aria-expanded", String(is));
    if (is) list.firstChild.focus();
  };
  for (const [kind, name, words] of EXPORTS) {
    const act = () => {
      open(false);
      exportView(kind, sides).then(() => say(`${name} saved`), (error) => complain(sentence(error)));
    };
    list.append(h("button", { type: "button", role: "menuitem", on: { click: act } }, name, h("small", {}, words)));
  }
  button.addEventListener("click", () => open(list.hidden));
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".menu")) open(false);
  });
  // To another window focus goes without a place there, and the menu waits.
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

function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const side of sides) {
      side.writing.stop();
      side.over(null);
    }
  });
  // An image may be dropped anywhere; without this the browser would leave the page for it.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
}

async function begin() {
  themes();
  menus();
  keys();
  byId("compare").addEventListener("click", compare);
  byId("help").addEventListener("click", () => byId("guide").showModal());
  try {
    ({ models } = await new Api().models());
  } catch (error) {
    complain(sentence(error));
    return;
  }
  for (const given of readAddress()) add(given);
  window.addEventListener("hashchange", () => location.reload());
}

begin();
