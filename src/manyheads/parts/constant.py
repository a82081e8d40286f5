"""What is left of a sublayer that has nothing more to read: the same words to every token."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A learned vector, written to every token alike.

    An attention whose heads are all taken away still writes the bias of its output projection.
    """

    width: int


class ConstantLayer(nn.Module):
    """The vector itself."""

    def __init__(self, config: Constant) -> None:
        super().__init__()
        self.config = config
        self.vector = nn.Parameter(torch.zeros(config.width))

    def forward(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return self.vector.to(x.dtype).expand_as(x)
