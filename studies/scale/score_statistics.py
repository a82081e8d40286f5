"""What the softmax of every layer receives: variance of the scores, entropy, gradients."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import Record, Site, Tap
from manyheads.models import Decoder


@torch.no_grad()
def draw_unit_variance(model: Decoder, query_scale: float = 1.0) -> None:
    """Draw the projections so that queries and keys of normed tokens have variance 1.

    `query_scale` multiplies the weights of the queries.
    """
    layers: Any = model.stack.layers
    for layer in layers:
        rows = layer.attention.projections()
        deviation = layer.attention.config.width**-0.5
        rows["query"].normal_(std=deviation * query_scale)
        rows["key"].normal_(std=deviation)


def measure_scores(model: Decoder, passages: Tensor) -> dict[str, float]:
    """Means over layers and heads on passages [b t + 1], in float32.

    - variance: of the scores of a head, over all queries and the keys that they see
    - entropy: of a query's weights, over the logarithm of the number of keys
    - largest: the largest weight of a query
    - softmax gradient: the sum of all |dp_i / ds_j| of a query, which is 2 (1 - sum of p^2)
    - score gradient: the norm of the gradient of the loss at the scores of a layer
    - weight gradient: its norm at the projections of queries and keys of all layers
    """
    sites = [Site(layer, Tap.SCORES) for layer in range(len(model.stack.layers))]
    record = Record(sites)
    model.zero_grad()
    logits = model(passages[:, :-1], watch=record).logits
    assert isinstance(logits, Tensor)
    for site in sites:
        for scores in record[site].each:
            scores.retain_grad()
    loss = F.cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())
    loss.backward()
    layers = [_of_layer(record[site].each) for site in sites]
    values = {name: _mean([layer[name] for layer in layers]) for name in layers[0]}
    values["weight gradient"] = _query_key_gradient(model)
    values["loss"] = float(loss.detach())
    model.zero_grad(set_to_none=True)
    return values


def _of_layer(by_text: tuple[Tensor, ...]) -> dict[str, float]:
    scores = torch.stack([each.detach() for each in by_text])
    gradient = torch.stack([each.grad for each in by_text if each.grad is not None])
    tokens = scores.shape[-1]
    row, column = torch.tril_indices(tokens, tokens, device=scores.device)
    # The first query sees only itself.
    weights = scores.softmax(-1)[:, :, 1:]
    visible = torch.arange(2, tokens + 1, device=scores.device)
    entropy = torch.special.entr(weights).sum(-1) / visible.log()
    return {
        "variance": float(scores[:, :, row, column].var(dim=(0, 2)).mean()),
        "entropy": float(entropy.mean()),
        "largest": float(weights.amax(-1).mean()),
        "softmax gradient": float(2 * (1 - weights.square().sum(-1)).mean()),
        "score gradient": float(gradient.norm()),
    }


def _query_key_gradient(model: Decoder) -> float:
    layers: Any = model.stack.layers
    squares = 0.0
    for layer in layers:
        rows = layer.attention.our_rows
        gradient = layer.attention.project.weight.grad[: rows["query"] + rows["key"]]
        squares += float(gradient.square().sum())
    return math.sqrt(squares)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
