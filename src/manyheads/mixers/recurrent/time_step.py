"""The time step dt of a recurrent mixer: how much of a token it takes in."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.devices import runs_triton

DT_RANGE = (1e-3, 1e-1)


def draw_dt_bias(count: int) -> Float[Tensor, " count"]:
    """Biases whose softplus, the first dt, is spread evenly on a logarithmic scale."""
    low, high = (math.log(bound) for bound in DT_RANGE)
    dt = torch.empty(count).uniform_(low, high).exp()
    # The inverse of softplus.
    return dt + torch.log(-torch.expm1(-dt))


def log_decay(
    dt: Float[Tensor, "n c"],
    dt_bias: Float[Tensor, " c"],
    A_log: Float[Tensor, " h"],
    *,
    by_triton: bool | None = None,
) -> Float[Tensor, "n c"]:
    """-exp(A_log) softplus(dt + dt_bias) in float32, for the channels of all heads side by side.

    On CUDA one kernel does it in a single pass over memory, unless `by_triton` says otherwise.
    """
    if by_triton is None:
        by_triton = runs_triton(dt) and dt.numel() > 0
    if by_triton:
        from manyheads.mixers.kernels.triton_time_step import log_decay_of_tokens

        return log_decay_of_tokens(dt, dt_bias, A_log)
    rate = A_log.float().exp().repeat_interleave(dt.shape[1] // A_log.shape[0])
    return -rate * F.softplus(dt.float() + dt_bias.float())
