"""Keys and values kept while decoding: growing, of fixed size, or a ring for windows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import ConfigError, InputError
from manyheads.parts.masks.render import exact_band
from manyheads.parts.masks.rules import Mask
from manyheads.ragged import Lengths

__all__ = [
    "Cache",
    "CacheSlot",
    "Fixed",
    "Growing",
    "Kept",
    "Plan",
    "Ring",
    "Slots",
    "Steady",
    "Store",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """Room for `first` tokens, doubled whenever it is full."""

    first: int = 64
    rings: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Room for `size` tokens a sequence and not one more."""

    size: int
    rings: bool = True


class Plan:
    """What one forward adds to a cache, worked out once for all layers."""

    def __init__(self, before: tuple[int, ...], new: Lengths) -> None:
        self.before = before
        self.new = new
        self.after = tuple(old + more for old, more in zip(before, new.each, strict=True))
        shift = torch.tensor(before, device=new.positions.device, dtype=new.positions.dtype)
        self.positions = new.positions + shift[new.sequence_of_token]
        self._tables: dict[tuple[str, int], Tensor] = {}
        self._lengths: dict[tuple[tuple[int, ...], int], Lengths] = {}

    def slots(self, room: int) -> Int[Tensor, " n"]:
        """Where each new token goes in a store with this much room a sequence."""
        if ("slots", room) not in self._tables:
            first = self.new.sequence_of_token * room
            self._tables["slots", room] = first + self.positions % room
        return self._tables["slots", room]

    def lengths(self, each: tuple[int, ...], room: int) -> Lengths:
        if (each, room) not in self._lengths:
            device = self.new.positions.device
            self._lengths[each, room] = Lengths.with_room(each, room, device)
        return self._lengths[each, room]


class Steady:
    """A plan of one more token a sequence, whose numbers lie on the device alone.

    So a step is the same program every time: it can be recorded once and replayed.
    """

    def __init__(self, seen: tuple[int, ...], rooms: set[int], device: torch.device) -> None:
        self.new = Lengths.of([1] * len(seen), device)
        self.positions = torch.tensor(seen, device=device)
        self.rows = torch.arange(len(seen), device=device)
        self.columns = {room: self.positions % room for room in rooms}
        self.keys = {room: self._lengths(room) for room in rooms}

    def _lengths(self, room: int) -> Lengths:
        whole = Lengths.of([room] * len(self.new), self.positions.device)
        filled = (self.positions + 1).clamp(max=room).int()
        return replace(whole, filled=filled)

    def advance(self) -> None:
        """Go to the next token, in place."""
        self.restore(self.positions + 1)

    def restore(self, positions: Int[Tensor, " b"]) -> None:
        """Go to these positions, in place."""
        self.positions.copy_(positions)
        for room, columns in self.columns.items():
            columns.copy_(self.positions % room)
            filled = self.keys[room].filled
            assert filled is not None
            filled.copy_((self.positions + 1).clamp(max=room))


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Keys and values as a kernel takes them, with the lengths of their sequences."""

    k: Float[Tensor, "m g d"]
    v: Float[Tensor, "m g e"]
    lengths: Lengths


class Store(ABC):
    """Where one layer keeps its keys and values: a tensor of the same room for each sequence."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.k = torch.zeros(0)
        self.v = torch.zeros(0)

    @abstractmethod
    def append(
        self, k: Float[Tensor, "n g d"], v: Float[Tensor, "n g e"], plan: Plan, *, ordered: bool
    ) -> Kept:
        """Keep the new tokens and hand out all that they may see, in order where it matters."""

    def step(self, k: Float[Tensor, "b g d"], v: Float[Tensor, "b g e"], plan: Steady) -> Kept:
        """Keep one new token a sequence and hand out the whole room."""
        self.k[plan.rows, plan.columns[self.room]] = k
        self.v[plan.rows, plan.columns[self.room]] = v
        return Kept(self.k.flatten(0, 1), self.v.flatten(0, 1), plan.keys[self.room])

    def select(self, sequences: list[int]) -> None:
        if self.k.numel():
            index = torch.tensor(sequences, device=self.k.device, dtype=torch.long)
            # Unlike indexing this lays out anew what somebody laid out otherwise.
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _allocate(self, k: Tensor, v: Tensor, batch: int) -> None:
        self.k = _enlarged(self.k, (batch, self.room, *k.shape[1:]), k)
        self.v = _enlarged(self.v, (batch, self.room, *v.shape[1:]), v)

    def _write(self, k: Tensor, v: Tensor, slots: Int[Tensor, " n"]) -> None:
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def _filled(self, each: tuple[int, ...], plan: Plan) -> Kept:
        """The first places of every sequence; of a single one just those, as every kernel likes."""
        if len(each) == 1:
            return Kept(self.k[0, : each[0]], self.v[0, : each[0]], plan.lengths(each, each[0]))
        return Kept(self.k.flatten(0, 1), self.v.flatten(0, 1), plan.lengths(each, self.room))


class Slots(Store):
    """Every sequence fills its room from the front; the room doubles when full, or stays fixed."""

    def __init__(self, config: Growing | Fixed) -> None:
        super().__init__(config.size if isinstance(config, Fixed) else config.first)
        self.config = config

    def append(
        self, k: Float[Tensor, "n g d"], v: Float[Tensor, "n g e"], plan: Plan, *, ordered: bool
    ) -> Kept:
        del ordered  # slots always are
        needed = max(plan.after, default=0)
        if isinstance(self.config, Fixed) and needed > self.room:
            raise InputError(
                f"a cache of {self.room} tokens cannot hold {needed}",
                f"use Fixed(size={needed}) or more, or Growing()",
            )
        while self.room < needed:
            self.room *= 2
        self._allocate(k, v, len(plan.new))
        self._write(k, v, plan.slots(self.room))
        if not any(plan.before):
            return Kept(k, v, plan.new)
        return self._filled(plan.after, plan)


