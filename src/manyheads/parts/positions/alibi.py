"""ALiBi: scores decrease linearly with distance, with one slope per head."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError

# Heads, rows of queries and positions, elementwise, and the scores there.
At = Int[Tensor, "*#at"]
Scores = Float[Tensor, "*#at"]


@check_fields
@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (arXiv 2108.12409), symmetric if a query sees later tokens.

    After pruning, `indices` are those of the remaining heads among `total` original ones, whose
    slopes stay the same.

    >>> Alibi().slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> Alibi(indices=(0, 3), total=4).slopes(2)
    (0.25, 0.00390625)
    """

    indices: tuple[int, ...] = ()
    total: int = 0

    def __post_init__(self) -> None:
        if any(not 0 <= head < self.total for head in self.indices):
            raise ConfigError(f"indices must be heads below total={self.total}, got {self.indices}")

    def select(self, heads: Sequence[int], total: int) -> "Alibi":
        """The bias of only these of `total` heads, with the slopes they have."""
        indices = tuple(self.indices[head] for head in heads) if self.indices else tuple(heads)
        return Alibi(indices, self.total if self.indices else total)

    def slopes(self, heads: int) -> tuple[float, ...]:
        """The published slopes: a geometric series, with values of the next for other counts."""
        if self.indices:
            if len(self.indices) != heads:
                raise ConfigError(
                    f"indices must have heads={heads} entries, got {len(self.indices)}"
                )
            published = Alibi().slopes(self.total)
            return tuple(published[head] for head in self.indices)
        power = 2 ** math.floor(math.log2(heads))
        series = [2 ** (-8 * (index + 1) / power) for index in range(power)]
        finer = [2 ** (-4 * (index + 1) / power) for index in range(2 * power)]
        return tuple(series + finer[0::2][: heads - power])

    def bias(self, heads: int, device: torch.device) -> "AlibiBias":
        return AlibiBias(self._slopes_on(device, heads))

    def _slopes_on(self, device: torch.device, heads: int) -> Float[Tensor, " h"]:
        """The slopes, computed on the device: a CUDA graph cannot copy from the host."""
        if self.indices:
            published = Alibi()._slopes_on(device, self.total)
            return torch.stack([published[head] for head in self.indices])
        power = 2 ** math.floor(math.log2(heads))
        # Only Apple's devices lack float64, which rounds as the published series does.
        wide = torch.float32 if device.type == "mps" else torch.float64
        head = torch.arange(heads, device=device, dtype=wide)
        series = -8 / power * (head + 1)
        finer = -4 / power * (2 * (head - power) + 1)
        return torch.where(head < power, series, finer).exp2().float()


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """The slopes in the form that kernels use; queries are `shift` positions further on."""

    slopes: Float[Tensor, " h"]
    shift: int = 0

    @property
    def requires_grad(self) -> bool:
        return self.slopes.requires_grad

    def of_heads(self, spans: Sequence[slice]) -> "AlibiBias":
        """The bias of these heads only."""
        return AlibiBias(torch.cat([self.slopes[span] for span in spans]), self.shift)

    def score(self, head: At, row: At, query: At, key: At) -> Scores:  # noqa: ARG002
        return -self.slopes[head] * (query + self.shift - key).abs()
