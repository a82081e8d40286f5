"""ALiBi: scores fall linearly with distance, at a slope of its own for each head."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Alibi", "AlibiBias"]


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (arXiv 2108.12409); symmetric where a query looks ahead.

    >>> Alibi().slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """

    def slopes(self, heads: int) -> tuple[float, ...]:
        """The published slopes: a geometric series, filled from the next one for odd counts."""
        power = 2 ** math.floor(math.log2(heads))
        series = [2 ** (-8 * (index + 1) / power) for index in range(power)]
        finer = [2 ** (-4 * (index + 1) / power) for index in range(2 * power)]
        return tuple(series + finer[0::2][: heads - power])

    def bias(self, heads: int, device: torch.device) -> "AlibiBias":
        return AlibiBias(self._slopes_on(device, heads))

    def _slopes_on(self, device: torch.device, heads: int) -> Float[Tensor, " h"]:
        """The slopes worked out where they are used: a recorded step cannot copy from the host."""
        power = 2 ** math.floor(math.log2(heads))
        # Only Apple's devices lack float64, which rounds as the published series does.
        wide = torch.float32 if device.type == "mps" else torch.float64
        head = torch.arange(heads, device=device, dtype=wide)
        series = -8 / power * (head + 1)
        finer = -4 / power * (2 * (head - power) + 1)
        return torch.where(head < power, series, finer).exp2().float()


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """The slopes as a kernel reads them."""

    slopes: Float[Tensor, " h"]

    @property
    def requires_grad(self) -> bool:
        return self.slopes.requires_grad

    def score(
        self,
        head: Int[Tensor, "*#at"],
        row: Int[Tensor, "*#at"],  # noqa: ARG002, one signature for all biases
        query: Int[Tensor, "*#at"],
        key: Int[Tensor, "*#at"],
    ) -> Float[Tensor, "*#at"]:
        return -self.slopes[head] * (query - key).abs()
