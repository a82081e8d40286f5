"""Masks: which keys a query may see. `&` and `|` combine them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.annotations import NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields

# Positions or lengths that broadcast, and whether queries see keys there.
At = Int[Tensor, "*#at"]
Sees = Bool[Tensor, "*#at"]


@dataclass(frozen=True, slots=True)
class Band:
    """How far before and after itself a query may look; infinite where there is no limit."""

    before: int | float
    after: int | float


@dataclass(frozen=True, slots=True)
class Mask(ABC):
    """A rule over the positions of one sequence; two sequences never see each other."""

    @abstractmethod
    def allows(self, query: At, key: At, length: At) -> Sees:
        """Whether each query sees each key, elementwise; `length` is the number of keys.

        The three broadcast, and the result has their common shape even if a rule ignores one.
        """

    @property
    def reach(self) -> Band:
        """No key outside this band is ever seen."""
        return Band(math.inf, math.inf)

    @property
    def fills_reach(self) -> bool:
        """Whether every key inside the band is seen."""
        return False

    @property
    def independent_of_length(self) -> bool:
        """Whether a pair of tokens stays visible or hidden as the sequence grows."""
        return True

    def of_sequence(self, sequence: int) -> "Mask":  # noqa: ARG002, for those that differ
        """The mask of one sequence of a batch."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)


@check_fields
@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key: encoders, and cross-attention to another sequence."""

    fills_reach = True

    def allows(self, query: At, key: At, length: At) -> Sees:
        # No key is negative, but a query is if the memory is shorter than the queries.
        return (key >= 0) | (query >= 0) | (length >= 0)


@check_fields
@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Each query sees itself and what came before."""

    fills_reach = True

    def allows(self, query: At, key: At, length: At) -> Sees:
        return (key <= query) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(math.inf, 0)


@check_fields
@dataclass(frozen=True, slots=True)
class Window(Mask):
    """Each query sees `before` keys to its left, `after` to its right, and itself.

    >>> Window(64, 64).reach
    Band(before=64, after=64)
    """

    fills_reach = True

    before: NonNegativeInt
    after: NonNegativeInt = 0

    def allows(self, query: At, key: At, length: At) -> Sees:
        inside = (key >= query - self.before) & (key <= query + self.after)
        return inside & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(self.before, self.after)


@check_fields
@dataclass(frozen=True, slots=True)
class Prefix(Mask):
    """The first `length` tokens see each other, later ones only backwards (arXiv 1910.10683)."""

    length: NonNegativeInt

    def allows(self, query: At, key: At, length: At) -> Sees:
        return ((key <= query) | (key < self.length)) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band(math.inf, max(self.length - 1, 0))


@check_fields
@dataclass(frozen=True, slots=True)
class GlobalTokens(Mask):
    """Tokens at `positions` see all tokens and are seen by all (arXiv 2004.05150).

    `Window(256, 256) | GlobalTokens((0,))` is the mask of Longformer. Negative positions count from
    the end.
    """

    positions: tuple[int, ...] = (0,)

    def allows(self, query: At, key: At, length: At) -> Sees:
        seen = (query < 0) & (key < 0) & (length < 0)
        for position in self.positions:
            token = position if position >= 0 else length + position
            seen = seen | (query == token) | (key == token)
        return seen

    @property
    def independent_of_length(self) -> bool:
        return all(position >= 0 for position in self.positions)


@check_fields
@dataclass(frozen=True, slots=True)
class Blocks(Mask):
    """Each block of `size` queries sees itself and its neighbor blocks (arXiv 2007.14062)."""

    size: PositiveInt
    before: NonNegativeInt = 1
    after: NonNegativeInt = 1

    def allows(self, query: At, key: At, length: At) -> Sees:
        ahead = _floor_divide(key, self.size) - _floor_divide(query, self.size)
        return (ahead >= -self.before) & (ahead <= self.after) & (length >= 0)

    @property
    def reach(self) -> Band:
        return Band((self.before + 1) * self.size - 1, (self.after + 1) * self.size - 1)


@check_fields
@dataclass(frozen=True, slots=True)
class RandomBlocks(Mask):
    """Each block of queries sees `count` blocks of keys drawn by `seed` (arXiv 2007.14062).

    The blocks of a sequence are divided into `count` strata and one is drawn from each, so that
    the draws never coincide and depend only on the seed and the length of the sequence.
    """

    independent_of_length = False

    size: PositiveInt
    count: PositiveInt = 3
    seed: int = 0

    def allows(self, query: At, key: At, length: At) -> Sees:
        blocks = _floor_divide(length + self.size - 1, self.size)
        own, other = _floor_divide(query, self.size), _floor_divide(key, self.size)
        seen = (query < 0) & (key < 0) & (length < 0)
        for draw in range(self.count):
            low, high = (
                _floor_divide(blocks * draw, self.count),
                _floor_divide(blocks * (draw + 1), self.count),
            )
            drawn = low + _scramble(own, draw, self.seed) % (high - low).clamp(min=1)
            seen = seen | ((other == drawn) & (high > low))
        return seen


def _floor_divide(value: Int[Tensor, "*at"], by: int) -> Int[Tensor, "*at"]:
    return torch.div(value, by, rounding_mode="floor")


