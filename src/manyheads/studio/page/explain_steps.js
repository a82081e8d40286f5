// The steps: for each its title, its words, its formula, what this model has of its own, and its drawing.

import * as head from "./explain_attention.js";
import { decimal, fixed, percent } from "./format.js";
import { say, translate } from "./language.js";
import * as layer from "./explain_layer.js";
import * as memory from "./explain_memory.js";
import { bestOf, listed, maskFact, maskWords, normFact, positionFact } from "./explain_facts.js";
import { quoted, softmaxRows } from "./explain_parts.js";

const hasScores = (view) => Boolean(view.attention?.has_scores);
const ATTENTION = ["softmax(", "Q Kᵀ", " / √d", ")", " V"];

// The formula of the paper with the part of this step marked.
function paper(...marked) {
  const [first, last] = [marked[0], marked.at(-1) + 1];
  const text = (from, to) => ATTENTION.slice(from, to).join("");
  return [`Attention(Q, K, V) = ${text(0, first)}`, { mark: text(first, last) }, text(last)];
}

const LAYER = [
  {
    id: "tokens",
    title: () => say`Tokens`,
    words: (view) => (view.ids ? say`The text is split into ${view.tokens.length} tokens: words and parts of words. The model knows each only by its number in the vocabulary.` : say`The image is cut into square patches, row by row, with a class token before them. To the model they are tokens, as words are.`),
    formula: (view) => (view.ids ? [say`text → numbers`] : [say`image → patches`]),
    draw: layer.drawTokens,
  },
  {
    id: "embeddings",
    title: () => say`Embeddings`,
    words: (view) => (view.ids ? say`Each number picks its row of a learned table: a vector of ${view.width_of_model} numbers. The colors show the first ${view.channels}: blue above zero, orange below.` : say`One learned matrix turns the pixels of each patch into a vector of ${view.width_of_model} numbers. The colors show the first ${view.channels}: blue above zero, orange below.`),
    formula: ({ embedding, ids, native }) => !native && ids ? ["x = E[id] + …"] : ["x = ", embedding.norm ? "norm(" : "", ids ? "E[id]" : say`W · pixels`, embedding.scale === 1 ? "" : ` × ${decimal(embedding.scale)}`, embedding.position ? ` + ${say`position`}` : "", embedding.norm ? ")" : ""],
    facts: (view) => [positionFact(view), view.embedding.types && say`A vector of the segment is added as well.`, view.embedding.norm && say`${view.embedding.norm} follows.`, view.embedding.projected && say`A matrix then brings it to the width of the layers.`],
    draw: layer.drawEmbeddings,
  },
  {
    id: "qkv",
    able: hasScores,
    title: () => say`Query, key, value`,
    words: (view) => say`Head ${view.head} of layer ${view.layer} multiplies each vector by three learned matrices. A query says what a token looks for, a key what it offers, a value what it passes on: ${view.attention.size} numbers each.`,
    formula: () => ["Q = x W", { sub: "Q" }, ",  K = x W", { sub: "K" }, ",  V = x W", { sub: "V" }],
    facts: (view) => {
      const { attention } = view;
      const inner = attention.gates.filter(({ at }) => at !== "output" && at !== "final");
      return [
        view.layer === 1 ? say`Layer 0 has already worked on x.` : view.layer > 1 && say`Layers 0 to ${view.layer - 1} have already worked on x.`,
        normFact(view, view.norm, "before"),
        attention.key_heads < attention.heads && say`Grouped heads: ${attention.key_heads} heads of keys and values serve ${attention.heads} heads of queries. Head ${view.head} shares its keys and values with ${listed(attention.shared_by.filter((one) => one !== view.head))}.`,
        attention.query_norm && say`${attention.query_norm} is applied to queries and keys, so that only their directions count.`,
        ...inner.map((gate) => say`A gate at the ${translate(gate.at)}: ${decimal(gate.mean[view.at])} on average for ${quoted(view, view.at)}.`),
        !view.native && say`This model runs in transformers: queries and keys are shown as its kernel receives them, positions included.`,
      ];
    },
    draw: (view) => head.drawHeads(view),
  },
  {
    id: "rotate",
    able: (view) => hasScores(view) && view.attention.plain_query,
    title: () => say`Positions by rotation`,
    words: () => say`Each pair of channels of a query and of a key is rotated by an angle that grows with the position. So a score depends on how far apart two tokens are, not on where they are.`,
    formula: () => ["q", { sub: "m" }, " → R(m θ) q", { sub: "m" }],
    facts: (view) => {
      const { position, size } = view.attention;
      return [
        say`${quoted(view, view.at)} is at position ${view.at}: its first pair rotates by ${decimal(view.at * position.frequencies[0])} radians, the next ones more and more slowly.`,
        position.rotated < size && say`Only ${position.rotated} of ${size} channels are rotated.`,
        say`Values are not rotated.`,
      ];
    },
    draw: (view) => head.drawHeads(view, true),
  },
  {
    id: "scores",
    able: hasScores,
    title: () => say`One query meets every key`,
    words: (view) => say`The query of ${quoted(view, view.at)} is multiplied by every key, channel by channel, and the ${view.attention.size} products are added up. A large sum means that this key is what the query looks for.`,
    formula: () => ["q · k = q", { sub: "1" }, "k", { sub: "1" }, " + … + q", { sub: "d" }, "k", { sub: "d" }],
    facts: (view) => {
      const best = bestOf(view.attention.products[view.at]);
      return [say`The largest product is with ${quoted(view, best)}: ${decimal(view.attention.products[view.at][best])}.`];
    },
    draw: head.drawOneQuery,
  },
  {
    id: "matrix",
    able: hasScores,
    title: () => say`All queries at once`,
    words: (view) => say`The same for every query: one row per query, one column per key, ${view.tokens.length} × ${view.tokens.length} = ${view.tokens.length ** 2} numbers in one matrix product.`,
    formula: () => paper(1),
    draw: head.drawProducts,
  },
  {
    id: "scaling",
    able: hasScores,
    title: () => say`Scaling`,
    words: (view) => {
      const { attention } = view;
      if (!attention.scale_is_root) return say`This model multiplies the products by ${decimal(attention.scale)}, a factor of its own; the paper divides by √${attention.size} = ${decimal(Math.sqrt(attention.size))}.`;
      const plain = softmaxRows({ ...attention, scores: attention.products }, 1)[view.at];
      const scaled = softmaxRows(attention, 1)[view.at];
      return say`Sums of ${attention.size} products are large, so they are divided by √${attention.size} = ${decimal(Math.sqrt(attention.size))}. Without it, the best key of ${quoted(view, view.at)} would get ${percent(Math.max(...plain))} of the weight; with it, ${percent(Math.max(...scaled))}.`;
    },
    formula: () => paper(2),
    facts: (view) => [view.attention.softcap && say`Then scores are soft-capped: ${view.attention.softcap} · tanh(score / ${view.attention.softcap}), so that none exceeds ${view.attention.softcap}.`, view.attention.scale_is_root && say`The color scale is the same as before, so you see the numbers shrink.`],
    draw: head.drawScaled,
  },
  {
    id: "bias",
    able: (view) => hasScores(view) && view.attention.bias,
    title: () => say`Positions by addition`,
    words: (view) => {
      const { position } = view.attention;
      if (position.kind === "Alibi") return say`ALiBi: a key loses ${decimal(position.slope)} for each token of distance. The slope belongs to the head: with a steep one it looks only nearby.`;
      if (position.kind === "T5Buckets") return say`A learned number for each distance is added to the score; far distances share one.`;
      if (position.kind === "Shaw") return say`Each distance has a learned vector. Its product with the query is added to the score, and another such vector to the values.`;
      if (position.kind === "Disentangled") return say`Each distance has a learned vector, which is compared with the query and with the key. Both products are added to the score.`;
      return say`The model adds a number to each score.`;
    },
    formula: () => [say`score = q · k / √d + position`],
    draw: head.drawBias,
  },
  {
    id: "mask",
    able: hasScores,
    title: () => say`Mask`,
    words: (view) => maskWords(view.attention.mask, view.tokens.length),
    formula: () => [say`score = −∞ where the key is hidden`],
    facts: (view) => [maskFact(view), say`There is no padding here that would need a mask: see the third chapter.`],
    draw: head.drawMask,
  },
  {
    id: "softmax",
    able: (view) => Boolean(view.attention),
    title: (view) => (view.attention.has_scores ? say`Softmax` : say`Weights`),
    words: (view) => (view.attention.has_scores && view.attention.sink !== null ? say`Each row becomes weights: e to the power of each score, divided by the sum of the row. A learned sink is one more score of each row, without a value.` : view.attention.has_scores ? say`Each row becomes weights: e to the power of each score, divided by the sum of the row. All are positive, and they sum to 1.` : say`This model shows only the weights of its heads, not the scores behind them.`),
    formula: () => paper(0, 1, 2, 3),
    slot: "temperature",
    facts: (view) => {
      const weights = head.weightsOf(view)[view.at];
      const best = bestOf(weights);
      return [say`${quoted(view, view.at)} gives ${percent(weights[best])} of its attention to ${quoted(view, best)}.`, view.attention.sink !== null && say`A learned sink takes ${percent(1 - weights.reduce((sum, weight) => sum + weight, 0))} of this row: a head may look at nothing.`];
    },
    draw: head.drawSoftmax,
  },
  {
    id: "mix",
    able: hasScores,
    title: () => say`A mix of values`,
    words: (view) => {
      const weights = head.weightsOf(view)[view.at];
      return say`The head adds up the values, each times its weight. So ${quoted(view, view.at)} receives mostly what ${quoted(view, bestOf(weights))} passes on.`;
    },
    formula: () => paper(0, 1, 2, 3, 4),
    facts: (view) => {
      const { attention, at } = view;
      const mixed = head.mixOf(view, head.weightsOf(view)[at]);
      const apart = Math.max(...mixed.map((value, channel) => Math.abs(value - attention.mixed[at][channel])));
      const gate = attention.gates.find((one) => one.at === "output");
      return [
        view.temperature !== 1 && say`These are the weights at temperature ${decimal(view.temperature)}, not the model's own.`,
        view.temperature === 1 && apart < 1e-3 && { good: say`✓ Computed in this page from the scores; the module's own output differs by at most ${apart.toExponential(0)}.` },
        attention.position.kind === "Shaw" && say`The module also adds learned vectors of the distances.`,
        attention.output_norm && say`${attention.output_norm} then brings the output of the head to one length.`,
        gate && say`A gate follows: ${decimal(gate.mean[at])} on average here. Where it is near 0, the head stays silent.`,
      ];
    },
    draw: head.drawMix,
  },
  {
    id: "mixer",
    able: (view) => Boolean(view.mixer?.weights),
    title: () => say`A mixer instead of attention`,
    words: (view) => say`Layer ${view.layer} has no softmax but a mixer, ${view.mixer.name}: its weights are not a softmax of scores. They are drawn here as attention would show them, and may be negative.`,
    formula: () => [say`output = sum of weights × values`],
    facts: (view) => [attentionLayers(view)],
    draw: head.drawMixer,
  },
  {
    id: "heads",
    able: (view) => Boolean(view.joined),
    title: () => say`Heads side by side`,
    words: (view) => say`All ${view.layers[view.layer].heads} heads work at once, each with matrices of its own. Their outputs are concatenated, ${view.inner} numbers, and the output matrix mixes them into one vector of ${view.width_of_model}.`,
    formula: () => ["MultiHead = Concat(head", { sub: "1" }, ", …, head", { sub: "h" }, ") W", { sub: "O" }],
    facts: (view) => {
      const sizes = view.joined.sizes[view.at];
      const best = bestOf(sizes);
      const final = view.attention?.gates.find((gate) => gate.at === "final");
      return [best === view.head ? say`For ${quoted(view, view.at)} this head writes the longest vector of all ${sizes.length}.` : say`For ${quoted(view, view.at)} head ${best} writes the longest vector; head ${view.head} is number ${1 + sizes.filter((size) => size > sizes[view.head]).length} of ${sizes.length}.`, say`Of each head the first ${view.joined.heads[0][0].length} channels are drawn.`, final && say`A gate scales the result: ${decimal(final.mean[view.at])} on average.`];
    },
    draw: layer.drawJoined,
  },
  {
    id: "residual",
    able: (view) => Boolean(view.before && view.written && (view.attention || view.mixer?.weights)),
    title: () => say`Added to the stream`,
    words: () => say`The result is added to x. Nothing is replaced: each layer reads the stream of a token and writes something to it.`,
    formula: (view) => [residualFormula(view)],
    facts: (view) => [normFact(view, view.norm, "after"), view.residual === "reversible" && say`This model has two streams: attention reads the second and writes to the first.`, !view.native && say`What follows inside the layer belongs to a module of transformers and is not opened here.`],
    draw: layer.drawResidual,
  },
  {
    id: "without",
    able: (view) => Boolean(view.before && view.written && !view.attention && !view.mixer?.weights),
    title: () => say`No attention here`,
    words: (view) => (view.mixer ? say`Layer ${view.layer} has a mixer, ${view.mixer.name}, without weights between tokens, so there is no attention to draw.` : say`All heads of layer ${view.layer} were pruned. A constant vector that is left of them is added to every token.`),
    formula: (view) => [residualFormula(view)],
    facts: (view) => [attentionLayers(view), normFact(view, view.norm, "after")],
    draw: layer.drawResidual,
  },
  {
    id: "feedforward",
    able: (view) => Boolean(view.feedforward),
    title: () => say`Feed-forward`,
    words: (view) => (view.feedforward.experts ? say`Now each token on its own: a router sends it to ${view.feedforward.experts.top_k} of ${view.feedforward.experts.count} experts, each a small feed-forward. Their outputs are added to the stream.` : say`Now each token on its own: ${view.feedforward.hidden} neurons, the activation ${activation(view.feedforward)}, and back to ${view.width_of_model} numbers, which are added to the stream. No token sees another here.`),
    formula: ({ feedforward: { kind } }) => (kind === "MLP" ? ["FFN(x) = act(x W", { sub: "1" }, ") W", { sub: "2" }] : ["FFN(x) = (act(x W) ⊙ x V) W", { sub: "2" }]),
    facts: (view) => {
      const { feedforward, at } = view;
      return [
        normFact(view, feedforward.norm, "around"),
        view.residual.startsWith("parallel") && say`It reads what attention read, not what it wrote: both branches are parallel.`,
        feedforward.active && say`${percent(feedforward.active[at])} of the neurons are above zero for ${quoted(view, at)}.`,
        feedforward.strongest && say`Its strongest neurons: ${feedforward.strongest[at].map(([neuron, value]) => `${neuron} (${decimal(value)})`).join(", ")}.`,
        feedforward.inside && feedforward.hidden > feedforward.inside[0].length && say`The first ${feedforward.inside[0].length} of ${feedforward.hidden} neurons are drawn.`,
      ];
    },
    draw: layer.drawFeedForward,
  },
  {
    id: "next",
    title: () => say`The next layer`,
    words: (view) => (view.layers.length === 1 ? say`This model has one layer.` : `${say`The new x enters the next layer, where all of it happens again with other matrices: ${view.layers.length} times in this model.`} ${view.output === "none" ? say`The vectors after the last layer are the output.` : say`The vector after the last layer gives the answer.`}`),
    formula: ({ final_norm: norm, native, output }) => [output === "none" ? (norm ? say`output = norm(x)` : say`output = x`) : !native ? say`answer = softmax(… U)` : norm ? say`answer = softmax(norm(x) U)` : say`answer = softmax(x U)`],
    facts: (view) => [view.final_norm && say`${view.final_norm} follows the last layer.`],
    draw: layer.drawNext,
  },
];

