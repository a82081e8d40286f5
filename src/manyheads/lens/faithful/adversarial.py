"""Adversarial attention: weights far from the model's own that give the same answer."""

from dataclasses import dataclass, replace
from math import log, nan

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.faithful.erasure import Decision

# The divergence of two patterns without a common key.
MAX_DIVERGENCE = log(2)
# The search stops at this fraction of the largest divergence.
FAR_ENOUGH = 0.99
STARTS = 2
# Penalty per unit by which the answer changes too much (arXiv 1902.10186).
PENALTY = 500.0
RATE = 0.1
HALVINGS = 10
# A search has settled if its last quarter lowered no loss by more than this fraction.
SETTLED = 0.01


@dataclass(frozen=True, slots=True)
class Adversary:
    """How far the weights could move, and how far the answer moved with them.

    `divergence` is the Jensen-Shannon divergence in nats, a mean over heads, layers and deciding
    queries, at most ln 2; `moved` is the total variation of the answer's probabilities. Both are
    NaN where there is nothing to search. A search that has not `settled` was cut short: weights
    that are farther may exist.
    """

    divergence: float
    moved: float
    settled: bool = True


def jensen_shannon(
    p: Float[Tensor, "*rows s"], q: Float[Tensor, "*rows s"]
) -> Float[Tensor, "*rows"]:
    """The divergence of two distributions from their mean, in nats: 0 if equal, ln 2 at most.

    >>> round(float(jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))), 4)
    0.6931
    """
    middle = (p + q) / 2
    tiny = torch.finfo(middle.dtype).tiny
    logs = middle.clamp(min=tiny).log()
    parts = [weights * (weights.clamp(min=tiny).log() - logs) for weights in (p, q)]
    return (parts[0] + parts[1]).sum(-1) / 2


def total_variation(
    p: Float[Tensor, "*rows v"], q: Float[Tensor, "*rows v"]
) -> Float[Tensor, "*rows"]:
    """Half the sum of absolute differences."""
    return (p - q).abs().sum(-1) / 2


def find_adversary(
    decision: Decision, *, within: float = 0.01, iterations: int = 100, seed: int = 0
) -> Adversary:
    """Maximize the divergence of all deciding weights while the answer moves by `within` at most.

    The search of arXiv 1902.10186, by Adam on the softmax scores of the weights, from two starts:
    inverted and random weights. The results are moved back towards the model's own weights until
    the constraint holds. The divergence is a lower bound of the largest one.
    """
    if not 0 < within < 1:
        raise InputError(f"within must be in (0, 1), got {within}", "use 0 < within < 1")
    if iterations < 1:
        raise InputError(f"iterations must be at least 1, got {iterations}", "use 1 or more")
    search = _Search(decision, within)
    if not any(bool(free.any()) for free in search.free):
        return Adversary(nan, nan)
    scores = search.starts(seed)
    optimizer = torch.optim.Adam(scores, lr=RATE)
    best = Adversary(0.0, 0.0)
    losses = []
    for _ in range(iterations):
        with torch.enable_grad():
            divergence, moved = search.measure(search.weights(scores))
            loss = PENALTY * (moved - within).clamp(min=0) - divergence
            gradients = torch.autograd.grad(loss.sum(), scores)
        losses.append(loss.detach())
        best = search.better(best, divergence.detach(), moved.detach())
        if best.divergence >= FAR_ENOUGH * MAX_DIVERGENCE:
            return best
        for parameter, gradient in zip(scores, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    history = torch.stack(losses)
    if history.isnan().any():
        return Adversary(nan, nan, settled=False)
    settled, early = False, history[: iterations * 3 // 4]
    if len(early):
        before, after = early.amin(0), history.amin(0)
        fell = before - after > SETTLED * before.abs().clamp(min=MAX_DIVERGENCE)
        settled = not bool(fell.any())
    return replace(search.draw_back(best, scores), settled=settled)


class _Search:
    """The candidates and their objective; weights are lists by layer, of `copies h r s`."""

    def __init__(self, decision: Decision, within: float) -> None:
        self.decision, self.within = decision, within
        self.own = [decision.weights[layer] for layer in decision.layers]
        self.visible = [decision.visible[layer] for layer in decision.layers]
        # A query that sees a single key cannot attend elsewhere.
        self.free = [visible.sum(-1) > 1 for visible in self.visible]
        self.index = {layer: index for index, layer in enumerate(decision.layers)}

    def starts(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scores = []
        for own in self.own:
            away = -own.clamp(min=1e-6).log()
            chance = torch.randn(own.shape, generator=generator).to(own)
            scores.append(torch.stack((away, 3 * chance)).requires_grad_())
        return scores

    def weights(self, scores: list[Tensor]) -> list[Tensor]:
        weights = []
        for layer_scores, own, visible in zip(scores, self.own, self.visible, strict=True):
            # A query that sees no key keeps zero weights.
            hidden = ~visible & visible.any(-1, keepdim=True)
            softened = layer_scores.masked_fill(hidden, -torch.inf).softmax(-1)
            # A learned sink keeps its weight.
            weights.append(softened * own.sum(-1, keepdim=True))
        return weights

    def measure(self, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The divergence and the change of the answer in each copy."""
        decision = self.decision
        answers = decision.under(
            lambda layer, copy, _: weights[self.index[layer]][copy], len(weights[0])
        )
        moved = total_variation(answers, decision.probabilities.expand_as(answers))
        rows = [
            jensen_shannon(_normalized(new), _normalized(own).expand_as(new)).mean(1)[:, free]
            for new, own, free in zip(weights, self.own, self.free, strict=True)
        ]
        return torch.cat(rows, dim=1).mean(1), moved

    def better(self, best: Adversary, divergence: Tensor, moved: Tensor) -> Adversary:
        for far, change in zip(divergence.tolist(), moved.tolist(), strict=True):
            if change <= self.within and far > best.divergence:
                best = Adversary(far, change)
        return best

    def draw_back(self, best: Adversary, scores: list[Tensor]) -> Adversary:
        """Bisect between the model's own weights and the results of the search."""
        with torch.no_grad():
            ends = self.weights(scores)
            low, high = torch.zeros(STARTS), torch.ones(STARTS)
            mix = high
            for _ in range(HALVINGS):
                mixed = [
                    torch.lerp(own.expand_as(end), end, mix.to(end).view(-1, 1, 1, 1))
                    for own, end in zip(self.own, ends, strict=True)
                ]
                divergence, moved = self.measure(mixed)
                best = self.better(best, divergence, moved)
                allowed = moved.cpu() <= self.within
                low, high = torch.where(allowed, mix, low), torch.where(allowed, high, mix)
                mix = (low + high) / 2
        return best


def _normalized(weights: Float[Tensor, "*rows s"]) -> Float[Tensor, "*rows s"]:
    """The distribution over the keys without a sink."""
    total = weights.sum(-1, keepdim=True)
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny)