def _scramble(block: Int[Tensor, "*at"], draw: int, seed: int) -> Int[Tensor, "*at"]:
    """A fixed pseudo-random number for each block, by multiply and shift in 31 bits."""
    mixed = (block + 1) * 40503 + (draw + 1) * 9973 + (seed + 1) * 69069
    for multiplier in (48271, 69621):
        mixed = (mixed * multiplier) % 2147483647
        mixed = mixed ^ (mixed >> 13)
    return mixed % 1000003


@dataclass(frozen=True, slots=True)
class _Pair(Mask):
    first: Mask
    second: Mask

    @property
    def independent_of_length(self) -> bool:
        return self.first.independent_of_length and self.second.independent_of_length


@dataclass(frozen=True, slots=True)
class And(_Pair):
    """What both masks allow."""

    def allows(self, query: At, key: At, length: At) -> Sees:
        return self.first.allows(query, key, length) & self.second.allows(query, key, length)

    @property
    def reach(self) -> Band:
        a, b = self.first.reach, self.second.reach
        return Band(min(a.before, b.before), min(a.after, b.after))

    @property
    def fills_reach(self) -> bool:
        return self.first.fills_reach and self.second.fills_reach


@dataclass(frozen=True, slots=True)
class Or(_Pair):
    """What either mask allows."""

    def allows(self, query: At, key: At, length: At) -> Sees:
        return self.first.allows(query, key, length) | self.second.allows(query, key, length)

    @property
    def reach(self) -> Band:
        a, b = self.first.reach, self.second.reach
        return Band(max(a.before, b.before), max(a.after, b.after))

    @property
    def fills_reach(self) -> bool:
        # Two bands both contain the diagonal, so their union is a band without a gap.
        rules = (self.first, self.second)
        return all(rule.fills_reach for rule in rules) or any(
            rule.fills_reach and rule.reach == self.reach for rule in rules
        )


@dataclass(frozen=True, slots=True)
class MaskBySequence(Mask):
    """A mask for each sequence of one batch."""

    each: tuple[Mask, ...]

    def of_sequence(self, sequence: int) -> Mask:
        return self.each[sequence]

    def allows(self, *_: At) -> Sees:
        raise AssertionError("ask the mask of a sequence")

    @property
    def reach(self) -> Band:
        bands = [mask.reach for mask in self.each]
        return Band(max(band.before for band in bands), max(band.after for band in bands))


@dataclass(frozen=True, slots=True)
class Shifted(Mask):
    """A mask on part of a text of `length` tokens: the positions of its first query and key."""

    mask: Mask
    query: int
    key: int
    length: int

    def allows(self, query: At, key: At, length: At) -> Sees:
        whole = length * 0 + self.length
        return self.mask.allows(query + self.query, key + self.key, whole)

    @property
    def reach(self) -> Band:
        band, ahead = self.mask.reach, self.query - self.key
        return Band(band.before - ahead, band.after + ahead)


def part_of(mask: Mask, query: range, key: range, length: int) -> Mask:
    """The mask between some queries and keys of a text, as kernels see it.

    They count keys from the first one and align the last query to the last key.

    >>> part_of(Causal(), range(8, 12), range(0, 4), 12)
    Full()
    >>> part_of(Causal(), range(8, 12), range(8, 12), 12)
    Causal()
    >>> part_of(Window(5), range(8, 12), range(6, 10), 12)
    Shifted(mask=Window(before=5, after=0), query=8, key=6, length=12)
    """
    ahead = query.start - key.start
    first = query.start - (len(key) - len(query))
    band = mask.reach
    to_all = band.before >= query.stop - 1 - key.start and band.after >= key.stop - 1 - query.start
    if mask.fills_reach and to_all:
        return Full()
    if mask.fills_reach and len(query) == len(key) and not ahead:
        return mask
    return Shifted(mask, first, key.start, length)


@dataclass(frozen=True, slots=True, eq=False)
class TensorMask(Mask):
    """A tensor that says which keys each query sees; the last query is at the last key."""

    independent_of_length = False

    visible: Bool[Tensor, "t s"]

    def allows(self, query: At, key: At, length: At) -> Sees:
        queries, keys = self.visible.shape
        return self.visible[query - (keys - queries), key] & (length >= 0)


Simple = Literal["all", "causal", "other"]


def visible(
    mask: Mask, rows: range, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "t s"]:
    """Which keys these rows of queries see; the last query is aligned to the last key.

    >>> from manyheads.parts.masks import Causal
    >>> visible(Causal(), range(2), 2, 3, torch.device("cpu")).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    query = torch.arange(rows.start, rows.stop, device=device) + (keys - queries)
    key = torch.arange(keys, device=device)
    length = torch.full((1, 1), keys, device=device)
    return mask.allows(query[:, None], key[None, :], length)


def exact_band(mask: Mask) -> Band | None:
    """The band that the mask is equal to, if there is one."""
    return mask.reach if mask.fills_reach else None


def simple_form(mask: Mask, queries: int, keys: int) -> Simple:
    """Whether at these lengths the mask is full, causal, or neither.

    >>> from manyheads.parts.masks import Window
    >>> simple_form(Window(64, 64), 50, 50), simple_form(Window(64), 50, 50)
    ('all', 'causal')
    """
    band = exact_band(mask)
    if band is None or band.before < keys - 1:
        return "other"
    # The last query is aligned to the last key, so the first has queries - 1 keys ahead of it.
    if band.after >= queries - 1:
        return "all"
    return "causal" if band.after == 0 and queries == keys else "other"
