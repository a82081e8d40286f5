"""Linear maps of odd sizes, widened so that fast products take them."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["aligned"]

# Products of half numbers on CUDA are several times slower where rows of the result do not begin at
# multiples of 16 bytes.
ROUND = 8
# To widen a matrix is to copy it, which only many tokens pay for.
MANY = 64


def aligned(linear: nn.Module, x: Float[Tensor, "n c"]) -> Float[Tensor, "n rows"]:
    """What `linear(x)` is, by a matrix with rows of zeros added where that is faster."""
    spare = -linear.out_features % ROUND if type(linear) is nn.Linear else 0
    if not spare or not x.is_cuda or x.shape[0] < MANY:
        y: Tensor = linear(x)
        return y
    return widened(linear, x, spare)


def widened(linear: nn.Module, x: Float[Tensor, "n c"], spare: int) -> Float[Tensor, "n rows"]:
    """What `linear(x)` is, as a view of what a matrix with `spare` more rows gives."""
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else F.pad(linear.bias, (0, spare))
    y = F.linear(x, F.pad(linear.weight, (0, 0, 0, spare)), bias)
    return y[:, : linear.out_features]
