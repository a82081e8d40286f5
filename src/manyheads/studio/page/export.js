// Export the view as a drawing (SVG or PNG), or its numbers (JSON).

import { download } from "./dom.js";
import { drawSides } from "./export_drawing.js";

export async function exportView(kind, sides) {
  if (kind === "json") return download(new Blob([JSON.stringify(await numbers(sides), null, 1)], { type: "application/json" }), "manyheads.json");
  const drawing = await drawSides(sides);
  const text = new XMLSerializer().serializeToString(drawing);
  const blob = new Blob([text], { type: "image/svg+xml" });
  if (kind === "svg") return download(blob, "manyheads.svg");
  return download(await rasterised(blob, drawing), "manyheads.png");
}

async function rasterised(blob, drawing) {
  const [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
  const image = new Image(width, height);
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: width * 2, height: height * 2 });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

// All visible numbers, so that others can draw them.
async function numbers(sides) {
  const found = [];
  for (const side of sides) {
    const [start, stop] = side.lines.span();
    const rows = side.patterns ? await side.patterns.rows(side.selected, start, stop) : {};
    found.push({
      model: side.model.name, text: side.isVision ? null : side.text, tokens: side.tokens, losses: side.losses,
      selected: side.selected, ablated: [...side.ablated], replace_with: side.replaceWith, patched: [...side.patched], token: side.at,
      kinds: Object.fromEntries(side.selected.map((head) => [head, side.kinds[head] ?? []])),
      heads: [...side.atlas.cells.keys()], statistics: side.statistics, predictions: side.prediction, rows: { start, stop, heads: rows },
    });
  }
  return { made_by: "manyheads studio", sides: found };
}
