"""The trials that heads are put to: each measures something and says which kinds it speaks for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float

from manyheads.encoding.text_reader import TextReader, find_longest, reads_texts
from manyheads.formatting import pluralise
from manyheads.kernels.contract import Request
from manyheads.lens.head_kinds.criteria import (
    FEWEST,
    Finding,
    Threshold,
    label_heads,
    of_circuits,
    of_entropy,
    of_glances,
    of_places,
    of_pointing,
    of_punctuation,
    of_repeats,
)
from manyheads.lens.head_kinds.labels import Kinds, Label
from manyheads.lens.head_kinds.patch_attention import glance
from manyheads.lens.head_kinds.word_targets import Pointed, point
from manyheads.lens.inputs.annotated import Written, mark
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.inputs.synthetic import (
    Frame,
    as_given,
    bracketed_texts,
    images,
    numbered_lists,
    plain_words,
    punctuated_texts,
    repeated_tokens,
)
from manyheads.lens.inputs.texts import Given, read
from manyheads.lens.measure.measures import NEIGHBOURS, Scope, Tally, repeated, tally_heads
from manyheads.lens.measure.row_sums import Wanted, sum_rows
from manyheads.lens.measure.score_tiles import Meeting
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.results.addresses import Address, Block, attention_at, blocks_of, stacks_of
from manyheads.lens.results.by_head import ByHead
from manyheads.lens.results.files import Facts
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
class Partner:
    """The previous-token head whose writes a head's keys read most, and how much."""

    address: Address
    composition: float


def key_composition(found: Circuits, earlier: Head, later: Head) -> float:
    """How much the keys of a later head read what an earlier one writes (Elhage et al. 2021).

    |QK OV| / (|QK| |OV|) in Frobenius norms, the same as `compose(model, "key")` has for all pairs.
    """
    ov, qk = found.ov(earlier), found.qk(later)
    outer = torch.linalg.qr(qk.left).R
    inner = torch.linalg.qr(ov.right.T).R.T
    both = qk.singular_values().norm() * ov.singular_values().norm()
    return float((outer @ (qk.right @ ov.left) @ inner).norm() / both.clamp(min=1e-300))


def find_partners(
    model: Model, induction: Sequence[Address], previous: Sequence[Address]
) -> dict[Address, Partner]:
    """For each induction head the previous-token head below it that it composes with most."""
    partners = {}
    for later in induction:
        found = Circuits(part_of(model, cast(StackName, later.stack), later.sublayer))
        below = [
            each
            for each in previous
            if each.stack == later.stack
            and each.sublayer is later.sublayer
            and each.head.layer < later.head.layer
        ]
        scored = [Partner(each, key_composition(found, each.head, later.head)) for each in below]
        if scored:
            partners[later] = max(scored, key=lambda partner: partner.composition)
    return partners


def even_scores(
    model: Model, given: Given, blocks: Sequence[Block], offsets: Sequence[int] = ()
) -> dict[str, Float[np.ndarray, " h"]]:
    """Measures of `statistics` by name, for a head in each one's place that prefers no key.

    It sees what the mask shows; position and bias are not asked. Heads that see alike are measured
    once.
    """
    assert given.ids is not None, "images have no tokens to repeat"
    reads = {"main": given.ids, "decoder": given.ids, "encoder": given.source}
    stacks = stacks_of(model)
    known: dict[tuple[str, Sublayer, Mask], dict[str, float]] = {}
    found = []
    for block in blocks:
        config = attention_at(stacks[block.stack], block.layer, block.sublayer).config
        key = block.stack, block.sublayer, config.mask
        if key not in known:
            crosses = isinstance(model, Seq2Seq) and block.sublayer is Sublayer.CROSS
            queries, keys = reads[block.stack], given.source if crosses else reads[block.stack]
            assert queries is not None
            assert keys is not None
            known[key] = _measured(queries, keys, config.mask, offsets, same=not crosses)
        found.append(known[key])
    names = dict.fromkeys(name for each in found for name in each)
    return {
        name: np.concatenate(
            [
                np.full(block.heads, each.get(name, np.nan))
                for block, each in zip(blocks, found, strict=True)
            ]
        )
        for name in names
    }


def _measured(
    queries: Ragged, keys: Ragged, mask: Mask, offsets: Sequence[int], *, same: bool
) -> dict[str, float]:
    device = queries.device
    nothing = torch.zeros(queries.lengths.total, 1, 1, device=device)
    request = Request(queries=queries.lengths, keys=keys.lengths, mask=mask, scale=1.0)
    meeting = Meeting(nothing, torch.zeros(keys.lengths.total, 1, 1, device=device), request)
    every = tuple(dict.fromkeys((*NEIGHBOURS, *offsets)))
    wanted = Wanted(
        offsets=every if same else (),
        marks=torch.zeros(keys.lengths.total, 0, device=device),
        ids=queries.values if same else None,
    )
    repeats = repeated(queries.values, queries.lengths) if same else None
    scope = Scope(classes=(), repeats=repeats, same=same)
    tally, block = Tally(), Block(0, 1)
    tally_heads(tally, block, meeting, wanted, sum_rows(meeting, wanted), scope)
    return {name: float(tally.means((block,), name)[0]) for name in tally.names}


