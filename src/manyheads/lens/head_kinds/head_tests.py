"""The tests behind the kinds: each measures the heads and scores some kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float

from manyheads.encoding.text_reader import TextReader, require_text_model, resolve_max_length
from manyheads.formatting import pluralise
from manyheads.kernels.contract import Request
from manyheads.lens.head_kinds.criteria import (
    MIN_WORDS,
    KindScores,
    Label,
    Threshold,
    broad_scores,
    copying_scores,
    patch_scores,
    position_scores,
    punctuation_scores,
    repeat_scores,
    word_target_scores,
)
from manyheads.lens.head_kinds.patch_attention import measure_patch_attention
from manyheads.lens.head_kinds.word_targets import WordTargetScores, measure_word_targets
from manyheads.lens.inputs.annotated import AnnotatedText, align_texts
from manyheads.lens.inputs.cached_run import StackName, head_scope
from manyheads.lens.inputs.synthetic import (
    SpecialTokens,
    bracketed_texts,
    inputs_from_ids,
    numbered_lists,
    plain_words,
    punctuated_texts,
    random_images,
    repeated_tokens,
)
from manyheads.lens.inputs.texts import ModelInputs, read_inputs
from manyheads.lens.measure.measures import (
    NEIGHBOURS,
    MeasureScope,
    MeasureSums,
    add_measures,
    has_earlier_copy,
)
from manyheads.lens.measure.row_sums import RowSumSpec, sum_rows
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.results.addresses import Address, Block, attention_at, blocks_of, stacks_of
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import ByHead
from manyheads.lens.weights.circuits import Circuits, score_copying
from manyheads.models.build import Model
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.masks import Mask
from manyheads.ragged import Ragged
from manyheads.taps import Head, Sublayer
from manyheads.tokenizers import plain_copy


@dataclass(frozen=True, slots=True)
class InductionPartner:
    """The previous-token head that an induction head composes with most, and how much."""

    address: Address
    composition: float


def key_composition(circuits: Circuits, earlier: Head, later: Head) -> float:
    """The K-composition of a later head with an earlier one (Elhage et al. 2021).

    |QK OV| / (|QK| |OV|) in Frobenius norms, as in `composition_scores(model, "key")`.
    """
    ov, qk = circuits.ov(earlier), circuits.qk(later)
    outer = torch.linalg.qr(qk.left).R
    inner = torch.linalg.qr(ov.right.T).R.T
    both = qk.singular_values().norm() * ov.singular_values().norm()
    return float((outer @ (qk.right @ ov.left) @ inner).norm() / both.clamp(min=1e-300))


def find_partners(
    model: Model, induction: Sequence[Address], previous: Sequence[Address]
) -> dict[Address, InductionPartner]:
    """For each induction head the earlier previous-token head that it composes with most."""
    partners = {}
    for later in induction:
        circuits = Circuits(head_scope(model, cast(StackName, later.stack), later.sublayer))
        earlier = [
            each
            for each in previous
            if each.stack == later.stack
            and each.sublayer is later.sublayer
            and each.head.layer < later.head.layer
        ]
        scored = [
            InductionPartner(each, key_composition(circuits, each.head, later.head))
            for each in earlier
        ]
        if scored:
            partners[later] = max(scored, key=lambda partner: partner.composition)
    return partners


def uniform_scores(
    model: Model, inputs: ModelInputs, blocks: Sequence[Block], offsets: Sequence[int] = ()
) -> dict[str, Float[np.ndarray, " h"]]:
    """The measures of uniform attention in the place of each head, by name.

    It covers the keys that the mask shows, whatever the position encoding. Heads with the same mask
    are measured once.
    """
    assert inputs.ids is not None, "images have no tokens"
    ids = {"main": inputs.ids, "decoder": inputs.ids, "encoder": inputs.source}
    stacks = stacks_of(model)
    known: dict[tuple[str, Sublayer, Mask], dict[str, float]] = {}
    by_block = []
    for block in blocks:
        config = attention_at(stacks[block.stack], block.layer, block.sublayer).config
        key = block.stack, block.sublayer, config.mask
        if key not in known:
            crosses = isinstance(model, Seq2Seq) and block.sublayer is Sublayer.CROSS
            queries, keys = ids[block.stack], inputs.source if crosses else ids[block.stack]
            assert queries is not None
            assert keys is not None
            known[key] = _uniform_measures(queries, keys, config.mask, offsets, same=not crosses)
        by_block.append(known[key])
    names = dict.fromkeys(name for each in by_block for name in each)
    return {
        name: np.concatenate(
            [
                np.full(block.heads, each.get(name, np.nan))
                for block, each in zip(blocks, by_block, strict=True)
            ]
        )
        for name in names
    }


def _uniform_measures(
    queries: Ragged, keys: Ragged, mask: Mask, offsets: Sequence[int], *, same: bool
) -> dict[str, float]:
    device = queries.device
    query = torch.zeros(queries.lengths.total, 1, 1, device=device)
    request = Request(queries=queries.lengths, keys=keys.lengths, mask=mask, scale=1.0)
    tiled = TiledScores(query, torch.zeros(keys.lengths.total, 1, 1, device=device), request)
    every = tuple(dict.fromkeys((*NEIGHBOURS, *offsets)))
    spec = RowSumSpec(
        offsets=every if same else (),
        marks=torch.zeros(keys.lengths.total, 0, device=device),
        ids=queries.values if same else None,
    )
    repeats = has_earlier_copy(queries.values, queries.lengths) if same else None
    scope = MeasureScope(classes=(), repeats=repeats, same=same)
    sums, block = MeasureSums(), Block(0, 1)
    add_measures(sums, block, tiled, spec, sum_rows(tiled, spec), scope)
    return {name: float(sums.means((block,), name)[0]) for name in sums.names}


MAX_OFFSET = 16
# The offsets that are measured on given texts.
OFFSETS = tuple(sign * offset for offset in range(2, MAX_OFFSET + 1) for sign in (-1, 1))
# The sample of the vocabulary on which copying is measured.
COPYING_WORDS = 512
# Longer sentences are skipped: their patterns are computed in full.
MAX_SENTENCE_TOKENS = 512


@dataclass(slots=True, eq=False)
class HeadTests:
    """The scores of all tests so far; an interrupted test leaves `complete` false."""

    model: Model
    thresholds: dict[str, Threshold]
    progress: bool
    scores: list[KindScores] = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    output_share: Float[np.ndarray, " h"] | None = None
    complete: bool = True

    def measure(self, texts: Any, offsets: Sequence[int] = ()) -> Statistics:
        found = statistics(self.model, texts, offsets=offsets, progress=self.progress)
        self.complete &= found.complete
        if self.output_share is None:
            self.output_share = found.means["output_share"]
        return found

    def measure_words(
        self, kind: str, texts: Sequence[AnnotatedText], label: str
    ) -> dict[str, WordTargetScores]:
        """The scores of every task in annotated texts."""
        reader = require_text_model(self.model)
        context = resolve_max_length(reader, None)
        # The first token of a Seq2Seq target takes a position too.
        limit = MAX_SENTENCE_TOKENS if context is None else min(context - 1, MAX_SENTENCE_TOKENS)
        aligned = align_texts(reader.tokenizer, texts, limit, SpecialTokens.of(reader).bos)
        if not aligned:
            self.missing[kind] = "no word pair has tokens of its own"
            return {}
        self.metadata[f"{kind}_texts"] = len(aligned)
        found, complete = measure_word_targets(
            self.model, aligned, label=label, progress=self.progress
        )
        self.complete &= complete
        return found


def measure_repeats(
    tests: HeadTests, model: TextReader, sequences: int, seed: int, *, positional: bool
) -> None:
    """Repeated random tokens; without texts they also decide the positional kinds."""
    made = repeated_tokens(model, sequences, seed)
    inputs = inputs_from_ids(model, SpecialTokens.of(model), made)
    # An offset beyond the shortest block could be a repetition.
    shortest = min(len(each) for each in made) // 2
    furthest = min(MAX_OFFSET, shortest - 3)
    offsets = [offset for offset in OFFSETS if positional and abs(offset) <= furthest]
    found = tests.measure(inputs, offsets)
    uniform = uniform_scores(model, inputs, found.blocks, offsets)
    over = f"{found.metadata['texts']:,} random sequences"
    tests.metadata |= {"sequences": found.metadata["texts"], "seed": seed}
    if positional:
        tests.scores += position_scores(found, uniform, tests.thresholds, over)
        tests.scores.append(broad_scores(found, tests.thresholds, over))
    tests.scores += repeat_scores(found, uniform, tests.thresholds, f"{over} repeated once")


def measure_texts(tests: HeadTests, texts: Any) -> None:
    """Given texts decide the positional kinds and punctuation."""
    if isinstance(texts, Statistics):
        found = texts
        tests.complete &= found.complete
    else:
        found = tests.measure(texts, OFFSETS)
    over = pluralise(found.metadata["texts"], "given text")
    tests.metadata["texts"] = found.metadata["texts"]
    tests.scores += position_scores(found, {}, tests.thresholds, over)
    tests.scores.append(broad_scores(found, tests.thresholds, over))
    _add_punctuation(tests, found, over, "the texts have no punctuation")


def measure_punctuation(tests: HeadTests, model: TextReader, seed: int) -> None:
    """Random words with punctuation between them."""
    special = SpecialTokens.of(model)
    made = punctuated_texts(plain_words(model.tokenizer, seed=seed), seed=seed)
    context = resolve_max_length(model, None)
    limit = None if context is None else context - 1
    tokenizer = plain_copy(model.tokenizer)
    ids = [[*special.bos, *tokenizer.encode(text).ids][:limit] for text in made]
    found = tests.measure(inputs_from_ids(model, special, ids))
    _add_punctuation(
        tests, found, f"{found.metadata['texts']:,} synthetic texts", "the tokenizer has none"
    )


def _add_punctuation(tests: HeadTests, found: Statistics, over: str, why_none: str) -> None:
    if found.class_fractions.get("punctuation"):
        tests.scores.append(punctuation_scores(found, tests.thresholds, over))
    else:
        tests.missing.setdefault("punctuation", why_none)


def measure_copying(tests: HeadTests, model: TextReader) -> None:
    """From the weights alone: does a head raise the logit of the token that it attends to?"""
    if not isinstance(model.config.readout, LanguageHead):
        tests.missing["copying"] = "the model has no language head"
        return
    stack: StackName = "main"
    sublayers = [Sublayer.ATTENTION]
    if isinstance(model, Seq2Seq):
        stack, sublayers = "decoder", [Sublayer.CROSS]
        # Circuits start at the source embedding, which the decoder reads only if it is shared.
        if model.config.shared:
            sublayers.append(Sublayer.ATTENTION)
    blocks = blocks_of(model)
    present = {each.sublayer for each in blocks if each.stack == stack}
    scored: dict[Address, dict[str, float]] = {}
    metadata: Metadata = {"vocabulary": model.config.embedding.vocabulary}
    for sublayer in sublayers:
        if sublayer in present:
            found = score_copying(
                model,
                sample=COPYING_WORDS,
                stack=stack,
                sublayer=sublayer,
                progress=tests.progress,
            )
            metadata |= found.metadata
            scored |= {address: found.of(address) for address in found.addresses}
    every = [address for block in blocks for address in block.addresses]
    means = {
        name: np.array([scored.get(address, {}).get(name, np.nan) for address in every])
        for name in ("copying", "copying_eigenvalues")
    }
    every_head = ByHead(kind="circuits", blocks=blocks, means=means, metadata=metadata)
    tests.scores.append(copying_scores(every_head, tests.thresholds))


def measure_marks(tests: HeadTests, model: TextReader, seed: int) -> None:
    """Brackets and quotes, and numbered lists."""
    words = plain_words(model.tokenizer, seed=seed)
    made = {
        "bracket": bracketed_texts(words, seed=seed),
        "numbering": numbered_lists(words, seed=seed),
    }
    for kind, texts in made.items():
        if not tests.complete:
            return
        for task, found in tests.measure_words(kind, list(texts), f"testing {kind} heads").items():
            tests.scores.append(word_target_scores(kind, found, tests.thresholds, task))


def measure_syntax(tests: HeadTests, sentences: Sequence[AnnotatedText]) -> None:
    """Every relation of a treebank in both directions; rare relations are skipped."""
    rare = []
    for task, found in tests.measure_words("syntactic", sentences, "reading a treebank").items():
        if np.nanmax(found.counts) < MIN_WORDS:
            rare.append(task)
        else:
            tests.scores.append(word_target_scores("syntactic", found, tests.thresholds, task))
    tests.metadata["rare_relations"] = rare


def measure_coreference(tests: HeadTests, references: Sequence[AnnotatedText]) -> None:
    """Pronouns and their mentions."""
    for found in tests.measure_words("coreference", references, "testing coreference").values():
        tests.scores.append(word_target_scores("coreference", found, tests.thresholds))


def measure_images(tests: HeadTests, model: Vision, images: Any, seed: int) -> None:
    """Given images, or random ones."""
    inputs = read_inputs(model, random_images(model, seed=seed) if images is None else images)
    tests.metadata |= {"images": len(inputs), "given": images is not None}
    found = tests.measure(inputs)
    over = pluralise(found.metadata["texts"], "image")
    tests.scores.append(broad_scores(found, tests.thresholds, over))
    if tests.complete:
        patches = measure_patch_attention(model, inputs, progress=tests.progress)
        tests.complete &= patches.complete
        tests.scores += patch_scores(patches, tests.thresholds)


def add_partners(
    model: Model, labels: dict[Address, tuple[Label, ...]]
) -> tuple[dict[Address, tuple[Label, ...]], dict[str, dict[str, Any]]]:
    """Name the previous-token partner of each induction head in its evidence."""
    of_kind = {
        kind: [address for address, own in labels.items() if any(each.kind == kind for each in own)]
        for kind in ("induction", "previous-token")
    }
    partners = find_partners(model, of_kind["induction"], of_kind["previous-token"])
    extended = dict(labels)
    for address in of_kind["induction"]:
        partner = partners.get(address)
        note = (
            "there is no previous-token head before it"
            if partner is None
            else f"its keys read {partner.address} (composition {partner.composition:.2f})"
        )
        extended[address] = tuple(
            replace(label, evidence=f"{label.evidence}; {note}")
            if label.kind == "induction"
            else label
            for label in labels[address]
        )
    return extended, {
        str(address): {"head": str(partner.address), "composition": partner.composition}
        for address, partner in partners.items()
    }
