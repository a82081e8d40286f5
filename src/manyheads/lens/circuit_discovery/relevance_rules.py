"""Backward passes by the rules of relevance propagation (RelP, arXiv 2508.21258)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.parts import norms
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.ragged import Ragged
from manyheads.taps import Tap, WatchContext, observe

# Below it an activation is divided by this instead.
SMALL = 1e-6


@contextmanager
def relevance_rules(model: nn.Module) -> Iterator[None]:
    """Inside the block outputs stay the same, and gradients follow the rules.

    The divisors of norms are constants, an activation is a factor, and each factor of a gated
    product gets half. That the weights of attention are constants too, the caller sees to.
    """
    rules: dict[type, Callable[..., Tensor]] = {
        norms.Normalize: _norm,
        FeedForward: _feedforward,
    }
    changed = [module for module in model.modules() if type(module) in rules]
    try:
        for module in changed:
            module.__dict__["forward"] = partial(rules[type(module)], module)
        yield
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


def _norm(module: norms.Normalize, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    if isinstance(module.config, norms.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    divisor = (x.square().mean(-1, keepdim=True) + module.config.eps).sqrt().detach()
    gain = module.weight + 1 if module.config.centered else module.weight
    normed = x / divisor * gain
    return normed if module.bias is None else normed + module.bias


def _feedforward(
    module: FeedForward,
    x: Float[Tensor, "n c"],
    like: Ragged,
    context: WatchContext | None = None,
) -> Float[Tensor, "n c"]:
    expanded = module.expand(x)
    if module.gated:
        gate, passed = expanded.chunk(2, dim=-1)
        opened = _as_factor(module, gate)
        inside = (opened * passed.detach() + opened.detach() * passed) / 2
    else:
        inside = _as_factor(module, expanded)
    inside = observe(context, Tap.INSIDE, inside, like)
    return module.contract(inside)


def _as_factor(module: FeedForward, x: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
    """The activation of x as x times a constant."""
    divisor = torch.where(x.abs() < SMALL, torch.full_like(x, SMALL), x)
    return x * (ACTIVATIONS[module.config.activation](x) / divisor).detach()
