"""Gates that closed heads in training become part of the weights: a saved model needs none."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.models.stack import Stack
from manyheads.taps import Site, Sublayer
from manyheads.train.hard_concrete import HeadGates, settled
from manyheads.train.regularisers import GATES

__all__ = ["final_gates", "folded"]


def final_gates(model: nn.Module) -> Mapping[Site, Float[Tensor, " h"]]:
    """What each head's L0 gate came to, from 0 (closed) to 1, by layer; none without gates.

    The value of a hard concrete gate at test time (arXiv 1712.01312): nothing is drawn.

    >>> from manyheads.models.build import build
    >>> final_gates(build("gpt2", layers=1, width=32, heads=2, vocabulary=50))
    {}
    """
    gates = getattr(model, GATES, None)
    return gates.settled() if isinstance(gates, HeadGates) else {}


def folded(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model without the gates that were trained along, doing what they did.

    A gate scales what a head says, so it goes into the columns by which the output projection reads
    that head. The given weights stay as they are.
    """
    found = {name: each for name, each in weights.items() if not name.startswith(f"{GATES}.")}
    gates = getattr(model, GATES, None)
    if not isinstance(gates, HeadGates):
        return found
    stacks = {each.name: name for name, each in model.named_modules() if isinstance(each, Stack)}
    for index, (site, heads, _) in enumerate(gates.sites):
        part = "cross" if site.sublayer is Sublayer.CROSS else "attention"
        name = f"{stacks[site.stack]}.layers.{site.layer}.{part}.output.weight"
        gate = settled(weights[f"{GATES}.openness.{index}"])
        columns = torch.repeat_interleave(gate, found[name].shape[1] // heads)
        found[name] = found[name] * columns.to(found[name])
    return found
