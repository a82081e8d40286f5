"""What all mixers share: the base of their configs, and of the layers that take attention's place.

A config is a frozen dataclass with a `width`; most have `heads`. A layer with heads projects its
tokens to queries, keys and values, mixes them, shows its pattern and projects the outputs: see
`HeadMixer`. Both are listed in `MIXERS`, in build.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError, InputError
from manyheads.mixers.head_weights import HeadWeights, watch_pattern
from manyheads.parts.experts import RouterLosses
from manyheads.ragged import Ragged
from manyheads.taps import Tap, WatchContext, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSettings:
    """The base of every config."""

    width: PositiveInt

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings(MixerSettings):
    """The base of configs whose heads divide the width."""

    heads: PositiveInt

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"heads must divide width={self.width}, got {self.heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedHeadSettings(HeadSettings):
    """The base of configs whose heads divide the width or have a size of their own."""

    head_size: PositiveInt | Literal["even"] = "even"

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads if self.head_size == "even" else self.head_size

    def __post_init__(self) -> None:
        if self.head_size == "even" and self.width % self.heads:
            raise ConfigError(
                f"heads must divide width={self.width}, got {self.heads}", "or set head_size"
            )


class Mixer(nn.Module, ABC):
    """Mixes the tokens of each sequence of a batch; two sequences never meet.

    With a cache it receives only the new tokens, and `cache` has the state of those before.
    A mixer with heads ends in the projection `output`, which receives what `Tap.HEAD_OUTPUT` shows;
    one without them, such as Fourier, has none. Heads that weigh tokens show their weights at
    `Tap.PATTERN`, unless a cache holds earlier tokens.
    """

    output: nn.Linear
    # Whether its heads have a pattern, which `watch_pattern` shows.
    has_pattern: ClassVar[bool] = False
    # Whether a long text may be read in pieces through a cache, at no cost.
    carries_state: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged: ...

    def added_losses(self, x: Ragged) -> RouterLosses | None:  # noqa: ARG002
        """What training adds to the loss for a mixer with a router, given what it reads."""
        return None

    def write(
        self, heads: Float[Tensor, "n h d"], x: Ragged, context: WatchContext | None
    ) -> Ragged:
        """The outputs of the heads, projected."""
        heads = observe(context, Tap.HEAD_OUTPUT, heads, x)
        return x.with_values(self.output(heads.flatten(1)))


# Queries, keys and values.
Heads = tuple[Float[Tensor, "n h d"], Float[Tensor, "n h d"], Float[Tensor, "n h e"]]
# The outputs of the heads, and their weights for a watcher; None where they have no pattern.
Mixed = tuple[Float[Tensor, "n h d"], Callable[[], HeadWeights] | None]


class HeadMixer(Mixer):
    """A mixer of queries, keys and values: `project`, then `mix`, then `output`.

    If `project` gives two parts, these are queries and values, and the queries are the keys.
    """

    has_pattern = True

    project: nn.Linear

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        if not self.config.causal:
            refuse_cache(cache)
        fresh = cache is None or cache.state is None
        parts = self.heads_of(x)
        if len(parts) == 3:
            query, key, value = observe_heads(context, x, *parts)
        else:
            query = key = observe(context, Tap.QUERY, parts[0], x)
            value = observe(context, Tap.VALUE, parts[1], x)
        mixed, weights = self.mix((query, key, value), x, cache)
        if self.has_pattern and weights is not None and fresh:
            mixed = watch_pattern(context, weights, value, mixed)
        return self.write(self.finish(mixed, x), x, context)

    def heads_of(self, x: Ragged) -> tuple[Float[Tensor, "n h d"], ...]:
        """Queries, keys and values of every head."""
        parts = self.project.out_features // self.output.in_features
        return split_heads(self.project(x.values), self.config.heads, parts)

    @abstractmethod
    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed: ...

    def finish(self, mixed: Float[Tensor, "n h d"], x: Ragged) -> Float[Tensor, "n h d"]:  # noqa: ARG002
        """What the output projection receives, after the pattern has been applied."""
        return mixed


def by_head(x: Float[Tensor, "n c"], heads: int) -> Float[Tensor, "n h d"]:
    return x.unflatten(-1, (heads, -1))


def split_heads(
    x: Float[Tensor, "n c"], heads: int, parts: int
) -> tuple[Float[Tensor, "n h d"], ...]:
    """Parts that are side by side, such as queries, keys and values, each by head."""
    return tuple(by_head(part, heads) for part in x.chunk(parts, dim=-1))


def observe_heads(
    context: WatchContext | None, x: Ragged, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values after a watcher has seen them, and perhaps replaced them."""
    return (
        observe(context, Tap.QUERY, query, x),
        observe(context, Tap.KEY, key, x),
        observe(context, Tap.VALUE, value, x),
    )


def state_of(cache: StateSlot | None, parts: int) -> tuple[Tensor | None, ...]:
    """What a cache holds of earlier tokens, in `parts` tensors; None for each if there are none."""
    return (None,) * parts if cache is None or cache.state is None else cache.state


def refuse_cache(cache: StateSlot | None) -> None:
    """For mixers that see the whole text."""
    if cache is not None:
        raise InputError(
            "a bidirectional mixer sees later tokens, and a cache has none",
            "use causal=True, or run without a cache",
        )
