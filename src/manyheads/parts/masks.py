"""Rules that say which keys a query may see; `&` and `|` make new ones."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Band:
    """How far before and after itself a query may look; infinity where nothing limits it."""

    before: int | float
    after: int | float


@dataclass(frozen=True, slots=True)
class Mask(ABC):
    """A rule over positions within one sequence: it never joins two sequences."""

    @abstractmethod
    def allows(
        self,
        query: Int[Tensor, "*#at"],
        key: Int[Tensor, "*#at"],
        length: Int[Tensor, "*#at"],
    ) -> Bool[Tensor, "*#at"]:
        """Elementwise, over positions that broadcast; `length` is how many keys there are.

        The answer has the shape of all three together, also where a rule ignores one of them.
        """

    @property
    @abstractmethod
    def reach(self) -> Band:
        """No key outside this band is ever seen."""

    @property
    def fills_reach(self) -> bool:
        """Whether every key inside the band is seen."""
        return False

    @property
    def settled(self) -> bool:
        """Whether what two tokens see of each other stays so as the sequence grows."""
        return True

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key: encoders, and cross-attention to another sequence."""

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        # No key is negative, but a query is where a memory is shorter than its reader.
        return (key >= 0) | (query >= 0) | (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(math.inf, math.inf)

    @property
    def fills_reach(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Each query sees itself and what came before."""

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        return (key <= query) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(math.inf, 0)

    @property
    def fills_reach(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """Each query sees `before` keys to its left, `after` to its right, and itself.

    >>> Window(64, 64).reach
    Band(before=64, after=64)
    """

    before: int
    after: int = 0

    def __post_init__(self) -> None:
        if self.before < 0 or self.after < 0:
            raise ConfigError(
                f"Window({self.before}, {self.after}) looks less than nowhere",
                "use 0 or more on both sides",
            )

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        inside = (key >= query - self.before) & (key <= query + self.after)
        return inside & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(self.before, self.after)

    @property
    def fills_reach(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Prefix(Mask):
    """The first `length` tokens see each other, later ones only backwards (arXiv 1910.10683)."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ConfigError(f"Prefix({self.length}) has no length", "use 0 or more")

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        return ((key <= query) | (key < self.length)) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(math.inf, max(self.length - 1, 0))


@dataclass(frozen=True, slots=True)
class GlobalTokens(Mask):
    """Tokens at `positions` see all and are seen by all (arXiv 2004.05150).

    Joined to a window it is Longformer: `Window(256, 256) | GlobalTokens((0,))`. Negative positions
    count from the end.
    """

    positions: tuple[int, ...] = (0,)

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        seen = (query < 0) & (key < 0) & (length < 0)
        for position in self.positions:
            place = position if position >= 0 else length + position
            seen = seen | (query == place) | (key == place)
        return seen

    @property
    def settled(self) -> bool:
        return all(position >= 0 for position in self.positions)

    @property
    def reach(self) -> Band:
        return Band(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Blocks(Mask):
    """Each block of `size` queries sees its own and some before and after (arXiv 2007.14062)."""

    size: int
    before: int = 1
    after: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.before < 0 or self.after < 0:
            raise ConfigError(
                f"{self} has no block to see", "use size >= 1, before >= 0, after >= 0"
            )

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        ahead = _whole(key, self.size) - _whole(query, self.size)
        return (ahead >= -self.before) & (ahead <= self.after) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band((self.before + 1) * self.size - 1, (self.after + 1) * self.size - 1)


@dataclass(frozen=True, slots=True)
class RandomBlocks(Mask):
    """Each block of queries sees `count` blocks of keys drawn by `seed` (arXiv 2007.14062).

    The blocks of a sequence are cut into `count` strata and one is drawn from each, so that the
    draws never coincide and depend on nothing but the seed and the sequence's own length.
    """

    size: int
    count: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.count < 1:
            raise ConfigError(f"{self} has no block to see", "use size >= 1 and count >= 1")

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        blocks = _whole(length + self.size - 1, self.size)
        own, other = _whole(query, self.size), _whole(key, self.size)
        seen = (query < 0) & (key < 0) & (length < 0)
        for draw in range(self.count):
            low, high = _whole(blocks * draw, self.count), _whole(blocks * (draw + 1), self.count)
            drawn = low + _scramble(own, draw, self.seed) % (high - low).clamp(min=1)
            seen = seen | ((other == drawn) & (high > low))
        return seen

    @property
    def settled(self) -> bool:
        return False

    @property
    def reach(self) -> Band:
        return Band(math.inf, math.inf)


def _whole(value: Int[Tensor, "*at"], by: int) -> Int[Tensor, "*at"]:
    return torch.div(value, by, rounding_mode="floor")


def _scramble(block: Int[Tensor, "*at"], draw: int, seed: int) -> Int[Tensor, "*at"]:
    """A fixed pseudo-random number for each block, by multiply and shift in 31 bits."""
    mixed = (block + 1) * 40503 + (draw + 1) * 9973 + (seed + 1) * 69069
    for multiplier in (48271, 69621):
        mixed = (mixed * multiplier) % 2147483647
        mixed = mixed ^ (mixed >> 13)
    return mixed % 1000003


@dataclass(frozen=True, slots=True)
class And(Mask):
    """What both rules allow."""

    first: Mask
    second: Mask

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        return self.first.allows(query, key, length) & self.second.allows(query, key, length)

    @property
    def settled(self) -> bool:
        return self.first.settled and self.second.settled

    @property
    def reach(self) -> Band:
        a, b = self.first.reach, self.second.reach
        return Band(min(a.before, b.before), min(a.after, b.after))

    @property
    def fills_reach(self) -> bool:
        return self.first.fills_reach and self.second.fills_reach


@dataclass(frozen=True, slots=True)
class Or(Mask):
    """What either rule allows."""

    first: Mask
    second: Mask

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        return self.first.allows(query, key, length) | self.second.allows(query, key, length)

    @property
    def settled(self) -> bool:
        return self.first.settled and self.second.settled

    @property
    def reach(self) -> Band:
        a, b = self.first.reach, self.second.reach
        return Band(max(a.before, b.before), max(a.after, b.after))

    @property
    def fills_reach(self) -> bool:
        # Two bands both hold the diagonal, so that together they are a band without a hole.
        rules = (self.first, self.second)
        return all(rule.fills_reach for rule in rules) or any(
            rule.fills_reach and rule.reach == self.reach for rule in rules
        )


Simple = Literal["all", "causal", "other"]


def visible(
    mask: Mask, rows: range, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "t s"]:
    """Which keys the given rows of queries see, the last query standing at the last key.

    >>> from manyheads.parts.masks import Causal
    >>> visible(Causal(), range(2), 2, 3, torch.device("cpu")).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    query = torch.arange(rows.start, rows.stop, device=device) + (keys - queries)
    key = torch.arange(keys, device=device)
    length = torch.full((1, 1), keys, device=device)
    return mask.allows(query[:, None], key[None, :], length)


def exact_band(mask: Mask) -> Band | None:
    """The band the mask is, if it is one."""
    return mask.reach if mask.fills_reach else None


def simple_form(mask: Mask, queries: int, keys: int) -> Simple:
    """Whether for these lengths the mask hides nothing, hides only the future, or is its own.

    >>> from manyheads.parts.masks import Window
    >>> simple_form(Window(64, 64), 50, 50), simple_form(Window(64), 50, 50)
    ('all', 'causal')
    """
    band = exact_band(mask)
    if band is None or band.before < keys - 1:
        return "other"
    # The last query stands at the last key, so the first has queries - 1 keys ahead of it.
    if band.after >= queries - 1:
        return "all"
    return "causal" if band.after == 0 and queries == keys else "other"