class Ring(Store):
    """The last tokens of each sequence, written round and round."""

    def append(
        self, k: Float[Tensor, "n g d"], v: Float[Tensor, "n g e"], plan: Plan, *, ordered: bool
    ) -> Kept:
        # A single query sees the whole ring, and a softmax does not care for the order of its keys
        # unless a bias by distance does.
        whole = not ordered and all(length == 1 for length in plan.new.each)
        self._allocate(k, v, len(plan.new))
        if any(plan.before) and not whole:
            kept = self._in_order(k, v, plan)
            self._write_last(k, v, plan)
            return kept
        self._write_last(k, v, plan)
        if not any(plan.before):
            return Kept(k, v, plan.new)
        return self._filled(tuple(min(length, self.room) for length in plan.after), plan)

    def _write_last(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Of more new tokens than the ring holds, only the last are written."""
        if plan.new.longest <= self.room:
            self._write(k, v, plan.slots(self.room))
            return
        ends = torch.tensor(plan.after, device=k.device)[plan.new.sequence_of_token]
        last = plan.positions >= ends - self.room
        self._write(k[last], v[last], plan.slots(self.room)[last])

    def _in_order(self, k: Tensor, v: Tensor, plan: Plan) -> Kept:
        """The ring unrolled, oldest first, followed by the new tokens of each sequence."""
        keys, values, each = [], [], []
        for sequence, (old, place) in enumerate(zip(plan.before, plan.new.slices(), strict=True)):
            # Before itself a query sees one key less than the ring holds.
            held = min(old, self.room - 1)
            order = torch.arange(old - held, old, device=k.device) % self.room
            keys += [self.k[sequence, order], k[place]]
            values += [self.v[sequence, order], v[place]]
            each.append(held + plan.new.each[sequence])
        return Kept(torch.cat(keys), torch.cat(values), Lengths.of(each, k.device))


@dataclass(frozen=True, slots=True, eq=False)
class CacheSlot:
    """A layer's store, and what this forward adds to it."""

    store: Store
    plan: Plan | Steady


class Cache:
    """One store a layer, and how many tokens of each sequence they have seen.

    `memory` holds what cross-attention made of the encoder's output, one entry a layer.
    """

    def __init__(self, masks: list[Mask | None], config: Growing | Fixed) -> None:
        if isinstance(config, Fixed) and config.size < 1:
            raise ConfigError(f"Fixed(size={config.size}) holds nothing", "use size=1 or more")
        if isinstance(config, Growing) and config.first < 1:
            raise ConfigError(f"Growing(first={config.first}) cannot double", "use first=1 or more")
        self.stores: list[Store | None] = [
            None if mask is None else _store_for(mask, config) for mask in masks
        ]
        self.memory: list[Kept | None] = [None] * len(masks)
        self.seen: tuple[int, ...] = ()

    def plan(self, new: Lengths) -> Plan:
        """Begin a forward over new tokens; `finish` it when every layer has appended."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise InputError(
                "a cache keeps no gradients and gradients are on",
                "decode under torch.no_grad() or torch.inference_mode()",
            )
        before = self.seen or (0,) * len(new)
        if len(before) != len(new):
            raise InputError(
                f"the cache holds {len(before)} sequences and {len(new)} came",
                "make a new cache, or select() the sequences that go on",
            )
        return Plan(before, new)

    def finish(self, plan: Plan) -> None:
        self.seen = plan.after

    def steady(self) -> Steady:
        """Begin steps of fixed shape after what was seen; the cache itself must be `Fixed`."""
        stores = [store for store in self.stores if store is not None]
        return Steady(self.seen, {store.room for store in stores}, stores[0].k.device)

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences, in this order; one may be named twice, as beams are."""
        if any(not 0 <= sequence < len(self.seen) for sequence in sequences):
            raise InputError(
                f"sequences {sequences} are not all in the cache",
                f"choose among 0 to {len(self.seen) - 1}",
            )
        self.seen = tuple(self.seen[sequence] for sequence in sequences)
        for store in self.stores:
            if store is not None:
                store.select(sequences)
        self.memory = [_select_kept(kept, sequences) for kept in self.memory]

    @property
    def nbytes(self) -> int:
        """The memory of all keys and values of the decoder's own tokens."""
        return sum(store.nbytes for store in self.stores if store is not None)


def _store_for(mask: Mask, config: Growing | Fixed) -> Store:
    band = exact_band(mask)
    if config.rings and band is not None and band.after == 0 and band.before < float("inf"):
        # A window looks the same from everywhere; other masks need the true positions.
        return Ring(int(band.before) + 1)
    return Slots(config)


def _enlarged(old: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if old.shape == shape:
        return old
    new = like.new_zeros(shape)
    if old.numel():
        new[:, : old.shape[1]] = old
    return new


def _select_kept(kept: Kept | None, sequences: list[int]) -> Kept | None:
    if kept is None:
        return None
    starts = list(accumulate(kept.lengths.each, initial=0))
    rows = [torch.arange(starts[s], starts[s + 1], device=kept.k.device) for s in sequences]
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long, device=kept.k.device)
    lengths = Lengths.of([kept.lengths.each[s] for s in sequences], kept.k.device)
    return Kept(kept.k[index], kept.v[index], lengths)
