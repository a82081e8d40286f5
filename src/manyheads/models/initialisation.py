"""The initialisation of weights."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.models.embedding import TokenEmbedding
from manyheads.models.readout import ReadoutLayer
from manyheads.models.stack import Stack
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialisation:
    """How weights are drawn; biases start at zero and norms at one.

    `truncated` truncates the normal at two standard deviations, as in BERT, ViT and ModernBERT.
    `xavier` draws uniformly by fan-in and fan-out, and embeddings with deviation width^-0.5, as in
    the 2017 Transformer. `scaled_outputs` divides projections to the residual stream by
    sqrt(2 * layers), as in GPT-2. `zero_readout` starts the readout at zero, as in ViT.
    """

    draw: Literal["normal", "truncated", "xavier"] = "normal"
    std: float = 0.02
    scaled_outputs: bool = False
    zero_readout: bool = False


@torch.no_grad()
def initialise(model: nn.Module, init: Initialisation) -> None:
    """Initialise every weight of the model."""
    for module in model.modules():
        match module:
            case nn.Linear() | nn.Conv2d():
                _draw(module.weight.flatten(1), init)
            case TokenEmbedding():
                _draw_embedding(module, init)
            case MixtureOfExperts():
                for weights in (module.expand, module.contract):
                    _draw_experts(weights, init)
            case ReadoutLayer() if module.weight is not None:
                _draw(module.weight, init)
                if init.zero_readout:
                    module.weight.zero_()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            module.bias.zero_()
    for module in model.modules():
        if isinstance(module, Attention):
            _draw_rows(module, init)
        if isinstance(module, Stack) and init.scaled_outputs:
            _scale_outputs(module)


def _draw(weight: Tensor, init: Initialisation) -> None:
    match init.draw:
        case "normal":
            nn.init.normal_(weight, std=init.std)
        case "truncated":
            nn.init.trunc_normal_(weight, std=init.std, a=-2 * init.std, b=2 * init.std)
        case "xavier":
            nn.init.xavier_uniform_(weight)


def _draw_experts(weights: Tensor, init: Initialisation) -> None:
    """All experts at once, unless the draw depends on the fan-in: 128 draws take longer."""
    for weight in weights if init.draw == "xavier" else (weights,):
        _draw(weight, init)


def _draw_rows(attention: Attention, init: Initialisation) -> None:
    """Queries, keys and values are one matrix, but are drawn as three."""
    for rows in attention.projections().values():
        _draw(rows, init)


def _draw_embedding(embedding: TokenEmbedding, init: Initialisation) -> None:
    std = embedding.config.width**-0.5 if init.draw == "xavier" else init.std
    normal = Initialisation(draw="truncated" if init.draw == "truncated" else "normal", std=std)
    for table in (embedding.tokens, embedding.positions, embedding.types):
        if table is not None:
            _draw(table.weight, normal)


def _scale_outputs(stack: Stack) -> None:
    shrink = 1 / math.sqrt(2 * max(len(stack.config.layers), 1))
    for module in stack.modules():
        if isinstance(module, Attention):
            module.output.weight.mul_(shrink)
        elif isinstance(module, FeedForward):
            module.contract.weight.mul_(shrink)
        elif isinstance(module, MixtureOfExperts):
            module.contract.mul_(shrink)
