"""The pace at which a recurrent mixer reads: how much of a token it takes in."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

FIRST_PACE = (1e-3, 1e-1)


def draw_pace_bias(count: int) -> Float[Tensor, " count"]:
    """Biases after whose softplus paces are spread evenly on a logarithmic scale."""
    low, high = (math.log(bound) for bound in FIRST_PACE)
    pace = torch.empty(count).uniform_(low, high).exp()
    # The inverse of softplus.
    return pace + torch.log(-torch.expm1(-pace))
