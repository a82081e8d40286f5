"""The interface of a mixer: a sublayer that stands where attention stood."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.cache import StateSlot
from manyheads.errors import InputError
from manyheads.parts.experts import RouterLosses
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


class Mixer(nn.Module, ABC):
    """Mixes the tokens of each sequence of a batch; two sequences never meet.

    With a cache it takes only the new tokens, and the state of those before stands in `cache`.
    Every config has a `width` and says in `causal` whether a token sees only those before it. One
    with `heads` ends in the projection `output`, which receives what `Tap.HEAD_OUTPUT` shows; one
    without them, such as Fourier, has none. Heads that weigh tokens show their weights at
    `Tap.PATTERN`, unless a cache holds earlier tokens.
    """

    config: Any
    output: nn.Linear
    # Whether its heads have a pattern, which `watch_pattern` shows.
    has_pattern: ClassVar[bool] = False
    # Whether a long text may be read in pieces through a cache, at no cost.
    carries_state: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged: ...

    def added_losses(self, x: Ragged) -> RouterLosses | None:  # noqa: ARG002
        """What training adds to the loss for a mixer with a router, given what it reads."""
        return None


def by_head(x: Float[Tensor, "n c"], heads: int) -> Float[Tensor, "n h d"]:
    return x.unflatten(-1, (heads, -1))


def refuse_cache(cache: StateSlot | None) -> None:
    """For mixers that see the whole text."""
    if cache is not None:
        raise InputError(
            "a bidirectional mixer sees later tokens, and a cache has none",
            "use causal=True, or run without a cache",
        )
