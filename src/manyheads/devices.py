"""Devices by name, and what a device can do."""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from manyheads.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def resolve_device(name: str, option: str = "device") -> torch.device:
    """The device that an option names; "auto" is CUDA if torch finds it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{option} must be auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{option} is {name!r}, and torch finds no CUDA device", "use cpu")
    return device


def check_memory(size: int, what: str, remedy: str, device: torch.device | str = "cpu") -> None:
    """Refuse what takes more bytes than the device has, before memory is asked for.

    >>> check_memory(10**18, "10**18 tokens", "use fewer")
    Traceback (most recent call last):
    manyheads.errors.InputError: 10**18 tokens take 1,000,000,000 GB, and cpu has ...
    """
    device = torch.device(device)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    elif device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if size > total:
        needed, free = (f"{count / 1e9:,.0f} GB" for count in (size, total))
        raise InputError(f"{what} take {needed}, and {device} has {free}", remedy)


HAS_TRITON = find_spec("triton") is not None


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """A recurrence sums up long texts: products of float32 stay in float32 also under autocast.

    The first argument is a tensor, whose device counts.
    """

    @functools.wraps(function)
    def call(*values: P.args, **options: P.kwargs) -> R:
        first: Any = values[0]
        with torch.autocast(first.device.type, enabled=False):
            return function(*values, **options)

    return call


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels can compute with `x`; they do it in float32."""
    return has_triton_kernels(x) and not torch.compiler.is_compiling()


def triton_precision(x: Tensor) -> str:
    """How kernels multiply matrices of such numbers.

    Three products of tensor cores together come about as close as one of float32.
    """
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


def has_triton_kernels(x: Tensor) -> bool:
    """Whether Triton kernels run on the device of `x`, compiled or not; they compute in float32."""
    if not (x.is_cuda and x.dtype != torch.float64 and HAS_TRITON):
        return False
    # Triton starts kernels on the current device.
    return torch.compiler.is_compiling() or x.device.index == torch.cuda.current_device()


def trains_compiled(x: Tensor) -> bool:
    """Whether `x` is in a compiled training step on CUDA; the Triton kernels compute in float32."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and has_triton_kernels(x)
