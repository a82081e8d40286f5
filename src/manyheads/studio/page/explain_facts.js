// Sentences about what this model has: positions, norms, masks. Nothing is said that it has not.

import { say } from "./language.js";
import { quoted } from "./explain_parts.js";

export function bestOf(values) {
  return values.indexOf(Math.max(...values));
}

export function listed(heads) {
  return heads.length === 1 ? say`head ${heads[0]}` : say`heads ${heads.join(", ")}`;
}

export function positionFact(view) {
  const { embedding, attention } = view;
  if (embedding.position === "Learned" || embedding.position === "LearnedGrid") return say`A learned vector for the position is added, because attention itself does not know the order.`;
  if (embedding.position === "Sinusoidal") return say`Sines and cosines of the position are added, because attention itself does not know the order.`;
  if (embedding.position) return say`Vectors of the position are added, because attention itself does not know the order.`;
  if (!view.native) return null;
  if (!attention) return say`Nothing here encodes the position.`;
  if (attention.position.kind === "Rotary") return say`Nothing here encodes the position: this model rotates its queries and keys instead, two steps later.`;
  if (attention.position.kind) return say`Nothing here encodes the position: this model adds it to its scores.`;
  return say`Nothing here encodes the position: this layer knows the order only through its mask.`;
}

// Where the norm stands, said at the step where it happens.
export function normFact(view, { name, placement }, place) {
  // The norms of a module of transformers are not known here.
  if (!view.native) return null;
  if (!name) return place === "before" ? say`No norm comes before.` : null;
  const first = placement === "PreNorm" || placement === "SandwichNorm" || placement === "ScaledPreNorm";
  if (place === "before") return first ? say`${name} comes first: it brings every vector to the same scale.` : null;
  if (placement === "PostNorm") return say`${name} follows the sum: it brings every vector to the same scale.`;
  if (placement === "SandwichNorm") return say`${name} is applied before and after the branch, not to the stream itself.`;
  if (placement === "OutputNorm") return say`${name} is applied to what is added, not to the stream.`;
  if (placement === "ScaledPreNorm") return say`What is added is multiplied by a learned number per channel.`;
  return place === "around" ? say`${name} comes before it; the stream itself is not normed.` : say`The stream itself is not normed.`;
}

export function maskWords(mask, length) {
  const { name, band, before, after } = mask;
  if (!band) return say`The mask of this layer, ${name}, is shown here pair by pair.`;
  if (before === null && after === null) return say`This layer has no mask: every token sees every other, before it and after it.`;
  if (before === null && after === 0) return say`A token may not look ahead: the next token is what it has to predict. Scores of later keys become −∞.`;
  const wide = before >= length - 1;
  if (after === 0) return wide ? say`A token sees the ${before} tokens before it and none after it. This text is shorter than that window.` : say`A token sees only the ${before} tokens before it: a sliding window. All other scores become −∞.`;
  return wide && after >= length - 1 ? say`This layer is local: a token sees ${before} tokens on either side. This text is shorter than that window, so nothing is hidden.` : say`This layer is local: a token sees ${before} tokens before and ${after} after it. All other scores become −∞.`;
}

export function maskFact(view) {
  const { visible } = view.attention;
  const total = visible.length ** 2;
  const hidden = total - visible.flat().reduce((sum, one) => sum + one, 0);
  const row = visible[view.at].reduce((sum, one) => sum + one, 0);
  return hidden ? say`${hidden} of ${total} scores are hidden; ${quoted(view, view.at)} sees ${row} keys.` : say`None of the ${total} scores is hidden.`;
}
