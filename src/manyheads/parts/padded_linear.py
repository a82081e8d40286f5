"""Joined linear maps of odd sizes, widened so that fast kernels take them."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

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
