"""Which device is meant."""

from importlib.util import find_spec

import torch
from torch import Tensor

from manyheads.errors import InputError


def resolve_device(asked: str, option: str = "device") -> torch.device:
    """The device of a name that an option was given; "auto" is CUDA where torch finds it."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise InputError(f"there is no device {asked!r}", "use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{option} is {asked!r} and torch finds no CUDA device", "use cpu")
    return device


HAS_TRITON = find_spec("triton") is not None


def trains_compiled(x: Tensor) -> bool:
    """Whether these numbers pass through such a step; the kernels compute in float32."""
    learns = torch.compiler.is_compiling() and torch.is_grad_enabled()
    return learns and x.is_cuda and x.dtype != torch.float64 and HAS_TRITON
