"""Which device is meant."""

import torch

from manyheads.errors import InputError

__all__ = ["device_of"]


def device_of(asked: str, option: str = "device") -> torch.device:
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
