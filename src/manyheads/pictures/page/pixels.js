// Weights as pixels.

import { h } from "./dom.js";

// A canvas with one pixel per cell; `colorAt` gives red, green and blue of the cell at an index.
export function pixels(height, width, colorAt, canvas = h("canvas")) {
  Object.assign(canvas, { width, height });
  const ink = canvas.getContext("2d");
  const image = ink.createImageData(width, height);
  for (let place = 0; place < height * width; place += 1) image.data.set([...colorAt(place), 255], place * 4);
  ink.putImageData(image, 0, 0);
  return canvas;
}
