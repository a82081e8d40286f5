"""Erasure: weights are taken from the top of a ranking until the answer changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.faithful.reweighting import Decision

ORDERS = ("attention", "gradient", "gradient_times_attention", "random")


@dataclass(frozen=True, slots=True, eq=False)
class Erased:
    """What became of one answer as keys were taken away in one order.

    `share` is the share of keys gone when the answer first changed, 1 where it never did;
    `curve` is the answer's probability at even steps from nothing erased to everything.
    """

    share: float
    flipped: bool
    curve: Float[Tensor, " steps"]


def rank_keys(decision: Decision) -> dict[str, Float[Tensor, " k"]]:
    """How much each key matters to the answer: by attention, gradient, and their product.

    Each is summed over the deciding queries, the heads and the layers; gradients keep their sign,
    so that what speaks for the answer comes first (arXiv 1906.03731).
    """
    slopes = decision.slopes()
    sums = {name: torch.zeros_like(decision.keys, dtype=torch.float64) for name in ORDERS[:-1]}
    for layer, weights in decision.weights.items():
        each = (weights, slopes[layer], weights * slopes[layer])
        for name, values in zip(ORDERS, each, strict=False):
            sums[name] += values.double().sum((0, 1))[decision.keys]
    return sums


def renormalise(
    weights: Float[Tensor, "h r s"], kept: Bool[Tensor, " s"], *, sink: bool
) -> Float[Tensor, "h r s"]:
    """Without some keys, the rest shares their weight in proportion; nothing left gives nothing.

    What a learned sink takes stays a part of the whole.

    >>> kept = torch.tensor([False, True, True])
    >>> renormalise(torch.tensor([[[0.5, 0.3, 0.2]]]), kept, sink=False)
    tensor([[[0.0000, 0.6000, 0.4000]]])
    """
    left = weights * kept
    whole = left.sum(-1, keepdim=True)
    if sink:
        whole = whole + (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
    return left / whole.clamp(min=torch.finfo(whole.dtype).tiny)


def erase_key_weights(
    decision: Decision, kept: Bool[Tensor, "copies s"]
) -> Float[Tensor, "copies v"]:
    """The probabilities of all answers, in each copy without the keys that are not kept in it."""
    sinks = decision.has_sink
    found = []
    for some in kept.split(decision.copies_at_once):

        def without(
            layer: int, copy: int, weights: Tensor, some: Bool[Tensor, "few s"] = some
        ) -> Tensor:
            return renormalise(weights, some[copy], sink=sinks[layer])

        with torch.no_grad():
            found.append(decision.under(without, len(some)))
    return torch.cat(found)


def erase(decision: Decision, order: Sequence[int] | Int[Tensor, " k"], steps: int) -> Erased:
    """Take the keys away in this order, in so many even steps at most (arXiv 1906.03731).

    A text of more keys than `steps` is looked at after each step only, so that its share is known
    to one step from above.
    """
    order = torch.as_tensor(order, device=decision.keys.device)
    keys = len(order)
    counts = [ceil(keys * step / steps) for step in range(steps + 1)]
    size = next(iter(decision.weights.values())).shape[-1]
    looked = sorted(set(counts))
    kept = torch.ones(len(looked), size, dtype=torch.bool, device=order.device)
    for row, count in zip(kept, looked, strict=True):
        row[order[:count]] = False
    found = erase_key_weights(decision, kept)
    changed = (found.argmax(-1) != decision.answer).nonzero().flatten()
    share = looked[int(changed[0])] / keys if len(changed) else 1.0
    by_count = dict(zip(looked, found[:, decision.answer].tolist(), strict=True))
    return Erased(share, bool(len(changed)), torch.tensor([by_count[count] for count in counts]))
