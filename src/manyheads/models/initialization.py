"""The initialization of weights."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.models.embedding import TokenEmbedding
from manyheads.models.readout import LanguageHead, ReadoutLayer, TransformLayer
from manyheads.models.stack import Stack
from manyheads.parts import experts, feedforward
from manyheads.parts.positions.absolute import GridTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialization:
    """How weights are drawn; biases start at zero and norms at one.

    - `normal` has the deviation `std` everywhere, as BERT, GPT-2, Llama and ViT in `transformers`.
    - `truncated` is cut at two deviations, and class heads have the deviation width^-0.5, as in
      ModernBERT.
    - `xavier` draws uniformly by fan-in and fan-out, and embeddings with deviation width^-0.5, as
      in the 2017 Transformer.
    - `t5` draws with deviation fan_in^-0.5, queries smaller by the root of the head size because
      scores are not scaled, and embeddings and an untied language head with deviation 1.

    `scaled_outputs` divides projections to the residual stream by sqrt(2 * layers), as in GPT-2 and
    ModernBERT, which also divides its language head. `zero_readout` starts the readout at zero,
    which slows down the first steps of training from scratch.
    """

    draw: Literal["normal", "truncated", "xavier", "t5"] = "normal"
    std: float = 0.02
    scaled_outputs: bool = False
    zero_readout: bool = False


@torch.no_grad()
def initialize(model: nn.Module, init: Initialization) -> None:
    """Initialize every weight of the model; on the meta device there are none to draw."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        match module:
            case nn.Linear() | nn.Conv1d() | nn.Conv2d():
                _draw(module.weight.flatten(1), init)
            case TokenEmbedding():
                for table in (module.tokens, module.positions, module.types):
                    if table is not None:
                        _draw_table(table.weight, init)
            case experts.MixtureOfExperts():
                # All experts at once, unless the draw depends on the fan-in: 128 draws take longer.
                at_once = init.draw in ("normal", "truncated")
                for weights in (module.expand, module.contract):
                    for weight in (weights,) if at_once else weights.mT:
                        _draw(weight, init)
            case GridTable():
                _draw_table(module.patches.flatten(1), init)
            case ReadoutLayer() if module.weight is not None:
                _draw_readout(module, init)
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.bias is not None:
            module.bias.zero_()
        if isinstance(token := getattr(module, "class_token", None), Tensor):
            _draw_table(token[None], init)
    for module in model.modules():
        if isinstance(module, Attention):
            _draw_attention(module, init)
        if isinstance(module, Stack) and init.scaled_outputs:
            _scale_outputs(module)
    if init.scaled_outputs and init.draw == "truncated":
        _scale_language_heads(model)


def _draw(weight: Tensor, init: Initialization) -> None:
    match init.draw:
        case "normal":
            nn.init.normal_(weight, std=init.std)
        case "truncated":
            nn.init.trunc_normal_(weight, std=init.std, a=-2 * init.std, b=2 * init.std)
        case "xavier":
            nn.init.xavier_uniform_(weight)
        case "t5":
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def _draw_attention(attention: Attention, init: Initialization) -> None:
    """Queries, keys and values are one matrix, but are drawn as three."""
    for name, rows in attention.projections().items():
        _draw(rows, init)
        if init.draw == "t5" and name == "query":
            rows.mul_(attention.config.size**-0.5)
    if attention.table is not None:
        by_width = Initialization(std=attention.config.width**-0.5)
        for table in attention.table.parameters(recurse=False):
            _draw(table, by_width if init.draw == "t5" else Initialization(std=init.std))


def _draw_table(table: Tensor, init: Initialization) -> None:
    """Vectors that are looked up have no fan-in."""
    std = {"xavier": table.shape[1] ** -0.5, "t5": 1.0}.get(init.draw, init.std)
    draw: Literal["normal", "truncated"] = "truncated" if init.draw == "truncated" else "normal"
    _draw(table, Initialization(draw=draw, std=std))


def _draw_readout(readout: ReadoutLayer, init: Initialization) -> None:
    assert readout.weight is not None
    if isinstance(readout.config, LanguageHead) and init.draw == "t5":
        nn.init.normal_(readout.weight, std=1.0)
    elif not isinstance(readout.config, LanguageHead) and init.draw == "truncated":
        _draw(readout.weight, Initialization(draw="truncated", std=readout.weight.shape[1] ** -0.5))
    else:
        _draw(readout.weight, init)
    if init.zero_readout:
        readout.weight.zero_()


def _scale_outputs(stack: Stack) -> None:
    shrink = _shrink(stack)
    for module in stack.modules():
        if isinstance(module, Attention):
            module.output.weight.mul_(shrink)
        elif isinstance(module, feedforward.FeedForward):
            module.contract.weight.mul_(shrink)
        elif isinstance(module, experts.MixtureOfExperts):
            module.contract.mul_(shrink)


def _scale_language_heads(model: nn.Module) -> None:
    shrink = min(_shrink(stack) for stack in model.modules() if isinstance(stack, Stack))
    for module in model.modules():
        if isinstance(module, TransformLayer):
            module.dense.weight.mul_(shrink)
        elif isinstance(module, ReadoutLayer) and isinstance(module.config, LanguageHead):
            for untied in module.parameters(recurse=False):
                untied.mul_(shrink)


def _shrink(stack: Stack) -> float:
    return 1 / math.sqrt(2 * max(len(stack.config.layers), 1))
