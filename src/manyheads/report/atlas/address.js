// The address of a head in the page: #L3H1, or #L3H1@2 in the third of several atlases.

import { slugOf } from "./chunks.js";
import { state } from "./state.js";

export function addressOf(head, at = state.at) {
  return `#${slugOf(head.name)}${at ? `@${at}` : ""}`;
}

// The atlas and the head that an address names; null without a name, undefined if there is no such head.
export function readAddress(hash) {
  const [slug, number] = hash.slice(1).split("@");
  if (!slug) return { at: state.at, head: null };
  const at = Number(number ?? 0);
  return { at, head: state.atlases[at]?.heads.find((head) => slugOf(head.name) === slug) };
}
