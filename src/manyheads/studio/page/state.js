// The view in the fragment of the address, so that a link restores it.

// Model, text, selected heads, ablated heads and their replacement, selected token, view, measure,
// the other prompt and the heads that are patched from it, the links that are cut.
const FIELDS = ["m", "t", "h", "o", "w", "at", "v", "c", "q", "p", "k"];

// As many as the server accepts.
export const MOST_LINKS = 64;

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const sides = [pick(given, "")];
  if ([...given.keys()].some((key) => key.startsWith("b."))) sides.push(pick(given, "b."));
  return sides;
}

export function writeAddress(sides) {
  const said = new URLSearchParams();
  sides.forEach((side, place) => {
    for (const name of FIELDS) {
      if (side[name] !== undefined) said.set(`${place ? "b." : ""}${name}`, side[name]);
    }
  });
  const address = `#${said}`;
  if (address !== location.hash) history.replaceState(null, "", address);
}

function pick(given, before) {
  const found = {};
  for (const name of FIELDS) {
    const value = given.get(before + name);
    if (value !== null) found[name] = value;
  }
  return found;
}

// Empty values are kept; what the user has not chosen is left out.
export function stateOf(side) {
  const listed = (heads) => [...heads].join(",") || undefined;
  return {
    m: side.model.name, t: side.isVision ? undefined : side.text, h: side.automaticHeads ? undefined : side.selected.join(","), o: listed(side.ablated),
    w: side.replaceWith === "mean" ? "mean" : undefined, at: side.at === null ? undefined : String(side.at), v: side.view, c: side.statistic,
    q: side.patched.size ? side.source : undefined, p: listed(side.patched),
    k: listed(side.links.map((link) => link.join("."))),
  };
}

// The state of a link, without what the models do not have: anybody may have written it.
export function restored(given, models, most) {
  const model = models.find((each) => each.name === given.m) ?? models[0];
  // Without a text in the link the first example of the model is opened.
  const text = given.t ?? model.examples?.[0].text ?? "";
  const example = exampleOf(model, text);
  const known = new Set(model.layers.flatMap(({ layer, heads }) => Array.from({ length: heads }, (_, head) => `L${layer}H${head}`)));
  const heads = (text) => [...new Set((text ?? "").split(","))].filter((each) => known.has(each));
  return {
    model,
    text,
    selected: heads(given.h ?? example?.heads.join(",")).slice(0, most),
    automaticHeads: given.h === undefined && !example?.heads.length,
    ablated: new Set(heads(given.o)),
    patched: new Set(given.q ? heads(given.p) : []),
    links: model.input === "image" ? [] : linksIn(given.k, known),
    linksOf: text,
    source: given.q ?? example?.source ?? "",
    replaceWith: given.w === "mean" ? "mean" : "zero",
    view: given.v === "map" ? "map" : "lines",
    statistic: given.c ?? (model.generates ? "induction" : "previous_token"),
    at: /^\d{1,6}$/.test(given.at ?? "") ? Number(given.at) : null,
  };
}

// "L2H6.21.4" is the link of a head from one token to another.
function linksIn(text, known) {
  const parts = (text ?? "").split(",").map((link) => /^(L\d+H\d+)\.(\d{1,6})\.(\d{1,6})$/.exec(link));
  return parts.filter((match) => match && known.has(match[1])).map(([, head, query, key]) => [head, Number(query), Number(key)]).slice(0, MOST_LINKS);
}

// The example of a model with this text.
export function exampleOf(model, text) {
  return model.examples?.find((each) => each.text === text);
}
