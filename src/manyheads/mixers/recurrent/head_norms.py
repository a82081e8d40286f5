"""Norms of recurrent heads: keys of length one, and outputs that are normed and gated.

All compute in float32; on CUDA one kernel does it in a single pass over memory.
"""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.devices import runs_triton

# Keys and queries have length one, up to this.
EPS = 1e-6
# Numbers of a row that the kernel takes: it keeps a row whole.
LARGEST_OF_TRITON = 8192


def unit(
    x: Float[Tensor, "n h d"], scale: float = 1.0, *, by_triton: bool | None = None
) -> Float[Tensor, "n h d"]:
    """Vectors of length `scale`, as keys and queries of delta nets are."""
    if _kernel_takes(x) if by_triton is None else by_triton:
        from manyheads.mixers.kernels.triton_norms import norm_with_gate

        # The length is the root of the sum of squares, a norm takes that of their mean.
        size = x.shape[-1]
        return norm_with_gate(x, eps=EPS / size, scale=scale * size**-0.5)
    wide = x.float()
    return (wide * (scale * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt())).to(x.dtype)


def gated_norm(
    x: Float[Tensor, "n h d"],
    gate: Float[Tensor, "n h d"],
    weight: Float[Tensor, " d"],
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
    *,
    gate_first: bool = False,
    by_triton: bool | None = None,
) -> Float[Tensor, "n h d"]:
    """The norm of every head, then its gate; or `gate_first`, then the norm."""
    if _kernel_takes(x) if by_triton is None else by_triton:
        from manyheads.mixers.kernels.triton_norms import norm_with_gate

        return norm_with_gate(
            x, gate, weight, eps=eps, activation=activation, gate_first=gate_first
        )
    wide, opened = x.float(), getattr(F, activation)(gate.float())
    wide = wide * opened if gate_first else wide
    normed = F.rms_norm(wide, wide.shape[-1:], weight.float(), eps)
    return (normed if gate_first else normed * opened).to(x.dtype)


def _kernel_takes(x: Tensor) -> bool:
    return runs_triton(x) and x.numel() > 0 and x.shape[-1] <= LARGEST_OF_TRITON
