// A drawing of named parts. A part that two drawings share moves from its place in the first to its place in
// the second; a new one comes out of the part that it is made from.

import { css, diverging } from "./color.js";
import { h, s } from "./dom.js";

const LEAVES = 450;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Stage {
  #parts = new Map();

  constructor(element, readout) {
    this.element = element;
    this.readout = readout;
    this.lines = s("svg", { class: "lines", "aria-hidden": "true" });
    element.append(this.lines);
    element.addEventListener("pointermove", (event) => this.#point(event));
    element.addEventListener("pointerleave", () => this.#say(null));
    element.addEventListener("click", (event) => this.#partOf(event.target)?.act?.());
    element.addEventListener("focusin", (event) => this.#focus(event.target));
    element.addEventListener("focusout", () => this.#say(null));
    element.addEventListener("keydown", (event) => this.#key(event));
  }

  get width() {
    return this.element.clientWidth;
  }

  // `scene` has parts, lines, a height, and what to say while nothing is pointed at.
  draw(scene, moving = true) {
    this.hint = scene.hint ?? "";
    this.element.classList.toggle("still", !moving);
    this.element.style.height = `${Math.ceil(scene.height)}px`;
    const keys = new Set(scene.parts.map((part) => part.key));
    const entering = [];
    for (const part of scene.parts) {
      const present = this.#parts.get(part.key);
      if (present) present.part = part;
      else entering.push(part);
    }
    for (const part of entering) this.#enter(part);
    // Where they begin is drawn before where they go.
    if (entering.length) void this.element.offsetWidth;
    for (const [key, { element, part }] of this.#parts) {
      if (keys.has(key)) this.#place(element, part);
      else this.#leave(key, element);
    }
    this.#roving(scene);
    this.lines.replaceChildren(...(scene.lines ?? []).map((line) => s("path", { class: `line ${line.kind ?? ""}`, d: line.d })));
    this.#say(this.#parts.get(document.activeElement?.dataset?.key)?.part ?? null);
  }

  // One stop of the Tab key, at the part that matters most or where it was.
  #roving(scene) {
    const able = scene.parts.filter((part) => part.tell || part.act);
    const before = able.find((part) => part.key === this.stop);
    this.stop = (before ?? able.find((part) => part.chosen) ?? able[0])?.key;
    for (const part of able) this.#parts.get(part.key).element.tabIndex = part.key === this.stop ? 0 : -1;
  }

  #enter(part) {
    const element = h("div", { "data-key": part.key });
    const origin = this.#parts.get(part.from)?.part ?? part;
    this.#parts.set(part.key, { element, part });
    this.#place(element, { ...part, x: origin.x, y: origin.y, w: part.stays ? part.w : origin.w, h: part.stays ? part.h : origin.h, opacity: 0 });
    this.element.append(element);
  }

  #leave(key, element) {
    this.#parts.delete(key);
    element.style.opacity = "0";
    element.classList.add("leaving");
    element.removeAttribute("tabindex");
    element.setAttribute("aria-hidden", "true");
    setTimeout(() => element.remove(), LEAVES);
  }

  #place(element, part) {
    const { style } = element;
    const able = Boolean(part.tell || part.act);
    // Their names have a prefix: other pages of the studio have strips and cells of their own.
    element.className = ["part", ...`${part.kind} ${part.tone ?? ""}`.split(" ").filter(Boolean).map((name) => `x-${name}`), part.chosen && "chosen", part.hollow && "hollow", part.act && "acts"].filter(Boolean).join(" ");
    style.transform = `translate(${round(part.x)}px, ${round(part.y)}px)`;
    style.width = `${round(part.w)}px`;
    style.height = `${round(part.h)}px`;
    style.opacity = String(part.opacity ?? 1);
    style.transitionDelay = `${part.delay ?? 0}ms`;
    style.fontSize = part.size ? `${part.size}px` : "";
    style.color = part.ink ?? "";
    style.background = part.values ? gradient(part.values, part.most) : part.fill ?? "";
    if (part.image) Object.assign(style, { backgroundImage: `url(${part.image.url})`, backgroundSize: `${part.image.across * part.w}px ${part.image.down * part.h}px`, backgroundPosition: `${-part.image.column * part.w}px ${-part.image.row * part.h}px` });
    if (part.content) element.replaceChildren(part.content);
    else if (element.textContent !== (part.text ?? "") || element.childElementCount) element.textContent = part.text ?? "";
    if (able) {
      element.setAttribute("role", part.act ? "button" : "img");
      element.setAttribute("aria-label", part.name ?? described(part));
      if (part.act) element.setAttribute("aria-pressed", String(Boolean(part.chosen)));
      else element.removeAttribute("aria-pressed");
    } else {
      for (const name of ["role", "aria-label", "aria-pressed", "tabindex"]) element.removeAttribute(name);
    }
  }

  #partOf(target) {
    return this.#parts.get(target.closest?.(".part")?.dataset.key)?.part;
  }

  #point(event) {
    const part = this.#partOf(event.target);
    if (!part?.tell) return this.#say(null);
    const box = event.target.closest(".part").getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) / box.width) * (part.values?.length ?? 1));
    this.#say(part, Math.max(0, Math.min((part.values?.length ?? 1) - 1, place)));
  }

  #focus(target) {
    const part = this.#partOf(target);
    if (!part) return;
    if (this.stop !== part.key) {
      const last = this.#parts.get(this.stop);
      if (last) last.element.tabIndex = -1;
      target.tabIndex = 0;
      this.stop = part.key;
    }
    this.channel = null;
    this.#say(part);
  }

  // Shift and an arrow go from channel to channel of a strip.
  #key(event) {
    const way = ARROWS[event.key];
    const part = this.#partOf(event.target);
    if (!part) return;
    if (part.act && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      part.act();
    }
    if (!way || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.shiftKey && part.values) {
      this.channel = Math.max(0, Math.min(part.values.length - 1, (this.channel ?? -1) + way[0]));
      this.#say(part, this.channel);
      return;
    }
    const next = this.#nearest(part, way);
    if (next) this.#parts.get(next.key).element.focus();
  }

  #nearest(part, [right, down]) {
    const middle = ({ x, y, w, h: height }) => [x + w / 2, y + height / 2];
    const [x, y] = middle(part);
    let best = null, least = Infinity;
    for (const { part: candidate } of this.#parts.values()) {
      if (candidate === part || !(candidate.tell || candidate.act)) continue;
      const [otherX, otherY] = middle(candidate);
      const along = (otherX - x) * right + (otherY - y) * down;
      const across = Math.abs((otherX - x) * down) + Math.abs((otherY - y) * right);
      if (along < 2 || along + 3 * across >= least) continue;
      [best, least] = [candidate, along + 3 * across];
    }
    return best;
  }

  #say(part, channel = null) {
    this.readout.textContent = part?.tell ? tellOf(part, channel) : this.hint;
  }
}

function tellOf(part, channel) {
  return typeof part.tell === "function" ? part.tell(channel) : part.tell;
}

function described(part) {
  return part.tell ? tellOf(part, null) : part.text ?? "";
}

function round(value) {
  return Math.round(value * 10) / 10;
}

// Numbers as colors from left to right, by their size in relation to `most`; the root shows small ones.
function gradient(values, most) {
  const step = 100 / values.length;
  const stops = values.map((value, place) => `${css(signed(value, most))} ${(place * step).toFixed(2)}% ${((place + 1) * step).toFixed(2)}%`);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

export function signed(value, most) {
  const part = most ? (value ?? 0) / most : 0;
  return diverging(Math.sign(part) * Math.sqrt(Math.min(1, Math.abs(part))));
}
