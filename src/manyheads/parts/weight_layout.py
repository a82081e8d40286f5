"""Weights laid out for the processor's matrix products while many tokens pass through them."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Below this the copy costs more than it saves; above, it would take too much memory.
FEWEST_TOKENS = 2048
MOST_BYTES = 2**30


@contextmanager
def relaid(module: nn.Module, tokens: int, *tables: Tensor) -> Iterator[None]:
    """Linear weights stored column by column inside the block, as they were after it.

    The products on ARM processors bring a weight into blocks at every call, and from rows that
    takes a tenth of the whole time. Values and shapes stay the same. `tables` are weights of other
    modules that are multiplied too, such as the vectors of words that are read out.
    """
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        if tokens >= FEWEST_TOKENS and platform.machine() == "aarch64":
            for weight in _worth_it(module, tables):
                changed.append((weight, weight.data))
                weight.data = weight.data.T.contiguous().T
        yield
    finally:
        for weight, data in changed:
            weight.data = data


def _worth_it(module: nn.Module, tables: Iterable[Tensor]) -> list[Tensor]:
    linear = [each.weight for each in module.modules() if type(each) is nn.Linear]
    weights: list[Tensor] = [
        weight
        for weight in dict.fromkeys((*linear, *tables))
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    ]
    return weights if sum(weight.nbytes for weight in weights) <= MOST_BYTES else []
