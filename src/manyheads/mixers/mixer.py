"""The interface of a mixer: a sublayer that stands where attention stood."""

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.cache import StateSlot
from manyheads.ragged import Ragged
from manyheads.taps import Look


class Mixer(nn.Module, ABC):
    """Mixes the tokens of each sequence of a batch; two sequences never meet.

    With a cache it takes only the new tokens, and the state of those before stands in `cache`.
    Every config has a `width` and says in `causal` whether a token sees only those before it.
    """

    config: Any
    output: nn.Linear

    @abstractmethod
    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, look: Look | None = None
    ) -> Ragged: ...


def by_head(x: Float[Tensor, "n c"], heads: int) -> Float[Tensor, "n h d"]:
    return x.unflatten(-1, (heads, -1))
