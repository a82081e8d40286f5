// What is seen, kept in the address bar behind the #: a link brings it back.

const FIELDS = ["m", "t", "h", "o", "w", "at", "v", "c", "q", "p", "f"];

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
      if (side[name] !== undefined && side[name] !== "") said.set(`${place ? "b." : ""}${name}`, side[name]);
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

// Addresses of heads from a link, which anybody may have written.
export function headsOf(text) {
  return (text ?? "").split(",").filter((each) => /^L\d{1,4}H\d{1,4}$/.test(each)).slice(0, 4096);
}

export function wholeOf(text) {
  return /^\d{1,6}$/.test(text ?? "") ? Number(text) : null;
}