function residualFormula({ norm, mixer, attention, native }) {
  const branch = mixer ? say`mixer` : attention ? say`attention` : say`constant`;
  if (!native) return say`x = x + ${branch}(…)`;
  if (norm.placement === "PostNorm") return say`x = norm(x + ${branch}(x))`;
  if (norm.placement === "SandwichNorm") return say`x = x + norm(${branch}(norm(x)))`;
  if (norm.placement === "OutputNorm") return say`x = x + norm(${branch}(x))`;
  return norm.name ? say`x = x + ${branch}(norm(x))` : say`x = x + ${branch}(x)`;
}

function activation({ kind, activation: name }) {
  return kind === "MLP" ? name.toUpperCase().replace("_TANH", "") : kind;
}

function attentionLayers(view) {
  const others = view.layers.map(({ kind }, index) => (kind === "attention" ? index : null)).filter((index) => index !== null);
  if (view.attention || !others.length) return view.attention ? null : say`No layer of this model has softmax attention.`;
  return say`Layers with softmax attention: ${others.join(", ")}.`;
}

const MEMORY = [
  {
    id: "row",
    able: (view) => Boolean(view.layout?.parts),
    title: () => say`One row per token`,
    words: (view) => say`One matrix product makes queries, keys and values of all heads at once. Memory is one line: after the ${view.layout.views.joined.shape[2]} numbers of one token come those of the next.`,
    formula: () => ["[Q K V] = x [W", { sub: "Q" }, " W", { sub: "K" }, " W", { sub: "V" }, "]"],
    facts: (view) => [say`${view.layout.dtype}, ${view.layout.bytes} bytes per number: ${kilobytes(view.layout.views.joined.shape, view.layout.bytes)} for this text.`],
    draw: memory.drawRow,
  },
  {
    id: "split",
    able: (view) => Boolean(view.layout),
    title: () => say`Splitting into heads is a view`,
    words: (view) => say`The queries become [batch, tokens, heads, width] = ${memory.shapeText(view.layout.views.query.shape)} without a copy: a stride says how far to step in memory for the next token, the next head, the next channel.`,
    formula: (view) => [say`place = offset + token × ${view.layout.views.query.stride[1]} + head × ${view.layout.views.query.stride[2]} + channel`],
    facts: (view) => {
      const { query, key } = view.layout.views;
      return [key.offset > 0 && say`The keys of a token begin ${key.offset} numbers after its queries.`, query.contiguous ? null : say`Not contiguous: between the queries of two tokens lie their keys and values.`];
    },
    draw: memory.drawView,
  },
  {
    id: "transpose",
    able: (view) => Boolean(view.layout),
    title: () => say`One head after another`,
    words: () => say`Many kernels want all tokens of a head together: [batch, heads, tokens, width]. Transposing only exchanges two strides; a copy then moves the numbers into this order.`,
    formula: (view) => [say`strides ${memory.shapeText(view.layout.views.by_head.stride)} → after the copy ${memory.shapeText(view.layout.views.copied.stride)}`],
    facts: (view) => [say`Attention never mixes heads, so each piece can be computed on its own.`, say`Kernels that read strides, as flash attention does, need no copy.`],
    draw: memory.drawByHead,
  },
  {
    id: "shared",
    able: (view) => Boolean(view.layout?.views.shared),
    title: () => say`Shared keys and values`,
    words: (view) => say`${view.attention.heads} heads of queries read ${view.attention.key_heads} heads of keys and values. A stride of 0 lets several heads read the same numbers, and a cache of past tokens is ${view.attention.heads / view.attention.key_heads} times smaller.`,
    formula: (view) => [say`head h reads keys and values ⌊h / ${view.attention.heads / view.attention.key_heads}⌋`],
    draw: memory.drawShared,
  },
];

