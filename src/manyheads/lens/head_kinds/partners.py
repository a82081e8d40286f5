"""The heads that induction heads build on, confirmed by ablation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.inputs.cached_run import (
    ActivationEditor,
    CachedRun,
    HeadScope,
    head_scope,
)
from manyheads.lens.results.addresses import Address
from manyheads.lens.weights.circuits import Circuits
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
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
            known = "" if np.isnan(self.composition) else f" ({composition})"
            return f"builds on {self.address}: {fall}{known}"
        return f"its keys read {self.address} by weights alone ({composition})"


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
    model: Model,
    induction: Sequence[Address],
    previous: Mapping[Address, float],
    inputs: ModelInputs | None,
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
    for stack in dict.fromkeys(each.stack for each in induction if model.native):
        scope = head_scope(model, stack)
        own = [
            each.head
            for each in induction
            if each.stack == stack and each.sublayer is Sublayer.ATTENTION
        ]
        weights = {
            each.head: 0.0 if np.isnan(weight) else weight
            for each, weight in previous.items()
            if (each.stack, each.sublayer) == (stack, Sublayer.ATTENTION)
        }
        for head, partner in _partners_in(scope, own, weights, inputs, progress).items():
            partners[Address(head, stack)] = partner
    return partners


def _partners_in(
    scope: HeadScope,
    induction: list[Head],
    previous: dict[Head, float],
    inputs: ModelInputs | None,
    progress: bool,
) -> dict[Head, InductionPartner]:
    circuits = Circuits(scope)
    composed: dict[Head, dict[Head, float]] = {head: {} for head in induction}
    pairs = [(each, head) for head in induction for each in previous if each.layer < head.layer]
    with Progress("composing heads", total=len(pairs), unit="pairs", enabled=progress) as bar:
        for each, head in pairs:
            attend = all(scope.config(one.layer) is not None for one in (each, head))
            composed[head][each] = key_composition(circuits, each, head) if attend else np.nan
            bar.advance()
    candidates = {
        head: [*_largest(previous, known, BY_ATTENTION), *_largest(scores, known, BY_WEIGHTS)]
        for head, scores in composed.items()
        if (known := list(scores))
    }
    effects = {}
    if inputs is not None and candidates:
        every = list(dict.fromkeys(each for some in candidates.values() for each in some))
        effects = _ablated_scores(scope, list(candidates), every, inputs, progress)
    partners = {}
    for head, some in candidates.items():
        chosen = _by_ablation(effects, head, some)
        if chosen is not None:
            address = Address(chosen[0], scope.stack_name)
            partners[head] = InductionPartner(address, composed[head][chosen[0]], *chosen[1:], True)
            continue
        looking_back = [each for each in composed[head] if previous[each] > 0.5]
        for best in _largest(composed[head], looking_back, 1):
            address = Address(best, scope.stack_name)
            partners[head] = InductionPartner(address, composed[head][best])
    return partners


def _largest(values: Mapping[Head, float], among: Iterable[Head], count: int) -> list[Head]:
    known = [head for head in among if not np.isnan(values[head])]
    return sorted(known, key=lambda head: -values[head])[:count]


def _by_ablation(
    effects: Mapping[Head | None, Mapping[Head, Float[Tensor, " b"]]], head: Head, some: list[Head]
) -> tuple[Head, float, float] | None:
    """The head whose absence costs most, the score with it and without it; None if none does."""
    if not effects:
        return None
    whole = effects[None][head]
    best = min(some, key=lambda each: float(effects[each][head].mean()))
    lost = whole - effects[best][head]
    error = lost.std() / len(lost) ** 0.5 if len(lost) > 1 else lost.new_tensor(torch.inf)
    enough = lost.mean() >= MIN_LOSS * whole.mean() and lost.mean() > MIN_ERRORS * error
    return (best, float(whole.mean()), float(effects[best][head].mean())) if enough else None


def _ablated_scores(
    scope: HeadScope,
    induction: list[Head],
    candidates: list[Head],
    inputs: ModelInputs,
    progress: bool,
) -> dict[Head | None, dict[Head, Float[Tensor, " b"]]]:
    """The induction score of each text and head, as it is (None) and without each candidate."""
    sites = [scope.site(layer, Tap.PATTERN) for layer in sorted({each.layer for each in induction})]
    ids = inputs.source if scope.stack_name == "encoder" else inputs.ids
    assert ids is not None, "images have no induction heads"
    targets = [_after_copies(ids.of(text)) for text in range(len(ids))]
    found: dict[Head | None, dict[Head, Tensor]] = {}
    bar = Progress("removing heads", total=len(candidates), unit="heads", enabled=progress)
    with eval_mode(scope.model), torch.inference_mode(), bar:
        run = CachedRun(scope, inputs, record=sites)
        for layer in sorted({each.layer for each in candidates}):
            own: list[Head | None] = [each for each in candidates if each.layer == layer]
            own += [] if found else [None]
            means = run.head_outputs(layer).values.mean(0)

            def ablate(values: Tensor, own: Any = own, means: Tensor = means) -> Tensor:
                copies = values.unflatten(0, (len(own), -1)).clone()
                for copy, head in zip(copies, own, strict=True):
                    if head is not None:
                        copy[:, head.head] = means[head.head]
                return copies.flatten(0, 1)

            editor = ActivationEditor({scope.site(layer, Tap.HEAD_OUTPUT): ablate}, sites)
            run.resume(layer, editor, len(own))
            for place, head in enumerate(own):
                found[head] = {
                    each: _scores(editor, scope, each, targets, place * len(targets))
                    for each in induction
                    if head is None or each.layer > head.layer
                }
            bar.advance(sum(head is not None for head in own))
    return found


def _scores(
    editor: ActivationEditor, scope: HeadScope, head: Head, targets: list[Any], first: int
) -> Float[Tensor, " b"]:
    patterns = editor.recorded[scope.site(head.layer, Tap.PATTERN)]
    assert isinstance(patterns, Patterns)
    scores = []
    for text, (rows, marks) in enumerate(targets):
        weights = patterns.shares(first + text)[head.head].double().cpu()
        scores.append((weights * marks)[rows].sum(-1).mean())
    return torch.stack(scores)


def _after_copies(ids: Tensor) -> tuple[Bool[Tensor, " t"], Bool[Tensor, "t t"]]:
    """Which queries repeat a token, and the keys after its earlier copies."""
    same = (ids[:, None] == ids[None, :]).cpu().tril(-1)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    return same.any(1), after


def add_partners(
    labels: dict[Address, tuple[Label, ...]], partners: Mapping[Address, InductionPartner]
) -> dict[Address, tuple[Label, ...]]:
    """Name the partner of each induction head in its evidence."""

    def extend(address: Address, label: Label) -> Label:
        partner = partners.get(address)
        note = "no earlier head attends to the previous token" if partner is None else str(partner)
        return replace(label, evidence=f"{label.evidence}; {note}")

    return {
        address: tuple(extend(address, each) if each.kind == "induction" else each for each in own)
        for address, own in labels.items()
    }