FURTHEST = 16
# The offsets that given texts are tried at.
OFFSETS = tuple(sign * offset for offset in range(2, FURTHEST + 1) for sign in (-1, 1))
# Words whose copying is tried, of models with many.
WORDS = 512
# Sentences beyond this are left out: their patterns are formed whole.
LONGEST_SENTENCE = 512


@dataclass(slots=True, eq=False)
class Gathered:
    """What the trials have found so far; one that is interrupted leaves `complete` false."""

    model: Model
    table: dict[str, Threshold]
    progress: bool
    findings: list[Finding] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    written: Float[np.ndarray, " h"] | None = None
    complete: bool = True

    def measure(self, texts: Any, offsets: Sequence[int] = ()) -> Statistics:
        found = statistics(self.model, texts, offsets=offsets, progress=self.progress)
        self.complete &= found.complete
        if self.written is None:
            self.written = found.means["output_share"]
        return found

    def ask(self, kind: str, written: Sequence[Written], label: str) -> dict[str, Pointed]:
        """What every head looks at most where the texts ask for it."""
        reader = reads_texts(self.model)
        longest = find_longest(reader, None)
        # The token that a Seq2Seq writes after takes a place too.
        room = LONGEST_SENTENCE if longest is None else min(longest - 1, LONGEST_SENTENCE)
        marked = mark(reader.tokenizer, written, room, Frame.of(reader).begin)
        if not marked:
            self.missing[kind] = "the tokenizer leaves no word to ask"
            return {}
        self.facts[f"{kind}_texts"] = len(marked)
        found, complete = point(self.model, marked, label=label, progress=self.progress)
        self.complete &= complete
        return found

    def result(self) -> Kinds:
        blocks = blocks_of(self.model)
        addresses = tuple(address for block in blocks for address in block.addresses)
        quiet = np.zeros(len(addresses), dtype=bool)
        if self.written is not None:
            quiet = self.written < self.table["silent"].above
        labels, partners = _partnered(self.model, label_heads(self.findings, addresses, quiet))
        told = {kind: asdict(each) for kind, each in self.table.items() if kind != "silent"}
        facts = self.facts | {
            "thresholds": told,
            "missing": self.missing,
            "partners": partners,
            "silent": [str(address) for address in np.array(addresses, dtype=object)[quiet]],
            "complete": self.complete,
        }
        means = {finding.name: finding.scores for finding in self.findings}
        scores = ByHead(kind="scores of kinds", blocks=blocks, means=means)
        return Kinds(labels=labels, scores=scores, facts=facts)


def try_repeats(
    gathered: Gathered, model: TextReader, sequences: int, seed: int, *, decides: bool
) -> None:
    """Random tokens said twice; they decide what goes by place where no texts are given."""
    made = repeated_tokens(model, sequences, seed)
    given = as_given(model, Frame.of(model), made)
    # Beyond the shortest block an offset could be a repetition.
    shortest = min(len(each) for each in made) // 2
    offsets = _offsets(min(FURTHEST, shortest - 3)) if decides else []
    found = gathered.measure(given, offsets)
    even = even_scores(model, given, found.blocks, offsets)
    over = f"{found.facts['texts']:,} random sequences"
    gathered.facts |= {"sequences": found.facts["texts"], "seed": seed}
    if decides:
        gathered.findings += of_places(found, even, gathered.table, over)
        gathered.findings.append(of_entropy(found, gathered.table, over))
    gathered.findings += of_repeats(found, even, gathered.table, f"{over} said twice")


def try_given(gathered: Gathered, texts: Any) -> None:
    """Texts that somebody brought decide what goes by place, and by punctuation."""
    if isinstance(texts, Statistics):
        found = texts
        gathered.complete &= found.complete
    else:
        found = gathered.measure(texts, OFFSETS)
    over = pluralise(found.facts["texts"], "given text")
    gathered.facts["texts"] = found.facts["texts"]
    gathered.findings += of_places(found, {}, gathered.table, over)
    gathered.findings.append(of_entropy(found, gathered.table, over))
    _punctuation(gathered, found, over, "the texts have none")


def try_punctuation(gathered: Gathered, model: TextReader, seed: int) -> None:
    """Random words with stops between them."""
    frame = Frame.of(model)
    made = punctuated_texts(plain_words(model.tokenizer, seed=seed), seed=seed)
    longest = find_longest(model, None)
    room = None if longest is None else longest - 1
    tokenizer = plain_copy(model.tokenizer)
    ids = [[*frame.begin, *tokenizer.encode(text).ids][:room] for text in made]
    found = gathered.measure(as_given(model, frame, ids))
    _punctuation(
        gathered, found, f"{found.facts['texts']:,} made texts", "the tokenizer knows none"
    )


