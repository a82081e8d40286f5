// What is seen, kept in the address bar behind the #: a link brings it back.

// Model, text, picked heads, heads that are off and what stands in for them, the chosen token, the
// view, the measure, the prompt that is patched from and the heads that are.
const FIELDS = ["m", "t", "h", "o", "w", "at", "v", "c", "q", "p"];

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

// What was cleared or let go is kept as such; what nobody has chosen is left out.
export function stateOf(side) {
  const listed = (heads) => [...heads].join(",") || undefined;
  return {
    m: side.model.name, t: side.sees ? undefined : side.text, h: side.choosesHeads ? undefined : side.picked.join(","), o: listed(side.off),
    w: side.how === "mean" ? "mean" : undefined, at: side.at === null ? undefined : String(side.at), v: side.view, c: side.statistic,
    q: side.patched.size ? side.source : undefined, p: listed(side.patched),
  };
}

// What a link says, which anybody may have written, as far as the models know of it.
export function restored(given, models, most) {
  const model = models.find((each) => each.name === given.m) ?? models[0];
  const known = new Set(model.layers.flatMap(({ layer, heads }) => Array.from({ length: heads }, (_, head) => `L${layer}H${head}`)));
  const heads = (text) => [...new Set((text ?? "").split(","))].filter((each) => known.has(each));
  return {
    model,
    picked: heads(given.h).slice(0, most),
    choosesHeads: given.h === undefined,
    off: new Set(heads(given.o)),
    patched: new Set(given.q ? heads(given.p) : []),
    source: given.q ?? "",
    how: given.w === "mean" ? "mean" : "zero",
    view: given.v === "map" ? "map" : "lines",
    statistic: given.c ?? "induction",
    at: /^\d{1,6}$/.test(given.at ?? "") ? Number(given.at) : null,
  };
}
