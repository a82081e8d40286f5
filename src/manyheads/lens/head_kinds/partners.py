"""The heads that induction heads build on, confirmed by ablation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.attention_maps.typology import duplicate_ideal, induction_ideal
from manyheads.lens.causal.ablation import replace_heads
from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.inputs.cached_run import (
    ActivationEditor,
    CachedRun,
    HeadScope,
    head_scope,
    run_until,
)
from manyheads.lens.results.addresses import Address
from manyheads.lens.weights.circuits import Circuits
from manyheads.models import build, model_interface
from manyheads.progress import Progress
from manyheads.taps import Head, Patterns, Sublayer, Tap

# Earlier heads that are ablated: those that attend most to the previous token, and those that the
# weights name.
BY_ATTENTION, BY_WEIGHTS = 6, 2
# A partner's absence takes at least this fraction of the induction score, beyond three errors.
MIN_LOSS, MIN_ERRORS = 0.2, 3.0


@dataclass(frozen=True, slots=True)
class InductionPartner:
    """The earlier head that an induction head builds on.

    `composition` is its K-composition by the weights, NaN if one of them is of a mixer. `score` is
    the induction score with all heads, `without` that without the partner (the mean output in its
    place), both NaN if the model was not run; `confirmed` says that the difference is more than
    chance.
    """

    address: Address
    composition: float
    score: float = np.nan
    without: float = np.nan
    confirmed: bool = False

    def __str__(self) -> str:
        composition = f"composition {self.composition:.2f}"
        if self.confirmed:
            fall = f"its score falls from {self.score:.2f} to {self.without:.2f} without it"
            note = "" if np.isnan(self.composition) else f" ({composition})"
            return f"builds on {self.address}: {fall}{note}"
        return f"its keys read {self.address} by weights alone ({composition})"


@dataclass(frozen=True, slots=True, eq=False)
class _HeadFactors:
    """One circuit of a head: the factor at which two heads meet, and of the other its Gram matrix.

    `norm` is the Frobenius norm of their product. Once per head, so that a pair of heads costs
    products of the size of a head.
    """

    inner: Float[Tensor, "d c"]
    gram: Float[Tensor, "d d"]
    norm: Float[Tensor, ""]

    @classmethod
    def of(cls, outer: Float[Tensor, "c d"], inner: Float[Tensor, "d c"]) -> "_HeadFactors":
        gram = outer.T @ outer
        return cls(inner, gram, _norm(gram, inner @ inner.T))


def _key_composition(qk: _HeadFactors, ov: _HeadFactors) -> float:
    """The K-composition of a head's QK with an earlier head's OV (Elhage et al. 2021).

    |QK OV| / (|QK| |OV|) in Frobenius norms, as in `composition_scores(model, "key")`.
    """
    meeting = qk.inner @ ov.inner.T
    composed = _norm(meeting.T @ qk.gram @ meeting, ov.gram)
    return float(composed / (qk.norm * ov.norm).clamp(min=1e-300))


def _norm(left: Float[Tensor, "d d"], right: Float[Tensor, "d d"]) -> Float[Tensor, ""]:
    """The Frobenius norm of a product, from the Gram matrices of its factors."""
    return (left * right).sum().clamp(min=0).sqrt()


def find_partners(
    model: build.Model,
    induction: Sequence[Address],
    previous: Mapping[Address, float],
    inputs: model_interface.ModelInputs | None,
    *,
    progress: bool = True,
) -> dict[Address, InductionPartner]:
    """For each induction head the earlier head whose ablation costs it most of its score.

    `previous` is the weight of every head on the previous token, `inputs` repeated random tokens.
    Where no ablation makes a difference, or without inputs, it is the previous-token head (more
    than half of the weight) with the largest K-composition.
    """
    partners = {}
    # The weights of a wrapped model are not read.
    for stack in dict.fromkeys(address.stack for address in induction if model.native):
        scope, attention = head_scope(model, stack), (stack, Sublayer.ATTENTION)
        own = [
            address.head for address in induction if (address.stack, address.sublayer) == attention
        ]
        weights = {
            address.head: 0.0 if np.isnan(weight) else weight
            for address, weight in previous.items()
            if (address.stack, address.sublayer) == attention
        }
        for head, partner in _partners_in(scope, own, weights, inputs, progress).items():
            partners[Address(head, stack)] = partner
    return partners


def _partners_in(
    scope: HeadScope,
    induction: list[Head],
    previous: dict[Head, float],
    inputs: model_interface.ModelInputs | None,
    progress: bool,
) -> dict[Head, InductionPartner]:
    circuits = Circuits(scope)
    composed: dict[Head, dict[Head, float]] = {head: {} for head in induction}
    readers = {}
    for head in induction:
        if scope.config(head.layer):
            qk = circuits.qk(head)
            readers[head] = _HeadFactors.of(qk.left, qk.right)
    with Progress("composing heads", total=len(previous), unit="heads", enabled=progress) as bar:
        for earlier in previous:
            writer = None
            if scope.config(earlier.layer):
                ov = circuits.ov(earlier)
                writer = _HeadFactors.of(ov.right.T, ov.left.T)
            for head in induction:
                if earlier.layer < head.layer:
                    reader, score = readers.get(head), np.nan
                    if writer is not None and reader is not None:
                        score = _key_composition(reader, writer)
                    composed[head][earlier] = score
            bar.advance()
    candidates = {
        head: [*_largest(previous, scores, BY_ATTENTION), *_largest(scores, scores, BY_WEIGHTS)]
        for head, scores in composed.items()
        if scores
    }
    effects = {}
    if inputs is not None and candidates:
        every = list(dict.fromkeys(head for heads in candidates.values() for head in heads))
        effects = _ablated_scores(scope, list(candidates), every, inputs, progress)
    partners = {}
    for head, heads in candidates.items():
        if effects:
            # The head whose absence costs most.
            best = min(heads, key=lambda earlier: float(effects[earlier][head].mean()))
            whole, without = effects[None][head], effects[best][head]
            if _loses(whole, without):
                partners[head] = InductionPartner(
                    Address(best, scope.stack_name),
                    composed[head][best],
                    float(whole.mean()),
                    float(without.mean()),
                    confirmed=True,
                )
                continue
        looking_back = [earlier for earlier in composed[head] if previous[earlier] > 0.5]
        for best in _largest(composed[head], looking_back, 1):
            address = Address(best, scope.stack_name)
            partners[head] = InductionPartner(address, composed[head][best])
    return partners


def _largest(values: Mapping[Head, float], among: Iterable[Head], count: int) -> list[Head]:
    heads = [head for head in among if not np.isnan(values[head])]
    return sorted(heads, key=lambda head: -values[head])[:count]


def _loses(whole: Float[Tensor, " b"], without: Float[Tensor, " b"]) -> bool:
    """Whether scores of texts fall by enough, and by more than chance."""
    lost = whole - without
    error = lost.std() / len(lost) ** 0.5 if len(lost) > 1 else lost.new_tensor(torch.inf)
    return bool(lost.mean() >= MIN_LOSS * whole.mean() and lost.mean() > MIN_ERRORS * error)


def _ablated_scores(
    scope: HeadScope,
    induction: list[Head],
    candidates: list[Head],
    inputs: model_interface.ModelInputs,
    progress: bool,
) -> dict[Head | None, dict[Head, Float[Tensor, " b"]]]:
    """The induction score of each text and head, as it is (None) and without each candidate."""
    sites = [scope.site(layer, Tap.PATTERN) for layer in sorted({head.layer for head in induction})]
    ids = inputs.source if scope.stack_name == "encoder" else inputs.ids
    assert ids is not None, "images have no induction heads"
    # The queries that repeat a token, and the keys after its earlier copies.
    texts = [ids.of(text).cpu() for text in range(len(ids))]
    targets = [(duplicate_ideal(tokens).any(1), induction_ideal(tokens)) for tokens in texts]
    scores: dict[Head | None, dict[Head, Tensor]] = {}

    def score(editor: ActivationEditor, later: Head, first: int) -> Float[Tensor, " b"]:
        patterns = editor.recorded[scope.site(later.layer, Tap.PATTERN)]
        assert isinstance(patterns, Patterns)
        by_text = []
        for text, (rows, marks) in enumerate(targets, start=first):
            weights = patterns.shares(text)[later.head].double().cpu()
            by_text.append((weights * marks)[rows].sum(-1).mean())
        return torch.stack(by_text)

    bar = Progress("removing heads", total=len(candidates), unit="heads", enabled=progress)
    with build.eval_mode(scope.model), torch.inference_mode(), bar:
        run = CachedRun(scope, inputs, record=sites)
        for layer in sorted({head.layer for head in candidates}):
            removed: list[Head | None] = [head for head in candidates if head.layer == layer]
            heads = len(removed)
            removed += [] if scores else [None]
            means = run.head_outputs(layer).values.mean(0, keepdim=True)
            change = replace_heads([[head.head] if head else [] for head in removed], means)
            editor = ActivationEditor({scope.site(layer, Tap.HEAD_OUTPUT): change}, sites)
            # Nothing is read after the last induction head.
            resume = partial(run.resume, layer, copies=len(removed))
            run_until(resume, editor, sites[-1])
            for copy, head in enumerate(removed):
                scores[head] = {
                    later: score(editor, later, copy * len(targets))
                    for later in induction
                    if head is None or later.layer > head.layer
                }
            bar.advance(heads)
    return scores


def add_partners(
    labels: dict[Address, tuple[Label, ...]], partners: Mapping[Address, InductionPartner]
) -> dict[Address, tuple[Label, ...]]:
    """Name the partner of each induction head in its evidence."""

    def extend(address: Address, label: Label) -> Label:
        note = partners.get(address, "no earlier head attends to the previous token")
        return replace(label, evidence=f"{label.evidence}; {note}")

    return {
        address: tuple(
            extend(address, label) if label.kind == "induction" else label for label in own
        )
        for address, own in labels.items()
    }
