"""Linear maps of odd sizes, widened so that fast products take them."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["aligned"]

# Products of half numbers on CUDA are several times slower where rows of the result do not begin at
# multiples of 16 bytes; a compiler widens results by itself to multiples of 128, and loses the way
# to add a bias for free.
ROUND = 64
# To widen a matrix is to copy it, which only many tokens pay for.
MANY = 64


def aligned(linear: nn.Module, x: Float[Tensor, "n c"]) -> Float[Tensor, "n rows_and_spare"]:
    """What `linear(x)` is, perhaps with columns of zeros behind it where that is faster."""
    spare = -linear.out_features % ROUND if type(linear) is nn.Linear else 0
    if not spare or not x.is_cuda or x.shape[0] < MANY:
        y: Tensor = linear(x)
        return y
    return widened(linear, x, spare)


def widened(
    linear: nn.Module, x: Float[Tensor, "n c"], spare: int
) -> Float[Tensor, "n rows_and_spare"]:
    """What `linear(x)` is, with so many columns of zeros behind it."""
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else F.pad(linear.bias, (0, spare))
    return F.linear(x, F.pad(linear.weight, (0, 0, 0, spare)), bias)