const PACKING = [
  {
    id: "padded",
    title: () => say`Padded to one length`,
    words: () => say`Sentences have different lengths, but a tensor is rectangular. Usually the short ones are filled up with padding, which is computed like everything else.`,
    formula: (view) => [say`${view.batch.lengths.length} × ${Math.max(...view.batch.lengths)} = ${view.batch.cost.padded_tokens} tokens for ${view.batch.cost.packed_tokens} real ones`],
    draw: memory.drawPadded,
  },
  {
    id: "cost",
    title: () => say`What padding costs`,
    words: (view) => say`Every layer works on padding too, and scores grow with the square of the length: ${percent(1 - view.batch.cost.packed_scores / view.batch.cost.padded_scores)} of the scores would be wasted here.`,
    formula: () => [say`batch × longest² instead of the sum of length²`],
    draw: memory.drawCost,
  },
  {
    id: "packed",
    title: () => say`Laid end to end`,
    words: () => say`This library lays the sentences end to end in one line of tokens, without padding. The cumulative lengths say where each begins.`,
    formula: (view) => [say`cumulative lengths ${memory.shapeText(view.batch.offsets)}`],
    facts: (view) => [{ good: say`✓ Measured: the output of the packed batch differs from that of each sentence alone by at most ${view.batch.difference.toExponential(0)}, at values up to ${decimal(view.batch.largest)}.` }],
    draw: memory.drawPacked,
  },
  {
    id: "blocks",
    title: () => say`No sentence sees another`,
    words: (view) => `${say`Each sentence is a block on the diagonal; outside of the blocks nothing is computed.`} ${maskWords(view.batch.mask, Math.max(...view.batch.lengths))}`,
    formula: () => [say`visible = same sentence, and the mask of the layer`],
    facts: (view) => [say`${view.batch.visible.flat(2).reduce((sum, one) => sum + one, 0)} of ${view.batch.offsets.at(-1) ** 2} pairs are visible in layer ${view.batch.layer}.`],
    draw: memory.drawBlockMask,
  },
];

function kilobytes(shape, bytes) {
  const size = shape.reduce((product, axis) => product * axis, bytes);
  return size < 1e6 ? say`${fixed(size / 1024, 1)} KiB` : say`${fixed(size / 1024 ** 2, 1)} MiB`;
}

export const CHAPTERS = [
  { id: "layer", title: () => say`One layer`, steps: LAYER },
  { id: "memory", title: () => say`Heads in memory`, steps: MEMORY },
  { id: "packing", title: () => say`Three sentences`, steps: PACKING },
];

// The steps that make sense for this model, in order.
export function stepsFor(view) {
  return CHAPTERS.flatMap((chapter) => (chapter.id === "packing" && !view.batch ? [] : chapter.steps.filter((step) => !step.able || step.able(view)).map((step) => ({ ...step, chapter }))));
}
