"""The time step dt of a recurrent mixer: how much of a token it takes in."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

DT_RANGE = (1e-3, 1e-1)


def draw_dt_bias(count: int) -> Float[Tensor, " count"]:
    """Biases whose softplus, the first dt, is spread evenly on a logarithmic scale."""
    low, high = (math.log(bound) for bound in DT_RANGE)
    dt = torch.empty(count).uniform_(low, high).exp()
    # The inverse of softplus.
    return dt + torch.log(-torch.expm1(-dt))
