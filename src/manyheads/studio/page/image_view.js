// Images for vision models: dropped, chosen or pasted, and resized here, so that the server receives
// plain pixels. The attention of heads is drawn over the image.

import { sequential } from "./color.js";
import { h } from "./dom.js";
import { percent } from "./format.js";
import { kindName } from "./head_words.js";
import { say, translateFilled } from "./language.js";

export class ImageView {
  constructor(side) {
    this.side = side;
    this.source = null;
    this.pixels = null;
    this.picture = null;
    const file = h("input", { type: "file", accept: "image/*", class: "unseen", "aria-label": say`Choose an image` });
    file.addEventListener("change", () => this.take(file.files[0]));
    const choose = h("button", { type: "button", class: "primary", on: { click: () => file.click() } }, say`Choose an image`);
    const try_ = h("button", { type: "button", on: { click: () => this.example() } }, say`Use an example image`);
    this.drop = h("div", { class: "drop" }, h("p", {}, say`Drop or paste an image here.`), h("div", { class: "row", vars: { "justify-content": "center" } }, choose, try_), file);
    for (const name of ["dragenter", "dragover"]) this.drop.addEventListener(name, (event) => this.#over(event, true));
    this.drop.addEventListener("dragleave", (event) => this.#over(event, false));
    this.drop.addEventListener("drop", (event) => {
      this.#over(event, false);
      this.take(event.dataTransfer.files[0]);
    });
    this.drop.addEventListener("paste", (event) => this.take(event.clipboardData.files[0]));
    this.drop.tabIndex = 0;
    this.views = h("div", { class: "image-views" });
    // The listeners stay while the images are replaced under the pointer.
    this.views.addEventListener("pointermove", (event) => side.hover(this.#under(event)));
    this.views.addEventListener("pointerleave", () => side.hover(null));
    this.views.addEventListener("click", (event) => side.select(this.#under(event)));
    this.element = h("div", {}, this.views);
  }

  #over(event, is) {
    event.preventDefault();
    this.drop.classList.toggle("over", is);
  }

  async take(file) {
    if (!file) return;
    try {
      this.#keep(await createImageBitmap(file));
    } catch {
      this.side.failed(new Error("image"), say`The browser cannot read this file as an image.`);
    }
  }

  // An example for those without an image at hand.
  example() {
    const { side } = this.side.model.image;
    const canvas = h("canvas", { width: side, height: side });
    const ink = canvas.getContext("2d");
    const sky = ink.createLinearGradient(0, 0, 0, side);
    sky.addColorStop(0, "#5b8fd6");
    sky.addColorStop(1, "#f3d9b1");
    ink.fillStyle = sky;
    ink.fillRect(0, 0, side, side);
    ink.fillStyle = "#ffd23e";
    circle(ink, side * 0.72, side * 0.26, side * 0.12);
    ink.fillStyle = "#2f6b46";
    ink.beginPath();
    ink.moveTo(0, side * 0.75);
    ink.quadraticCurveTo(side * 0.4, side * 0.5, side, side * 0.8);
    ink.lineTo(side, side);
    ink.lineTo(0, side);
    ink.fill();
    ink.fillStyle = "#6b3f23";
    ink.fillRect(side * 0.24, side * 0.5, side * 0.06, side * 0.2);
    ink.fillStyle = "#3f8f4f";
    circle(ink, side * 0.27, side * 0.43, side * 0.14);
    this.#keep(canvas);
  }

  #keep(source) {
    this.source = source;
    this.fit();
    this.side.run();
  }

  // Resize the full image to the size of the model, as the other commands do.
  fit() {
    if (!this.source) return;
    const { side } = this.side.model.image;
    const canvas = h("canvas", { width: side, height: side });
    const ink = canvas.getContext("2d", { willReadFrequently: true });
    ink.imageSmoothingQuality = "high";
    ink.fillStyle = "#fff";
    ink.fillRect(0, 0, side, side);
    ink.drawImage(this.source, 0, 0, side, side);
    const { data } = ink.getImageData(0, 0, side, side);
    const bytes = new Uint8Array(side * side * 3);
    for (let pixel = 0; pixel < side * side; pixel += 1) bytes.set(data.subarray(pixel * 4, pixel * 4 + 3), pixel * 3);
    this.picture = canvas;
    this.pixels = { width: side, height: side, data: encoded(bytes) };
  }

  clear() {
    this.views.replaceChildren();
  }

  // The image itself, and one copy per selected head with its weights over it.
  async draw() {
    const { side } = this;
    if (!this.picture || !side.patterns) return;
    const { patterns } = side;
    const found = await patterns.from(side.selected, side.focus ?? 0);
    if (patterns !== side.patterns) return;
    const figures = [this.#figure(say`Image: point at a patch`, null, null)];
    for (const head of side.selected) figures.push(this.#figure(head, side.colorOf(head), found[head]));
    this.views.replaceChildren(...figures);
  }

  #figure(title, color, weights) {
    const { side } = this;
    const { side: pixels, patch, registers } = side.model.image;
    const first = 1 + registers;
    const across = pixels / patch;
    const zoom = Math.max(1, Math.round(360 / pixels));
    const canvas = h("canvas", { width: pixels * zoom, height: pixels * zoom, role: "img", "aria-label": this.#description(title, weights) });
    const ink = canvas.getContext("2d");
    ink.imageSmoothingEnabled = pixels > 64;
    ink.drawImage(this.picture, 0, 0, canvas.width, canvas.height);
    const step = patch * zoom;
    if (weights) {
      const most = Math.max(...weights.weights, 1e-6);
      const by = new Map(weights.positions.map((place, index) => [place, weights.weights[index] / most]));
      for (let place = first; place < side.tokens.length; place += 1) {
        const part = by.get(place) ?? 0;
        const [red, green, blue] = sequential(0.25 + 0.75 * part);
        ink.fillStyle = `rgb(${red} ${green} ${blue} / ${0.25 + 0.55 * part})`;
        ink.fillRect(((place - first) % across) * step, Math.floor((place - first) / across) * step, step, step);
      }
    }
    const at = side.focus ?? 0;
    if (at >= first) {
      ink.lineWidth = 3;
      ink.strokeStyle = "#d55e00";
      ink.strokeRect(((at - first) % across) * step + 1.5, Math.floor((at - first) / across) * step + 1.5, step - 3, step - 3);
    }
    const swatch = color ? h("span", { class: "swatch", vars: { "--color": color } }) : null;
    const kind = color && side.kindOf(title) ? ` ${kindName(side.kindOf(title))}` : "";
    return h("figure", {}, canvas, h("figcaption", {}, swatch, title + kind));
  }

  // The patch under the pointer.
  #under(event) {
    const canvas = event.target.closest("canvas");
    if (!canvas) return null;
    const box = canvas.getBoundingClientRect();
    const { side, patch, registers } = this.side.model.image;
    const across = side / patch;
    const part = (value) => Math.min(across - 1, Math.max(0, Math.floor(value * across)));
    return 1 + registers + part((event.clientY - box.top) / box.height) * across + part((event.clientX - box.left) / box.width);
  }

  #description(title, weights) {
    if (!weights) return say`The image with the selected patch`;
    const best = weights.positions[0];
    const [from, to] = [this.side.focus ?? 0, best].map((place) => translateFilled(this.side.tokens[place]));
    return say`${title} from ${from}: most on ${to}, ${percent(weights.weights[0])}`;
  }
}

function circle(ink, x, y, radius) {
  ink.beginPath();
  ink.arc(x, y, radius, 0, 7);
  ink.fill();
}

function encoded(bytes) {
  let letters = "";
  for (let start = 0; start < bytes.length; start += 8192) letters += String.fromCharCode(...bytes.subarray(start, start + 8192));
  return btoa(letters);
}
