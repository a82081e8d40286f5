"""Tests of attention weights of a trained classifier: Jain and Wallace, arXiv 1902.10186."""

import math

import numpy as np
import torch
from torch import Tensor

from manyheads.lens.faithful.adversarial import jensen_shannon, total_variation
from manyheads.lens.faithful.faithfulness_report import kendall
from studies.explanation.classifiers import PADDING, WordClassifier, outputs_of
from studies.study import Settings, Values

# Answers may change by so much, and what more costs (arXiv 1902.10186).
WITHIN, PENALTY = 0.01, 500.0
MAX_DIVERGENCE = math.log(2)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Of weights [b h t], in nats; the mean over heads. One head is compared with all."""
    first, second = torch.broadcast_tensors(first, second)
    return jensen_shannon(first, second).mean(1)


def agree(model: WordClassifier, ids: Tensor) -> Values:
    """Kendall's tau over the words of a text: weights with gradients and with leaving words out.

    Texts of less than three words, or without a ranking, are left out.
    """
    probabilities, weights = outputs_of(model, ids)
    scores = {
        "weights": weights.mean(1),
        "gradient": gradients(model, ids),
        "left out": left_out(model, ids, probabilities),
    }
    arrays = {name: values.detach().double().cpu().numpy() for name, values in scores.items()}
    lengths = (ids != PADDING).sum(1).tolist()
    taus: dict[str, list[float]] = {"gradient": [], "left out": [], "each other": []}
    for row, length in enumerate(lengths):
        if length < 3:
            continue
        own, slope, without = (arrays[name][row, :length] for name in scores)
        pairs = ((own, slope), (own, without), (slope, without))
        for name, pair in zip(taus, pairs, strict=True):
            taus[name].append(kendall(*pair))
    return {name: float(np.nanmean(values)) for name, values in taus.items()}


def gradients(model: WordClassifier, ids: Tensor) -> Tensor:
    """|vector . gradient of the answer's probability| of each word, with the weights held fixed."""
    vectors = model.embedding(ids).detach().requires_grad_()
    # cuDNN has gradients of an LSTM only in training; without dropout nothing else changes.
    with torch.backends.cudnn.flags(enabled=False):
        states = model.states(vectors, ids)
        weights = model.weights(states, ids).detach()
        answers = model.answer(states, weights).softmax(-1)
        [slopes] = torch.autograd.grad(answers.amax(-1).sum(), vectors)
    return (vectors * slopes).sum(-1).abs()


def left_out(model: WordClassifier, ids: Tensor, probabilities: Tensor) -> Tensor:
    """How far the answer moves without each word [b t], the others closing up."""
    moved, padding = [], ids.new_full((len(ids), 1), PADDING)
    for at in range(ids.shape[1]):
        shorter = torch.cat((ids[:, :at], ids[:, at + 1 :], padding), dim=1)
        moved.append(total_variation(outputs_of(model, shorter)[0], probabilities))
    return torch.stack(moved, dim=1)


@torch.no_grad()
def permute(model: WordClassifier, ids: Tensor, draws: int, seed: int) -> float:
    """The median over texts of how far answers move if the weights change places."""
    probabilities, weights = outputs_of(model, ids)
    generator = torch.Generator().manual_seed(seed)
    moved = []
    for _ in range(draws):
        chance = torch.rand(weights.shape, generator=generator).to(weights)
        # Padding stays at the end, where its weights are zero.
        order = (chance + (ids == PADDING).unsqueeze(1)).argsort(-1)
        answers, _ = outputs_of(model, ids, weights.gather(-1, order))
        moved.append(total_variation(answers, probabilities))
    return float(torch.stack(moved).median(0).values.median())


def find_adversaries(model: WordClassifier, ids: Tensor, settings: Settings, seed: int) -> Values:
    """Weights as far from the model's own as a search finds, while answers stay within 0.01."""
    with torch.no_grad():
        states = model.states(model.embedding(ids), ids)
        own = model.weights(states, ids)
        probabilities = model.answer(states, own).softmax(-1)
    hidden = (ids == PADDING).unsqueeze(1)
    generator = torch.Generator().manual_seed(seed)
    away = -own.clamp(min=1e-6).log()
    chance = 3 * torch.randn(own.shape, generator=generator).to(own)
    farthest = torch.zeros(len(ids), device=ids.device)
    for start in (away, chance):
        scores = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([scores], lr=0.1)
        for _ in range(settings["search_steps"]):
            weights = scores.masked_fill(hidden, -1e9).softmax(-1)
            moved = total_variation(model.answer(states, weights).softmax(-1), probabilities)
            far = divergence(weights, own)
            farthest = torch.where((moved <= WITHIN) & (far > farthest), far.detach(), farthest)
            loss = (PENALTY * (moved - WITHIN).clamp(min=0) - far).sum()
            # Only the weights are searched for.
            [scores.grad] = torch.autograd.grad(loss, [scores])
            optimizer.step()
    return {
        "divergence": float(farthest.mean()),
        "far": float((farthest > MAX_DIVERGENCE / 2).float().mean()),
    }
