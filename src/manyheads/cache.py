"""Caches of keys and values for decoding: growing, of fixed size, and ring buffers."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import InputError
from manyheads.parts.masks import Mask, exact_band
from manyheads.ragged import Lengths


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCache:
    """A cache of `initial_size` tokens per sequence that doubles when it is full.

    With `ring_buffers` a layer with a sliding window keeps the tokens of its window only.
    """

    initial_size: PositiveInt = 64
    ring_buffers: bool = True


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCache:
    """A cache of at most `size` tokens per sequence, allocated once.

    There is room for `rows` sequences, or for those of the first batch if they are more. With
    `ring_buffers` a layer with a sliding window keeps the tokens of its window only.
    """

    size: PositiveInt
    ring_buffers: bool = True
    rows: PositiveInt = 1


class CachePlan:
    """What one forward pass adds to a cache, computed once for all layers."""

    def __init__(self, before: tuple[int, ...], new: Lengths) -> None:
        self.before = before
        self.new = new
        self.after = tuple(old + more for old, more in zip(before, new.each, strict=True))
        shift = torch.tensor(before, device=new.positions.device, dtype=new.positions.dtype)
        self.positions = new.positions + shift[new.sequence_of_token]
        self._tables: dict[tuple[str, int], Tensor] = {}
        self._lengths: dict[tuple[tuple[int, ...], int], Lengths] = {}

    def slots(self, capacity: int) -> Int[Tensor, " n"]:
        """The index of each new token in a layer cache with this capacity per sequence."""
        if ("slots", capacity) not in self._tables:
            first = self.new.sequence_of_token * capacity
            self._tables["slots", capacity] = first + self.positions % capacity
        return self._tables["slots", capacity]

    def lengths(self, counts: tuple[int, ...], capacity: int) -> Lengths:
        if (counts, capacity) not in self._lengths:
            device = self.new.positions.device
            self._lengths[counts, capacity] = Lengths.with_capacity(counts, capacity, device)
        return self._lengths[counts, capacity]


class StaticCachePlan:
    """A plan for one more token per sequence, with all its numbers on the device.

    So every step is the same program, which a CUDA graph can record once and replay.
    """

    def __init__(self, seen: tuple[int, ...], capacities: set[int], device: torch.device) -> None:
        self.new = Lengths.of([1] * len(seen), device)
        self.positions = torch.tensor(seen, device=device)
        self.rows = torch.arange(len(seen), device=device)
        self.columns = {capacity: self.positions % capacity for capacity in capacities}
        self.keys = {capacity: self._lengths(capacity) for capacity in capacities}

    def _lengths(self, capacity: int) -> Lengths:
        whole = Lengths.of([capacity] * len(self.new), self.positions.device)
        filled = (self.positions + 1).clamp(max=capacity).int()
        return replace(whole, filled=filled)

    def advance(self) -> None:
        """Move on to the next token, in place."""
        self.restore(self.positions + 1)

    def restore(self, positions: Int[Tensor, " b"]) -> None:
        """Set the positions, in place."""
        self.positions.copy_(positions)
        for capacity, columns in self.columns.items():
            columns.copy_(self.positions % capacity)
            filled = self.keys[capacity].filled
            assert filled is not None
            filled.copy_((self.positions + 1).clamp(max=capacity))


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues:
    """Keys and values in the layout of the kernels, with the lengths of their sequences."""

    k: Float[Tensor, "m g d"]
    v: Float[Tensor, "m g e"]
    lengths: Lengths


NewKeys = Float[Tensor, "n g d"]
NewValues = Float[Tensor, "n g e"]


class LayerCache(ABC):
    """The keys and values of one layer, with the same capacity for each sequence."""

    def __init__(self, capacity: int, rows: int = 1) -> None:
        self.capacity, self.rows = capacity, rows
        self.k = torch.zeros(0)
        self.v = torch.zeros(0)

    @abstractmethod
    def append(self, k: NewKeys, v: NewValues, plan: CachePlan, *, ordered: bool) -> KeyValues:
        """Store the new tokens and return all keys they may see, in order if `ordered`."""

    def step(
        self, k: Float[Tensor, "b g d"], v: Float[Tensor, "b g e"], plan: StaticCachePlan
    ) -> KeyValues:
        """Store one new token per sequence and return the full buffers."""
        self.k[plan.rows, plan.columns[self.capacity]] = k
        self.v[plan.rows, plan.columns[self.capacity]] = v
        return self.whole(plan)

    def whole(self, plan: StaticCachePlan) -> KeyValues:
        """The full buffers."""
        return KeyValues(self.k.flatten(0, 1), self.v.flatten(0, 1), plan.keys[self.capacity])

    def select(self, sequences: list[int]) -> None:
        if self.k.numel():
            index = torch.tensor(sequences, device=self.k.device, dtype=torch.long)
            self.rows = 1
            # Unlike indexing, this restores the default memory layout.
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def first(self, count: int) -> "LayerCache":
        """The same keys and values, of the first sequences alone."""
        part = copy(self)
        part.rows, part.k, part.v = 1, self.k[:count], self.v[:count]
        return part

    def _allocate(self, k: Tensor, v: Tensor, batch: int) -> None:
        batch = max(batch, self.rows)
        self.k = _enlarged(self.k, (batch, self.capacity, *k.shape[1:]), k)
        self.v = _enlarged(self.v, (batch, self.capacity, *v.shape[1:]), v)

    def _write(self, k: Tensor, v: Tensor, slots: Int[Tensor, " n"]) -> None:
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)

    def _filled(self, counts: tuple[int, ...], plan: CachePlan) -> KeyValues:
        """The filled part of every sequence; a single one is a slice, which all kernels accept."""
        if len(counts) == 1:
            count = counts[0]
            return KeyValues(self.k[0, :count], self.v[0, :count], plan.lengths(counts, count))
        lengths = plan.lengths(counts, self.capacity)
        k, v = self.k[: len(counts)], self.v[: len(counts)]
        return KeyValues(k.flatten(0, 1), v.flatten(0, 1), lengths)


class FullLayerCache(LayerCache):
    """Every sequence is stored from the front; the capacity doubles when full or stays fixed."""

    def __init__(self, config: DynamicCache | StaticCache) -> None:
        size = config.size if isinstance(config, StaticCache) else config.initial_size
        super().__init__(size, _rows(config))
        self.config = config

    def append(self, k: NewKeys, v: NewValues, plan: CachePlan, *, ordered: bool) -> KeyValues:
        del ordered  # it always is
        needed = max(plan.after, default=0)
        if isinstance(self.config, StaticCache) and needed > self.capacity:
            raise InputError(
                f"a cache of {self.capacity} tokens cannot hold {needed}",
                f"use StaticCache(size={needed}) or more, or DynamicCache()",
            )
        while self.capacity < needed:
            self.capacity *= 2
        self._allocate(k, v, len(plan.new))
        self._write(k, v, plan.slots(self.capacity))
        if not any(plan.before):
            return KeyValues(k, v, plan.new)
        return self._filled(plan.after, plan)


class RingLayerCache(LayerCache):
    """The last tokens of each sequence, in a ring buffer."""

    def append(self, k: NewKeys, v: NewValues, plan: CachePlan, *, ordered: bool) -> KeyValues:
        # A single query sees the whole ring, and the order of the keys matters to a softmax only if
        # there is a bias by distance.
        whole = not ordered and all(length == 1 for length in plan.new.each)
        self._allocate(k, v, len(plan.new))
        if any(plan.before) and not whole:
            ordered_keys = self._in_order(k, v, plan)
            self._write_last(k, v, plan)
            return ordered_keys
        self._write_last(k, v, plan)
        if not any(plan.before):
            return KeyValues(k, v, plan.new)
        return self._filled(tuple(min(length, self.capacity) for length in plan.after), plan)

    def _write_last(self, k: Tensor, v: Tensor, plan: CachePlan) -> None:
        """Store only the last of the new tokens if the ring cannot hold them all."""
        if plan.new.longest <= self.capacity:
            self._write(k, v, plan.slots(self.capacity))
            return
        ends = torch.tensor(plan.after, device=k.device)[plan.new.sequence_of_token]
        last = plan.positions >= ends - self.capacity
        self._write(k[last], v[last], plan.slots(self.capacity)[last])

    def _in_order(self, k: Tensor, v: Tensor, plan: CachePlan) -> KeyValues:
        """The ring in order, oldest token first, then the new tokens of each sequence."""
        keys, values, counts = [], [], []
        for sequence, (old, new) in enumerate(zip(plan.before, plan.new.slices(), strict=True)):
            # Before itself a query sees one key less than the ring holds.
            held = min(old, self.capacity - 1)
            order = torch.arange(old - held, old, device=k.device) % self.capacity
            keys += [self.k[sequence, order], k[new]]
            values += [self.v[sequence, order], v[new]]
            counts.append(held + plan.new.each[sequence])
        return KeyValues(torch.cat(keys), torch.cat(values), Lengths.of(counts, k.device))


@dataclass(frozen=True, slots=True, eq=False)
class CacheSlot:
    """The cache of one layer, and what this forward pass adds to it."""

    store: LayerCache
    plan: CachePlan | StaticCachePlan


class StateCache:
    """What a mixer keeps of the tokens it has seen: tensors whose first axis is the sequences.

    Once kept, their `owner`, the config of the mixer, and their `shapes` are known.
    """

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        self.owner: object = None
        self.shapes: tuple[torch.Size, ...] | None = None

    def first(self, count: int) -> "StateCache":
        """The same states, of the first sequences alone."""
        part = copy(self)
        part.tensors = tuple(tensor[:count] for tensor in self.tensors)
        return part

    def select(self, sequences: list[int]) -> None:
        for_device = {tensor.device for tensor in self.tensors}
        index = {device: torch.tensor(sequences, device=device) for device in for_device}
        self.tensors = tuple(tensor[index[tensor.device]] for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class StateSlot:
    """The state of one mixer; what it keeps replaces what was there.

    `owner` is the config of that mixer, where it is known.
    """

    store: StateCache
    owner: object = None

    @property
    def state(self) -> tuple[Tensor, ...] | None:
        """What was kept, or None before the first token; that of another mixer is refused."""
        store, remedy = self.store, "use the cache that this model has filled, or a new one"
        if not store.tensors:
            return None
        if None not in (self.owner, store.owner) and self.owner != store.owner:
            problem = f"the cache holds the state of {store.owner}, and this layer is {self.owner}"
            raise InputError(problem, remedy)
        new_shapes = tuple(tensor.shape[1:] for tensor in store.tensors)
        if store.shapes is not None and new_shapes != store.shapes:
            current, expected = (
                ", ".join(str(tuple(shape)) for shape in shapes)
                for shapes in (new_shapes, store.shapes)
            )
            problem = f"the state in the cache has the shapes {current} per sequence"
            raise InputError(f"{problem}, and {expected} were kept", remedy)
        return store.tensors

    def keep(self, *tensors: Tensor) -> None:
        self.store.tensors, self.store.owner = tensors, self.owner
        self.store.shapes = tuple(tensor.shape[1:] for tensor in tensors)


class Cache:
    """One layer cache per layer, and how many tokens of each sequence they have seen.

    `memory` holds the cross-attention keys and values of the encoder's output, one per layer, and
    `states` what mixers keep instead of keys and values.
    """

    def __init__(
        self,
        masks: list[Mask | None],
        config: DynamicCache | StaticCache,
        mixers: Collection[int] = (),
    ) -> None:
        self.states = {layer: StateCache() for layer in mixers}
        self.stores: list[LayerCache | None] = [
            None if mask is None else _store_for(mask, config) for mask in masks
        ]
        self.memory: list[KeyValues | None] = [None] * len(masks)
        self.seen: tuple[int, ...] = ()

    def plan(self, new: Lengths) -> CachePlan:
        """Begin a forward pass over new tokens; call `finish` once every layer has appended."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise InputError(
                "a cache keeps no gradients, and gradients are enabled",
                "decode under torch.no_grad() or torch.inference_mode()",
            )
        before = self.seen or (0,) * len(new)
        if len(before) != len(new):
            raise InputError(
                f"the cache holds {len(before)} sequences, and the batch has {len(new)}",
                "make a new cache, or select() the sequences to continue",
            )
        return CachePlan(before, new)

    def finish(self, plan: CachePlan) -> None:
        self.seen = plan.after

    def static_plan(self) -> StaticCachePlan:
        """Begin steps of fixed shape after the tokens seen; the cache must be a `StaticCache`."""
        capacities = {store.capacity for store in self.stores if store is not None}
        return StaticCachePlan(self.seen, capacities, self.device)

    @property
    def device(self) -> torch.device:
        """Where a filled cache is."""
        stored = [store.k for store in self.stores if store is not None]
        stored += [tensor for state in self.states.values() for tensor in state.tensors]
        return stored[0].device

    def first(self, count: int) -> "Cache":
        """A cache of the first sequences alone, with the same keys and values."""
        part = copy(self)
        part.stores = [None if store is None else store.first(count) for store in self.stores]
        part.states = {layer: state.first(count) for layer, state in self.states.items()}
        part.seen = self.seen[:count]
        return part

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences, in this order; one may occur twice, as in beam search."""
        if any(not 0 <= sequence < len(self.seen) for sequence in sequences):
            raise InputError(
                f"sequences {sequences} are not all in the cache",
                f"use indices from 0 to {len(self.seen) - 1}",
            )
        self.seen = tuple(self.seen[sequence] for sequence in sequences)
        for store in self.stores:
            if store is not None:
                store.select(sequences)
        for state in self.states.values():
            state.select(sequences)
        self.memory = [_select(memory, sequences) for memory in self.memory]

    def branch(self, sequences: list[int]) -> "Cache":
        """A new cache of these sequences, in this order; this one stays as it is.

        So texts with the same beginning read it once and continue it side by side.
        """
        branched = copy(self)
        branched.stores = [copy(store) for store in self.stores]
        branched.states = {layer: copy(state) for layer, state in self.states.items()}
        branched.select(sequences)
        return branched

    @property
    def nbytes(self) -> int:
        """The bytes of all keys, values and states, without those of cross-attention."""
        stores = sum(store.nbytes for store in self.stores if store is not None)
        return stores + sum(state.nbytes for state in self.states.values())


def _rows(config: DynamicCache | StaticCache) -> int:
    return config.rows if isinstance(config, StaticCache) else 1


def _store_for(mask: Mask, config: DynamicCache | StaticCache) -> LayerCache:
    band = exact_band(mask)
    if config.ring_buffers and band is not None and band.after == 0 and band.before < float("inf"):
        # A sliding window is the same at every position; other masks need absolute positions.
        return RingLayerCache(int(band.before) + 1, _rows(config))
    return FullLayerCache(config)


def _enlarged(old: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if old.shape == shape:
        return old
    new = like.new_zeros(shape)
    if old.numel():
        new[:, : old.shape[1]] = old
    return new


def _select(memory: KeyValues | None, sequences: list[int]) -> KeyValues | None:
    if memory is None:
        return None
    starts = list(accumulate(memory.lengths.each, initial=0))
    rows = [torch.arange(starts[s], starts[s + 1], device=memory.k.device) for s in sequences]
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long, device=memory.k.device)
    lengths = Lengths.of([memory.lengths.each[s] for s in sequences], memory.k.device)
    return KeyValues(memory.k[index], memory.v[index], lengths)
