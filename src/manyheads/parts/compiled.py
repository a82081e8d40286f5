"""Where kernels of our own are worth it: a training step that is compiled for CUDA."""

from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["learns_compiled"]

HAS_TRITON = find_spec("triton") is not None


def learns_compiled(x: Tensor) -> bool:
    """Whether these numbers pass through such a step; the kernels compute in float32."""
    learns = torch.compiler.is_compiling() and torch.is_grad_enabled()
    return learns and x.is_cuda and x.dtype != torch.float64 and HAS_TRITON
