"""A model that drops nothing for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped inside the block; each part is put back into the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
