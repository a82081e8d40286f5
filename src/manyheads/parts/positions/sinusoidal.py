"""Sines and cosines of falling frequency, added to the embedding (arXiv 1706.03762)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import ConfigError

__all__ = ["Sinusoidal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinusoidal:
    """Position p becomes sin(p / theta^(2i/c)) and cos of the same.

    `interleaved` alternates sine and cosine as the paper does; `halves` puts all sines first, as
    Marian does.

    >>> Sinusoidal().vectors(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    >>> Sinusoidal(layout="halves").vectors(torch.tensor([0]), 4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """

    layout: Literal["interleaved", "halves"] = "interleaved"
    theta: float = 10_000.0

    def vectors(self, positions: Int[Tensor, " n"], width: int) -> Float[Tensor, "n c"]:
        if width % 2:
            raise ConfigError(
                f"width={width} cannot hold pairs of sine and cosine", "choose an even width"
            )
        channel = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
        angles = positions.unsqueeze(1) * self.theta ** (-channel / width)
        pair = (angles.sin().float(), angles.cos().float())
        if self.layout == "halves":
            return torch.cat(pair, dim=1)
        return torch.stack(pair, dim=2).flatten(1)
