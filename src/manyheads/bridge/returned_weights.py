"""Attention weights that modules of `transformers` return: the slower way, if none dispatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.bridge.padded_call import PaddedCall

ATTENTIONS = "attentions"
AXES = tuple(permutations(range(4)))


@dataclass(frozen=True, slots=True)
class WeightsOutput:
    """Where a module returns its weights: an item of a tuple, and the order of its axes."""

    item: int
    axes: tuple[int, ...]

    def read(self, output: Any) -> Float[Tensor, "b h n m"] | None:
        if not isinstance(output, tuple) or len(output) <= self.item:
            return None
        weights = output[self.item]
        return weights.permute(self.axes) if isinstance(weights, Tensor) else None


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedTensor:
    """A tensor of four axes that a module returned, beside its hidden states.

    `leaves` are the modules without children that ran inside, as a range of those of the probe;
    `around` are the layers that were running.
    """

    module: nn.Module
    item: int
    tensor: Tensor
    hidden: Tensor
    leaves: range
    around: tuple[Any, ...]
    memory: bool


def find_weights(
    returned: Sequence[ReturnedTensor], output: Any
) -> Iterator[tuple[ReturnedTensor, WeightsOutput, Float[Tensor, "b h n m"]]]:
    """The innermost modules that returned the attention weights of a model's output, in order."""
    missing = [weights for weights in _attentions(output) if _is_pattern(weights)]
    matched: set[int] = set()
    for call in returned:
        if id(call.tensor) in matched:
            # A module around it passes on the same tensor.
            continue
        for index, weights in enumerate(missing):
            axes = _axes(call.tensor, weights)
            if axes is not None and weights.shape[2] in call.hidden.shape[:2]:
                matched.add(id(call.tensor))
                del missing[index]
                yield call, WeightsOutput(call.item, axes), weights
                break


def _attentions(output: Any) -> Iterator[Tensor]:
    """All weights in the output of a model, also those of its towers."""
    for name, value in output.items() if isinstance(output, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _attentions(value)
        elif name.endswith(ATTENTIONS) and isinstance(value, tuple):
            yield from (weights for weights in value if isinstance(weights, Tensor))


def _is_pattern(weights: Tensor) -> bool:
    """Whether each row sums to one; those of windows and blocks have other axes."""
    return weights.dim() == 4 and bool(((weights.float().sum(-1) - 1).abs() < 1e-2).all())


def _axes(tensor: Tensor, weights: Tensor) -> tuple[int, ...] | None:
    for axes in AXES:
        shape = tuple(tensor.shape[axis] for axis in axes)
        if shape == weights.shape and torch.equal(tensor.permute(axes), weights):
            return axes
    return None


def mixed_values(
    weights: Float[Tensor, "b h n m"], products: Sequence[Tensor]
) -> Iterator[Float[Tensor, "b n hd"]]:
    """The head outputs, side by side, if one of these products of linear layers has the values."""
    heads, keys = weights.shape[1], weights.shape[3]
    for product in products:
        if product.dim() != 3 or product.shape[1] != keys or product.shape[0] != len(weights):
            continue
        for parts in (1, 3):
            if product.shape[-1] % (parts * heads):
                continue
            # Queries, keys and values of one product are side by side, or those of each head.
            whole = product.unflatten(-1, (parts, heads, -1))[:, :, -1]
            by_head = product.unflatten(-1, (heads, parts, -1))[:, :, :, -1]
            for values in (whole, by_head) if parts > 1 else (whole,):
                mixed = torch.einsum("bhnm,bmhd->bnhd", weights.to(values), values)
                yield mixed.flatten(2)


def weights_call(weights: Float[Tensor, "b h n m"], size: int) -> PaddedCall:
    """A call whose softmax gives these weights: their logarithms are added to scores of zero."""
    batch, heads, queries, keys = weights.shape
    scores = weights.float().log().clamp(min=torch.finfo(torch.float32).min)
    zero = scores.new_zeros(())
    query, key = (zero.expand(batch, heads, count, size) for count in (queries, keys))
    return PaddedCall(query=query, key=key, value=key, mask=scores, scale=1.0)
