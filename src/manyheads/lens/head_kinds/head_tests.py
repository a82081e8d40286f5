"""The tests behind the kinds: each measures the heads and scores some kinds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from manyheads.encoding.text_reader import TextReader, require_text_model, resolve_max_length
from manyheads.formatting import pluralise
from manyheads.kernels.contract import Request
from manyheads.lens.head_kinds import criteria, image_attention, partners, word_targets
from manyheads.lens.head_kinds.stored_tests import StoredTest, recall_test
from manyheads.lens.inputs import synthetic, word_texts
from manyheads.lens.inputs.annotated import AnnotatedText, align_texts
from manyheads.lens.inputs.cached_run import last_head_site
from manyheads.lens.inputs.texts import Inputs, large_batch_tokens, read_inputs
from manyheads.lens.measure import measures, row_sums, score_tiles
from manyheads.lens.measure.statistics import Statistics, make_plan, measure_by_plan
from manyheads.lens.measure.watcher import MeasurementPlan
from manyheads.lens.results import files, tables
from manyheads.lens.results.addresses import Address, Block, blocks_of, mask_in
from manyheads.lens.weights.circuits import score_copying
from manyheads.models import build, model_interface, readout, seq2seq, vision
from manyheads.parts.masks import Mask
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer, Tap
from manyheads.tokenizers import plain_tokenizer


def uniform_scores(
    model: build.Model,
    inputs: model_interface.ModelInputs,
    blocks: Sequence[Block],
    offsets: Sequence[int] = (),
) -> dict[str, Float[np.ndarray, " h"]]:
    """The measures of uniform attention in the place of each head, by name.

    It covers the keys that the mask shows, whatever the position encoding. Heads with the same mask
    are measured once.
    """
    assert inputs.ids is not None, "images have no tokens"
    ids = {model.readout_stack: inputs.ids, "encoder": inputs.source}
    stacks = model.stacks()
    by_mask: dict[tuple[str, Sublayer, Mask], dict[str, float]] = {}
    by_block = []
    for block in blocks:
        mask = mask_in(stacks[block.stack].config.layers[block.layer], block.sublayer)
        key = block.stack, block.sublayer, mask
        if key not in by_mask:
            crosses = model.reads_pairs and block.sublayer is Sublayer.CROSS
            # The images of a wrapped model have no tokens.
            queries = ids.get(block.stack)
            keys = inputs.source if crosses else queries
            by_mask[key] = (
                {}
                if queries is None or keys is None
                else _uniform_measures(queries, keys, mask, offsets, same=not crosses)
            )
        by_block.append(by_mask[key])
    names = dict.fromkeys(name for by_name in by_block for name in by_name)
    heads = [block.heads for block in blocks]
    return {
        name: np.repeat([by_name.get(name, np.nan) for by_name in by_block], heads)
        for name in names
    }


def _uniform_measures(
    queries: Ragged, keys: Ragged, mask: Mask, offsets: Sequence[int], *, same: bool
) -> dict[str, float]:
    device = queries.device
    request = Request(queries=queries.lengths, keys=keys.lengths, mask=mask, scale=1.0)
    query, key = (torch.zeros(ids.lengths.total, 1, 1, device=device) for ids in (queries, keys))
    tiled = score_tiles.TiledScores(query, key, request)
    spec = row_sums.RowSumSpec(
        offsets=tuple(dict.fromkeys((*measures.NEIGHBORS, *offsets))) if same else (),
        marks=torch.zeros(keys.lengths.total, 0, device=device),
        ids=queries.values if same else None,
    )
    repeats = measures.has_earlier_copy(queries.values, queries.lengths) if same else None
    scope = measures.MeasureScope(classes=(), repeats=repeats, same=same)
    sums, block = measures.MeasureSums(), Block(0, 1)
    measures.add_measures(sums, block, tiled, spec, row_sums.sum_rows(tiled, spec), scope)
    return {name: float(sums.means((block,), name)[0]) for name in sums.names}


MAX_OFFSET = 16
# The offsets that are measured on given texts.
OFFSETS = tuple(sign * offset for offset in range(2, MAX_OFFSET + 1) for sign in (-1, 1))
# The parts of counterbalanced text, in the order in which they are given.
PARTS = ("first half", "second half")
# The sample of the vocabulary on which copying is measured.
COPYING_WORDS = 512
# Longer sentences are skipped: their patterns are computed in full.
MAX_SENTENCE_TOKENS = 512
# The classes of tokens and the measures, besides offsets, that decide kinds.
CLASSES = ("punctuation", "special")
DECIDING = {
    *(*measures.NEIGHBORS.values(), *(f"on_{name}" for name in CLASSES), "first_token"),
    *("normalized_entropy", "duplicate_token", "induction", "output_share"),
}
# Random sequences, for every caller: a label must not depend on who asks.
SEQUENCES = 64
# Synthetic inputs are drawn this often; a label must hold in most of the draws.
DRAWS = 5
# Uniform attention is measured on so many tokens of given texts.
UNIFORM_TOKENS = 20_000
# The synthetic texts of a kind, and how many of them a draw has.
WORD_KINDS = {
    "bracket": (synthetic.bracketed_texts, 10),
    "numbering": (synthetic.numbered_lists, 7),
    "capitals": (word_texts.capital_texts, 2),
    "sentence-start": (word_texts.sentence_texts, 2),
    "acronym": (word_texts.acronym_texts, 3),
    "tense": (word_texts.verb_texts, 4),
}
# The kinds that given texts decide.
TEXT_KINDS = ["previous-token", "next-token", "self", "positional", "sink", "broad", "punctuation"]
# Those with words that begin with a capital, where possible as one token.
CAPITALIZED = ("capitals", "sentence-start", "acronym")
# Sequences on which the partners of induction heads are ablated.
PARTNER_SEQUENCES = 6


@dataclass(slots=True, eq=False)
class HeadTests:
    """The scores of all tests so far; an interrupted test leaves `complete` false."""

    model: build.Model
    thresholds: dict[str, criteria.Threshold]
    progress: bool
    fingerprint: str | None = None
    scores: list[criteria.KindScores] = field(default_factory=list)
    metadata: files.Metadata = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    # The weight on the previous of random tokens, whatever decides the labels.
    previous: Float[np.ndarray, " h"] | None = None
    output_share: Float[np.ndarray, " h"] | None = None
    bias: tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"]] | None = None
    complete: bool = True
    plans: dict[tuple[int, ...], MeasurementPlan] = field(default_factory=dict)
    remeasure: bool = False

    def measure(self, texts: Inputs, offsets: Sequence[int] = ()) -> Statistics:
        if tuple(offsets) not in self.plans:
            classes = CLASSES if self.model.tokenizer is not None else None
            only = frozenset(DECIDING).union(map(measures.offset_name, offsets))
            self.plans[tuple(offsets)] = make_plan(self.model, classes, offsets, only=only)
        measured = measure_by_plan(
            self.model,
            texts,
            self.plans[tuple(offsets)],
            last=last_head_site(self.model, Tap.HEAD_OUTPUT),
            batch_tokens=None if self.model.reads_images else large_batch_tokens(self.model),
            progress=self.progress,
        )
        self.note(measured)
        return measured

    def recall(self, name: str, inputs: object, measure: Callable[[], StoredTest]) -> StoredTest:
        """What the same test has measured before, or what it measures now."""

        def run() -> tuple[StoredTest, bool]:
            return measure(), self.complete

        return recall_test(self.fingerprint, name, inputs, run, remeasure=self.remeasure)

    def note(self, measured: Statistics) -> None:
        self.complete &= measured.complete
        if self.output_share is None:
            self.output_share = measured.means.get("output_share")

    def measure_draws(
        self,
        inputs: model_interface.ModelInputs,
        sizes: Sequence[int],
        offsets: Sequence[int],
        score: Callable[[Statistics], Iterable[criteria.KindScores]],
    ) -> Statistics:
        """Score kinds on synthetic inputs; each draw has some of them, and a pass of its own."""

        def measure() -> StoredTest:
            draws: list[Statistics] = []
            ends = np.cumsum(sizes).tolist()
            try:
                for size, end in zip(sizes, ends, strict=True):
                    measured = self.measure(inputs.select(range(end - size, end)), offsets)
                    draws.append(_for_kinds(measured))
                    if not self.complete:
                        break
            except KeyboardInterrupt:
                if not draws:
                    raise
                self.complete = False
            return StoredTest(draws=tuple(draws))

        if inputs.ids is None:
            draws = measure().draws
        else:
            ids = [ids.values.tolist() for ids in (inputs.ids, inputs.source) if ids is not None]
            about = (ids, inputs.ids.lengths.each, list(sizes), list(offsets))
            draws = self.recall("draws", about, measure).draws
            self.note(draws[0])
        whole = merge_statistics(draws)
        by_draw = [{kind.name: kind for kind in score(draw)} for draw in draws]
        self.scores += [
            criteria.with_draws(kind, [kinds.get(kind.name) for kinds in by_draw])
            for kind in score(whole)
        ]
        return whole

    def measure_words(
        self, kind: str, texts: Sequence[AnnotatedText], label: str, *, stored: bool = False
    ) -> dict[str, word_targets.WordTargetScores]:
        """The scores of every task in annotated texts, in all and for each group of them.

        Those of synthetic texts are `stored`.
        """
        reader = require_text_model(self.model)
        context = resolve_max_length(reader, None)
        # The first token of a Seq2Seq target takes a position too.
        limit = MAX_SENTENCE_TOKENS if context is None else min(context - 1, MAX_SENTENCE_TOKENS)
        bos = synthetic.SpecialTokens.of(reader).bos
        aligned = align_texts(reader.tokenizer, texts, limit, bos)
        if not aligned:
            self.missing[kind] = "no word pair has tokens of its own"
            return {}
        self.metadata[f"{kind}_texts"] = len(aligned)

        def measure() -> StoredTest:
            by_task, complete = word_targets.measure_word_targets(
                self.model, aligned, label=label, progress=self.progress
            )
            self.complete &= complete
            return StoredTest(words=by_task)

        return self.recall(kind, aligned, measure).words if stored else measure().words


def _for_kinds(measured: Statistics) -> Statistics:
    """The measures that decide kinds, without offsets that no head can attend to."""
    names = [
        name
        for name in measured.names
        if name in DECIDING
        or (name.startswith("offset") and not np.isnan(measured.means[name]).all())
    ]
    means, errors = (
        {name: table[name].astype(np.float32) for name in names}
        for table in (measured.means, measured.errors)
    )
    metadata = measured.metadata | {"activations": []}
    return replace(measured, means=means, errors=errors, metadata=metadata)


def merge_statistics(draws: Sequence[Statistics]) -> Statistics:
    """The means of independent draws of the same size, with their errors."""
    if len(draws) == 1:
        return draws[0]
    names = [name for name in draws[0].names if all(name in draw for draw in draws)]
    with np.errstate(invalid="ignore"):
        means = {name: np.mean([draw.means[name] for draw in draws], axis=0) for name in names}
        errors = {
            name: np.sqrt(np.sum([draw.errors[name] ** 2 for draw in draws], axis=0)) / len(draws)
            for name in names
        }
    fractions = [draw.class_fractions for draw in draws]
    metadata = draws[0].metadata | {
        "texts": sum(draw.metadata["texts"] for draw in draws),
        "tokens": sum(draw.metadata["tokens"] for draw in draws),
        "class_fractions": {
            name: float(np.mean([by_name.get(name, 0.0) for by_name in fractions]))
            for name in fractions[0]
        },
        "complete": all(draw.complete for draw in draws),
    }
    return replace(draws[0], means=means, errors=errors, metadata=metadata)


def deal(count: int, draws: int = DRAWS) -> list[int]:
    """How many of `count` inputs each draw has, none of them empty.

    >>> deal(64), deal(3)
    ([13, 13, 13, 13, 12], [1, 1, 1])
    """
    return [len(range(draw, count, draws)) for draw in range(min(count, draws))]


def halve(count: int) -> list[int]:
    """A random half, 0 or 1, for each text; always the same, so that parts of equal length agree.

    >>> sorted(halve(5))
    [0, 0, 0, 1, 1]
    """
    return (np.random.default_rng(0).permutation(count) % 2).tolist()


def measure_repeats(
    tests: HeadTests, model: TextReader, sequences: int, seed: int, *, positional: bool
) -> None:
    """Repeated random tokens; without texts they also decide the positional kinds."""
    repeated = synthetic.repeated_tokens(model, sequences, seed)
    inputs = synthetic.inputs_from_ids(model, synthetic.SpecialTokens.of(model), repeated)
    # An offset beyond the shortest block could be a repetition.
    furthest = min(MAX_OFFSET, min(map(len, repeated)) // 2 - 3)
    # Measured in any case, so that what is stored serves both.
    offsets = [offset for offset in OFFSETS if abs(offset) <= furthest]
    uniform = uniform_scores(model, inputs, blocks_of(model), offsets)
    sample = criteria.SampleSize(sequences, "sequences", pluralise(sequences, "random sequence"))
    tests.metadata |= {"sequences": sequences, "seed": seed}

    def score(measured: Statistics) -> Iterable[criteria.KindScores]:
        kinds = criteria.WeightKinds(measured, uniform, tests.thresholds, sample)
        if positional:
            yield from kinds.positions()
        over = f"{sample.over} repeated once"
        yield from replace(kinds, sample=replace(sample, over=over)).repeats()

    whole = tests.measure_draws(inputs, deal(sequences), offsets, score)
    tests.previous = whole.means.get("previous_token")


def measure_texts(
    tests: HeadTests, inputs: model_interface.ModelInputs, measured: Statistics | None
) -> None:
    """The texts decide the positional kinds and punctuation."""
    measured = tests.measure(inputs, OFFSETS) if measured is None else measured
    tests.note(measured)
    sizes = np.cumsum(inputs.sizes(tests.model))
    first = inputs.select(range(max(1, int((sizes <= UNIFORM_TOKENS).sum()))))
    offsets = [offset for offset in OFFSETS if measures.offset_name(offset) in measured]
    uniform = uniform_scores(tests.model, first, measured.blocks, offsets)
    texts = measured.metadata["texts"]
    tests.metadata["texts"] = texts
    sample = criteria.SampleSize(texts, "texts", pluralise(texts, "given text"))
    kinds = criteria.WeightKinds(measured, uniform, tests.thresholds, sample)
    tests.scores += [*kinds.positions(), *kinds.punctuation()]
    if not measured.class_fractions.get("punctuation"):
        tests.missing.setdefault("punctuation", "the texts have no punctuation")


def measure_punctuation(
    tests: HeadTests, model: TextReader, words: Sequence[str], seed: int
) -> None:
    """Random words with punctuation between them."""
    special = synthetic.SpecialTokens.of(model)
    context = resolve_max_length(model, None)
    limit = None if context is None else context - 1
    tokenizer = plain_tokenizer(model.tokenizer)
    texts = synthetic.punctuated_texts(words, seed=seed)
    ids = [[*special.bos, *tokenizer.encode(text).ids][:limit] for text in texts]
    sample = criteria.SampleSize(len(ids), "texts", pluralise(len(ids), "synthetic text"))

    def score(measured: Statistics) -> Iterable[criteria.KindScores]:
        return criteria.WeightKinds(measured, {}, tests.thresholds, sample).punctuation()

    inputs = synthetic.inputs_from_ids(model, special, ids)
    measured = tests.measure_draws(inputs, deal(len(ids)), (), score)
    if not measured.class_fractions.get("punctuation"):
        tests.missing.setdefault("punctuation", "the tokenizer has none")


def why_no_circuits(model: TextReader) -> str:
    """Why the weights of heads do not connect words with logits, or an empty string."""
    if not isinstance(model.config.readout, readout.LanguageHead):
        return "the model has no language head"
    if not model.native:
        return "the weights of a wrapped model are not read"
    if model.stacks()[model.readout_stack].config.reversible:
        return "the heads write to one of two residual streams"
    if not _attentions(model):
        return "the heads of mixers read more than one token at a time"
    return ""


def _attentions(model: TextReader) -> list[Sublayer]:
    """The attentions that circuits from the embedding to the logits go through."""
    layers, sublayers = model.stacks()[model.readout_stack].config.layers, [Sublayer.ATTENTION]
    if isinstance(model, seq2seq.Seq2Seq):
        # Circuits start at the source embedding, which the decoder reads only if it is shared.
        sublayers = [Sublayer.CROSS, *(sublayers if model.config.shared else [])]
    return [part for part in sublayers if any(getattr(layer, part.value) for layer in layers)]


def measure_copying(tests: HeadTests, model: TextReader) -> None:
    """From the weights alone: does a head raise the logit of the token that it attends to?"""
    if why := why_no_circuits(model):
        tests.missing["copying"] = why
        return
    present = _attentions(model)

    def measure() -> StoredTest:
        blocks = blocks_of(model)
        scored: dict[Address, dict[str, float]] = {}
        metadata: files.Metadata = {"vocabulary": model.config.embedding.vocabulary}
        for sublayer in present:
            circuits = score_copying(
                model, sample=COPYING_WORDS, sublayer=sublayer, progress=tests.progress
            )
            metadata |= circuits.metadata
            scored |= {address: circuits.of(address) for address in circuits.addresses}
        addresses = [address for block in blocks for address in block.addresses]
        means = {
            name: np.array([scored.get(address, {}).get(name, np.nan) for address in addresses])
            for name in ("copying", "copying_eigenvalues")
        }
        by_head = tables.ByHead(kind="circuits", blocks=blocks, means=means, metadata=metadata)
        return StoredTest(copying=by_head)

    copying = tests.recall("copying", (COPYING_WORDS, present), measure).copying
    assert copying is not None, "every stored test of copying has it"
    tests.scores.append(criteria.copying_scores(copying, tests.thresholds))


def measure_word_kinds(tests: HeadTests, words: Sequence[str], seed: int) -> None:
    """Brackets and quotes, lists, capitals, sentences, acronyms and verbs."""
    tokenizer = plain_tokenizer(tests.model.tokenizer)
    ignores_case = tokenizer.encode("River").ids == tokenizer.encode("river").ids
    capitalized = synthetic.capital_words(tokenizer, words)
    for kind, (make, count) in WORD_KINDS.items():
        if not tests.complete:
            return
        if kind == "capitals" and ignores_case:
            tests.missing[kind] = "the tokenizer ignores case"
            continue
        texts = [
            replace(text, group=draw)
            for draw in range(DRAWS)
            for text in make(
                capitalized if kind in CAPITALIZED else words, count, seed=seed * DRAWS + draw
            )
        ]
        measured = tests.measure_words(kind, texts, f"testing {kind} heads", stored=True)
        tests.scores += [
            criteria.drawn_word_scores(kind, scores, tests.thresholds, "" if task == kind else task)
            for task, scores in measured.items()
        ]


def measure_syntax(tests: HeadTests, sentences: Sequence[AnnotatedText]) -> None:
    """Every relation of a treebank in both directions; rare relations are skipped."""
    rare = []
    halves = [
        replace(text, group=half)
        for text, half in zip(sentences, halve(len(sentences)), strict=True)
    ]
    measured = tests.measure_words("syntactic", halves, "reading a treebank")
    for task, scores in measured.items():
        if min(np.nanmax(half.counts) for half in scores.groups) < criteria.MIN_WORDS:
            rare.append(task)
            continue
        confirmed = criteria.confirmed_word_scores("syntactic", scores, tests.thresholds, task)
        tests.scores.append(confirmed)
    tests.metadata["rare_relations"] = rare


def measure_coreference(tests: HeadTests, parts: Sequence[Sequence[AnnotatedText]]) -> None:
    """Pronouns and their mentions, in one or both parts of counterbalanced text."""
    texts = []
    for part, own in enumerate(parts):
        for text, half in zip(own, halve(len(own)), strict=True):
            pairs = tuple(replace(pair, task=f"{pair.task}, {PARTS[part]}") for pair in text.pairs)
            texts.append(replace(text, pairs=pairs, group=half))
    scores = list(tests.measure_words("coreference", texts, "testing coreference").values())
    if not scores:
        return
    tests.scores.append(criteria.coreference_scores(scores, tests.thresholds))
    if len(parts) == 1:
        tests.missing["coreference"] = tests.missing["bias-gap"] = (
            "only one half of counterbalanced text is given, which cannot tell coreference from "
            "gender: give both"
        )
    elif len(scores) == 2:
        first, second = scores
        tests.scores.append(criteria.bias_gap_scores(first, second, tests.thresholds))
        enough = np.fmin(first.counts, second.counts) >= criteria.MIN_WORDS
        tests.bias = (
            np.where(enough, first.accuracy - second.accuracy, np.nan),
            np.where(enough, np.hypot(first.errors, second.errors), np.nan),
        )


def measure_images(tests: HeadTests, model: vision.Vision, images: Any, seed: int) -> None:
    """Given images, or random ones."""
    inputs = read_inputs(
        model, synthetic.random_images(model, seed=seed) if images is None else images
    )
    count, draws = len(inputs), DRAWS if images is None else 0
    tests.metadata |= {"images": count, "given": images is not None}
    sample = criteria.SampleSize(count, "images", pluralise(count, "image"))

    def score(measured: Statistics) -> Iterable[criteria.KindScores]:
        yield criteria.WeightKinds(measured, {}, tests.thresholds, sample).broad()

    if draws:
        tests.measure_draws(inputs, deal(count), (), score)
    else:
        tests.scores += score(tests.measure(inputs))
    if tests.complete:
        patches = image_attention.measure_image_attention(
            model, inputs, draws, progress=tests.progress
        )
        tests.complete &= patches.complete
        whole, *by_draw = (
            list(criteria.WeightKinds(group, group.uniform, tests.thresholds, sample).patches())
            for group in (patches, *patches.draws)
        )
        if by_draw:
            whole = list(map(criteria.with_draws, whole, zip(*by_draw, strict=True)))
        tests.scores += whole


def partners_of_induction(
    tests: HeadTests, labels: Mapping[Address, Sequence[criteria.Label]], seed: int
) -> dict[Address, partners.InductionPartner]:
    """The heads that induction heads build on, by ablation unless the tests were interrupted."""
    induction = [
        address for address, own in labels.items() if "induction" in {label.kind for label in own}
    ]
    if not induction or tests.previous is None:
        return {}
    model, inputs = tests.model, None
    if tests.complete:
        repeated = synthetic.repeated_tokens(model, PARTNER_SEQUENCES, seed)
        inputs = synthetic.inputs_from_ids(model, synthetic.SpecialTokens.of(model), repeated)
    previous = dict(zip(labels, tests.previous.tolist(), strict=True))

    def measure() -> StoredTest:
        by_head = partners.find_partners(
            model, induction, previous, inputs, progress=tests.progress
        )
        return StoredTest(partners=by_head)

    ids = None if inputs is None or inputs.ids is None else inputs.ids.values.tolist()
    return tests.recall("partners", (induction, list(previous.values()), ids), measure).partners