def _punctuation(gathered: Gathered, found: Statistics, over: str, why_none: str) -> None:
    if found.class_shares.get("punctuation"):
        gathered.findings.append(of_punctuation(found, gathered.table, over))
    else:
        gathered.missing.setdefault("punctuation", why_none)


def try_copying(gathered: Gathered, model: TextReader) -> None:
    """From the weights alone: does what a head reads come out as the same word?"""
    if not isinstance(model.config.readout, LanguageHead):
        gathered.missing["copying"] = "the model scores no words"
        return
    stack: StackName = "main"
    sublayers = [Sublayer.ATTENTION]
    if isinstance(model, Seq2Seq):
        stack, sublayers = "decoder", [Sublayer.CROSS]
        # The circuits begin with the source's table, which a decoder of its own does not read.
        if model.config.shared:
            sublayers.append(Sublayer.ATTENTION)
    blocks = blocks_of(model)
    here = {each.sublayer for each in blocks if each.stack == stack}
    scored: dict[Address, dict[str, float]] = {}
    facts: Facts = {"vocabulary": model.config.embedding.vocabulary}
    for sublayer in sublayers:
        if sublayer in here:
            found = score_copying(
                model, sample=WORDS, stack=stack, sublayer=sublayer, progress=gathered.progress
            )
            facts |= found.facts
            scored |= {address: found.of(address) for address in found.addresses}
    every = [address for block in blocks for address in block.addresses]
    means = {
        name: np.array([scored.get(address, {}).get(name, np.nan) for address in every])
        for name in ("copying", "copying_eigenvalues")
    }
    spread = ByHead(kind="circuits", blocks=blocks, means=means, facts=facts)
    gathered.findings.append(of_circuits(spread, gathered.table))


def try_marks(gathered: Gathered, model: TextReader, seed: int) -> None:
    """Brackets and quotes, and lists with numbers."""
    words = plain_words(model.tokenizer, seed=seed)
    made = {
        "bracket": bracketed_texts(words, seed=seed),
        "numbering": numbered_lists(words, seed=seed),
    }
    for kind, texts in made.items():
        if not gathered.complete:
            return
        for task, found in gathered.ask(kind, list(texts), f"asking for {kind}").items():
            gathered.findings.append(of_pointing(kind, found, gathered.table, task))


def try_syntax(gathered: Gathered, sentences: Sequence[Written]) -> None:
    """Every relation of a treebank, both ways; rare ones are left out."""
    rare = []
    for task, found in gathered.ask("syntactic", sentences, "reading a treebank").items():
        if np.nanmax(found.counts) < FEWEST:
            rare.append(task)
        else:
            gathered.findings.append(of_pointing("syntactic", found, gathered.table, task))
    gathered.facts["rare_relations"] = rare


def try_coreference(gathered: Gathered, references: Sequence[Written]) -> None:
    for found in gathered.ask("coreference", references, "following pronouns").values():
        gathered.findings.append(of_pointing("coreference", found, gathered.table))


def try_images(gathered: Gathered, model: Vision, given: Any, seed: int) -> None:
    """Images that were given, or soft random colours."""
    seen: Given = read(model, images(model, seed=seed) if given is None else given)
    gathered.facts |= {"images": len(seen), "given": given is not None}
    found = gathered.measure(seen)
    over = pluralise(found.facts["texts"], "image")
    gathered.findings.append(of_entropy(found, gathered.table, over))
    if gathered.complete:
        glances = glance(model, seen, progress=gathered.progress)
        gathered.complete &= glances.complete
        gathered.findings += of_glances(glances, gathered.table)


def _offsets(furthest: int) -> list[int]:
    return [sign * offset for offset in range(2, furthest + 1) for sign in (-1, 1)]


def _partnered(
    model: Model, labels: dict[Address, tuple[Label, ...]]
) -> tuple[dict[Address, tuple[Label, ...]], dict[str, dict[str, Any]]]:
    """Induction heads told with the previous-token heads that they build on."""
    of_kind = {
        kind: [
            address for address, mine in labels.items() if any(each.kind == kind for each in mine)
        ]
        for kind in ("induction", "previous-token")
    }
    partners = find_partners(model, of_kind["induction"], of_kind["previous-token"])
    told = dict(labels)
    for address in of_kind["induction"]:
        partner = partners.get(address)
        said = (
            "no previous-token head stands below it"
            if partner is None
            else f"reads {partner.address} through its keys (composition {partner.composition:.2f})"
        )
        told[address] = tuple(
            replace(label, evidence=f"{label.evidence}; {said}")
            if label.kind == "induction"
            else label
            for label in labels[address]
        )
    return told, {
        str(address): {"head": str(partner.address), "composition": partner.composition}
        for address, partner in partners.items()
    }
