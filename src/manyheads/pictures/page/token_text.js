// Tokens as text: white space, bytes and characters without width are made visible, and letters of
// several tokens are found again.

const NAMES = {
  "\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "NBSP", "\u00ad": "SHY", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ", "\u200e": "LRM",
  "\u200f": "RLM", "\u2060": "WJ", "\u3000": "␣", "\ufe0e": "VS15", "\ufe0f": "VS16", "\ufeff": "BOM",
};
const BYTES = /(?:<0x[0-9A-F]{2}>)+/g;
const MARK = /^\p{M}/u;
// Characters that are invisible where they stand alone.
const INVISIBLE = /^[\s\p{C}\p{M}\u2800\u3164\u115f\u1160]*$/u;
// Characters that draw nothing, or change the order of those around them.
const CONTROLS = /[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;
// What may join with its neighbors to one letter.
const JOINS = /[\p{M}\p{Cf}\p{Emoji_Modifier}\p{RI}\u1100-\u11ff]/u;
const GRAPHEMES = new Intl.Segmenter("en", { granularity: "grapheme" });

export function visibleToken(token) {
  if (token === "") return "∅";
  const text = token.replace(BYTES, (bytes) => `‹${bytes.match(/[0-9A-F]{2}/g).join(" ")}›`);
  if (INVISIBLE.test(text)) return [...text].map(named).join("");
  const bare = text.replace(CONTROLS, named);
  // A mark needs something to stand on.
  return MARK.test(bare) ? `◌${bare}` : bare;
}

function named(letter) {
  if (letter in NAMES) return NAMES[letter];
  return MARK.test(letter) ? `◌${letter}` : `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

// The same in a list, where spaces at its ends could not be seen.
export function listedToken(token) {
  return visibleToken(token).replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

export function shorten(text, most = 18) {
  if (text.length <= most) return text;
  const letters = Array.from(GRAPHEMES.segment(text), ({ segment }) => segment);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

export function shortToken(token, most) {
  return shorten(visibleToken(token).trim(), most);
}

// Tokens that share a letter: [{ start, stop, text }]. `letters` has for each token what begins in it, ""
// inside a letter, and null outside the text.
export function joinedTokens(letters) {
  if (!letters) return [];
  const text = letters.join("");
  const inside = letters.includes("");
  if (!inside && !JOINS.test(text)) return [];
  const owners = letters.flatMap((each, token) => Array(each?.length ?? 0).fill(token));
  const groups = [];
  for (const { segment, index } of GRAPHEMES.segment(text)) {
    const start = owners[index];
    let stop = owners[index + segment.length - 1] + 1;
    if (index + segment.length === text.length || owners[index + segment.length] >= stop) while (letters[stop] === "") stop += 1;
    if (stop - start < 2 || segment.trim() === "") continue;
    const before = groups.at(-1);
    if (before && start < before.stop) before.stop = Math.max(before.stop, stop);
    else groups.push({ start, stop });
  }
  for (const group of groups) group.text = visibleToken(letters.slice(group.start, group.stop).join("")).trim();
  return groups;
}

// The name of a token in lists and drawings; part of a letter comes with the letter.
export function tokenLabel(token, group, most) {
  if (!group) return shortToken(token, most);
  return `${shorten(group.text, 4)} ‹${bareBytes(token)}›`;
}

// "D0", as it stands below its letter.
export function bareBytes(token) {
  return visibleToken(token.trim() || token).replaceAll(/[‹›]/g, "");
}
