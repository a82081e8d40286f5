"""Linear weights laid out for fast matrix products: column-major on ARM, padded on CUDA."""

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# Below this the copy costs more than it saves; above, it would take too much memory.
FEWEST_TOKENS = 2048
MOST_BYTES = 2**30


@contextmanager
def column_major_weights(module: nn.Module, tokens: int, *tables: Tensor) -> Iterator[None]:
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


# Products of half numbers on CUDA are slow where rows of the result do not begin at multiples of 16
# bytes: twelve rows for a gate made a step of GPT-2 11 % longer on an H200, 3 % when widened. Those
# that are no multiple of 128 bytes a compiler widens by itself, and then adds a bias by a pass of
# its own, so that few rows are widened to that.
EVEN, ROUND = 8, 64
# To widen a matrix is to copy it, which only many tokens pay for.
MANY = 64


def split_map(
    linear: nn.Module, x: Float[Tensor, "n c"], rows: Mapping[str, int]
) -> dict[str, Float[Tensor, "n rows"]]:
    """The parts of `linear(x)` by name, which has so many rows for each."""
    odd = any(_wide(size) > size for size in rows.values())
    if odd and x.is_cuda and type(linear) is nn.Linear and x.shape[0] >= MANY:
        return split_wide(linear, x, rows)
    return dict(zip(rows, linear(x).split(list(rows.values()), dim=-1), strict=True))


def split_wide(
    linear: nn.Linear, x: Float[Tensor, "n c"], rows: Mapping[str, int]
) -> dict[str, Float[Tensor, "n rows"]]:
    """The same, by a matrix with rows of zeros behind each part of an odd size."""
    sizes = list(rows.values())
    wide = [_wide(size) for size in sizes]
    weight = _widened(linear.weight, sizes, wide)
    bias = None if linear.bias is None else _widened(linear.bias, sizes, wide)
    parts = F.linear(x, weight, bias).split(wide, dim=-1)
    return {name: part[:, : rows[name]] for name, part in zip(rows, parts, strict=True)}


def _wide(size: int) -> int:
    fine = size % EVEN == 0 and size > ROUND
    return size if fine else size + -size % ROUND


def _widened(values: Tensor, sizes: list[int], wide: list[int]) -> Tensor:
    parts = values.split(sizes)
    empty = (0, 0) * (values.dim() - 1)
    return torch.cat(
        [F.pad(part, (*empty, 0, w - part.shape[0])) for part, w in zip(parts, wide, strict=True)]
    )
