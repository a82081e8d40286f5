"""One call of an attention of `transformers`: padded tensors and a mask, as a kernel's request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map

from manyheads.bridge.mask_rules import (
    FunctionMask,
    Visible,
    agrees,
    moves_with_start,
    read_rule,
    runs,
    tensor_masks,
)
from manyheads.errors import InputError
from manyheads.kernels.contract import Request
from manyheads.parts.masks import Full, Mask, MaskBySequence, simple_form
from manyheads.parts.positions.relative import DenseBias
from manyheads.ragged import Lengths, Ragged

# What a mask of `transformers` calls without looking at its values.
SHAPE_ONLY = {
    *("__get__", "dim", "size", "stride", "numel", "is_floating_point", "is_complex", "__len__"),
    *("get_device", "is_contiguous", "element_size", "data_ptr", "nelement", "untyped_storage"),
}
# A dense mask hides a key by the smallest number of its dtype, or by -10,000 in older models.
HIDDEN_BELOW = -9000.0
SAME_MASK = {"contiguous", "clone", "detach"}


class LazyMask(torch.Tensor):
    """A four-dimensional mask of `transformers` that owns one number until somebody reads it.

    It is of floats, 0 where a key is seen, because models compute with it. Whatever they compute
    makes it dense; our attention function reads `arguments` instead.
    """

    arguments: dict[str, Any]
    visible_by_place: dict[Any, Any]

    @staticmethod
    def of(arguments: dict[str, Any]) -> "LazyMask":
        shape = [arguments[name] for name in ("batch_size", "q_length", "kv_length")]
        dtype = arguments.get("dtype") or torch.float32
        zero = torch.zeros((), dtype=dtype, device=arguments.get("device", "cpu"))
        mask = zero.expand(shape[0], 1, *shape[1:]).as_subclass(LazyMask)
        offset = arguments["q_offset"]
        # A static cache advances its offset in place, before the layers read it.
        offset = offset.clone() if isinstance(offset, Tensor) else offset
        mask.arguments = {**arguments, "q_offset": offset}
        mask.visible_by_place = {}
        return mask

    def dense(self) -> Tensor:
        from transformers.masking_utils import eager_mask

        return eager_mask(**{**self.arguments, "allow_is_bidirectional_skip": False})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in SHAPE_ONLY:
                return func(*args, **(kwargs or {}))
            moves = name == "to" and not kwargs and isinstance(args[-1], str | torch.device)
            if name in SAME_MASK or (moves and len(args) == 2):
                return args[0]
            if name == "__getitem__" and _takes_all(args[0].shape, args[1]):
                return args[0]
            args, kwargs = tree_map(_as_dense, (args, kwargs or {}))
            return func(*args, **kwargs)


def _takes_all(shape: torch.Size, index: Any) -> bool:
    """Whether an index is slices that leave nothing out."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape) or not all(isinstance(part, slice) for part in parts):
        return False
    pairs = zip(parts, shape, strict=False)
    return all(part.indices(size) == (0, size, 1) for part, size in pairs)


def _as_dense(value: Any) -> Any:
    return value.dense() if isinstance(value, LazyMask) else value


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedCall:
    """The arguments of an attention function of `transformers`."""

    query: Float[Tensor, "b h n d"]
    key: Float[Tensor, "b g m d"]
    value: Float[Tensor, "b g m e"]
    mask: Tensor | None
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    sink: Float[Tensor, " h"] | None = None
    position_bias: Tensor | None = None
    chosen_keys: Int[Tensor, "b n k"] | None = None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> "PaddedCall":
        if options.get("block_indices") is not None:
            raise InputError("attention over chosen blocks of keys is not read here")
        sink, scale = options.get("s_aux"), options.get("scaling")
        return cls(
            query=query,
            key=key,
            value=value,
            mask=mask,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            dropout=float(options.get("dropout") or 0.0),
            softcap=options.get("softcap"),
            sink=None if sink is None else sink.flatten(),
            position_bias=options.get("position_bias"),
            chosen_keys=options.get("indices"),
        )

    def visible(
        self, *, cross: bool, true_lengths: Lengths | None
    ) -> tuple[Visible, Tensor | None]:
        """Which tokens are real and the mask between them, and what a dense mask adds to scores.

        `true_lengths` are the lengths of the queries, without padding, where the caller knows them.
        """
        batch, (queries, keys) = self.query.shape[0], (self.query.shape[2], self.key.shape[2])
        if self.chosen_keys is not None:
            return self._dense(self._mask_of_chosen(), cross, true_lengths)
        if self.mask is None:
            device = self.query.device
            lengths = Lengths.of([queries] * batch, device)
            if cross and true_lengths is not None:
                lengths = true_lengths.to(device)
            zeros = (0,) * batch
            return Visible(lengths, Lengths.of([keys] * batch, device), zeros, zeros, Full()), None
        if not isinstance(self.mask, LazyMask):
            return self._dense(self.mask, cross, true_lengths)
        place = cross, queries, keys, true_lengths, self.query.device
        if place not in self.mask.visible_by_place:
            self.mask.visible_by_place[place] = self._lazy(self.mask, cross, true_lengths)
        visible: Visible | None = self.mask.visible_by_place[place]
        if visible is None:
            return self._dense(self.mask.dense(), cross, true_lengths)
        return visible, None

    def _lazy(self, mask: LazyMask, cross: bool, true_lengths: Lengths | None) -> Visible | None:
        """From the arguments of the mask function; None where only the dense mask tells."""
        batch, (queries, keys) = self.query.shape[0], (self.query.shape[2], self.key.shape[2])
        arguments, device = mask.arguments, self.query.device
        first_query, first_key = int(arguments["q_offset"]), int(arguments["kv_offset"])
        real = _real_keys(arguments["attention_mask"], batch, first_key, keys, device)
        if not cross:
            # A static cache has room behind the last query.
            real = real & (torch.arange(keys, device=device) < first_query + queries - first_key)
        key_runs = runs(real)
        if key_runs is None:
            return None
        if cross:
            lengths = [queries] * batch if true_lengths is None else list(true_lengths.each)
            query_runs = [(0, length) for length in lengths]
        else:
            own = real[:, first_query - first_key :][:, :queries]
            spans = runs(own)
            assert spans is not None, "part of a run is a run"
            query_runs = spans
            # The last query of a sequence must be at its last key.
            shift = first_query - first_key
            pairs = zip(query_runs, key_runs, strict=True)
            if any(query[1] + shift != key[1] for query, key in pairs if query[1] > query[0]):
                return None
        rule = self._rule(arguments, cross, first_key, [start for start, _ in key_runs])
        if rule is None:
            return None
        return Visible(
            Lengths.of([stop - start for start, stop in query_runs], device),
            Lengths.of([stop - start for start, stop in key_runs], device),
            tuple(start for start, _ in query_runs),
            tuple(start for start, _ in key_runs),
            rule,
        )

    def _rule(
        self, arguments: dict[str, Any], cross: bool, first_key: int, starts: Sequence[int]
    ) -> Mask | None:
        function, rule = arguments["mask_function"], read_rule(arguments["mask_function"])
        if rule is not None and not (first_key and moves_with_start(rule)):
            offset = int(arguments["q_offset"])
            queries = range(offset, offset + self.query.shape[2])
            keys = range(first_key, first_key + self.key.shape[2])
            padded = any(starts) and moves_with_start(rule)
            if padded or agrees(rule, function, queries, keys, self.query.device):
                return rule
        if cross or arguments.get("use_vmap"):
            return None
        masks = (FunctionMask(function, index, first_key + at) for index, at in enumerate(starts))
        return MaskBySequence(tuple(masks))

    def _mask_of_chosen(self) -> Tensor:
        """The mask together with the keys that an indexer chose for each query."""
        assert self.chosen_keys is not None
        hidden = self.query.new_ones(self.query.shape[0], self.query.shape[2], self.key.shape[2])
        hidden = hidden.bool().scatter(-1, self.chosen_keys.long(), False)[:, None]
        lowest = torch.finfo(self.query.dtype).min
        mask = _as_dense(self.mask)
        if mask is None:
            return torch.zeros_like(hidden, dtype=self.query.dtype).masked_fill(hidden, lowest)
        return mask.masked_fill(hidden, False if mask.dtype == torch.bool else lowest)

    def _dense(
        self, mask: Tensor, cross: bool, true_lengths: Lengths | None
    ) -> tuple[Visible, Tensor | None]:
        """From a mask with a value for each pair."""
        batch, queries, keys = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        mask = mask[..., :keys].expand(-1, -1, queries, -1)
        added = None
        if mask.dtype == torch.bool:
            seen = mask.any(1)
        else:
            hidden = mask <= HIDDEN_BELOW
            seen = ~hidden.all(1)
            if bool((mask.masked_fill(hidden, 0) != 0).any()) or mask.shape[1] > 1:
                added = mask
        zeros, device = (0,) * batch, self.query.device
        query_lengths, key_lengths = [queries] * batch, [keys] * batch
        if true_lengths is not None and (cross or queries == keys):
            rows = torch.arange(keys, device=device) >= _counts(true_lengths, device)
            if cross or not bool((seen & rows[:, None, :] & ~rows[:, :queries, None]).any()):
                query_lengths = list(true_lengths.each)
                key_lengths = key_lengths if cross else list(true_lengths.each)
        return (
            Visible(
                Lengths.of(query_lengths, device),
                Lengths.of(key_lengths, device),
                zeros,
                zeros,
                tensor_masks(seen, query_lengths, key_lengths),
            ),
            added,
        )


def _counts(lengths: Lengths, device: torch.device) -> Int[Tensor, "b 1"]:
    return torch.tensor(lengths.each, device=device)[:, None]


def _real_keys(
    mask: Tensor | None, batch: int, first: int, keys: int, device: torch.device
) -> Bool[Tensor, "b m"]:
    """Which of the keys are tokens; those that the two-dimensional mask does not reach are not."""
    if mask is None:
        return torch.ones(batch, keys, dtype=torch.bool, device=device)
    short = first + keys - mask.shape[1]
    mask = mask.to(device) != 0
    if short > 0:
        mask = torch.nn.functional.pad(mask, (0, short))
    return mask[:, first : first + keys].expand(batch, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the real tokens of a padded batch stand; None if all of them are real."""

    lengths: Lengths
    shape: tuple[int, int]
    index: Int[Tensor, " n"] | None = field(default=None)

    @classmethod
    def of(cls, lengths: Lengths, starts: Sequence[int], shape: tuple[int, int]) -> "Packing":
        if not any(starts) and all(length == shape[1] for length in lengths.each):
            return cls(lengths, shape)
        first = torch.tensor(starts, device=lengths.positions.device) + shape[1] * torch.arange(
            shape[0], device=lengths.positions.device
        )
        return cls(lengths, shape, first[lengths.sequence_of_token] + lengths.positions)

    def pack(self, padded: Tensor) -> Ragged:
        """The real tokens of (batch, length, ...)."""
        flat = padded.flatten(0, 1)
        return Ragged(flat if self.index is None else flat[self.index], self.lengths)

    def unpack(self, values: Tensor, like: Tensor | None = None) -> Tensor:
        """The padded tensor again, with zeros or the values of `like` where there is padding."""
        if self.index is None:
            return values.unflatten(0, self.shape)
        count = self.shape[0] * self.shape[1]
        flat = (
            values.new_zeros(count, *values.shape[1:])
            if like is None
            else like.reshape(count, *values.shape[1:])
        )
        return flat.index_copy(0, self.index, values.to(flat)).unflatten(0, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """A padded call without its padding: ragged queries, keys and values, and the request."""

    query: Ragged
    key: Ragged
    value: Ragged
    request: Request
    packing: Packing

    @classmethod
    def of(cls, call: PaddedCall, *, cross: bool, true_lengths: Lengths | None) -> "PackedCall":
        visible, added = call.visible(cross=cross, true_lengths=true_lengths)
        shapes = [(x.shape[0], x.shape[2]) for x in (call.query, call.key)]
        queries = Packing.of(visible.queries, visible.query_starts, shapes[0])
        keys = Packing.of(visible.keys, visible.key_starts, shapes[1])
        request = Request(
            queries=visible.queries,
            keys=visible.keys,
            mask=_simplest(visible),
            scale=call.scale,
            bias=_bias(call, added, visible),
            sink=call.sink,
            softcap=call.softcap,
            dropout=call.dropout,
        )
        query, key, value = (
            packing.pack(rearrange(x, "b h n d -> b n h d"))
            for packing, x in ((queries, call.query), (keys, call.key), (keys, call.value))
        )
        return cls(query, key, value, request, queries)

    def unpack(self, output: Float[Tensor, "tokens h e"]) -> Float[Tensor, "b n h e"]:
        return self.packing.unpack(output).contiguous()


def _simplest(visible: Visible) -> Mask:
    """Tensor masks that hide nothing are no masks."""
    mask = visible.mask
    if not isinstance(mask, MaskBySequence):
        return mask
    tensors = [getattr(part, "visible", None) for part in mask.each]
    if tensors and all(visible is not None and bool(visible.all()) for visible in tensors):
        return Full()
    return mask


def _bias(call: PaddedCall, added: Tensor | None, visible: Visible) -> DenseBias | None:
    terms = [term for term in (call.position_bias, added) if term is not None]
    if not terms:
        return None
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    total = total[..., : call.key.shape[2]].expand(-1, -1, call.query.shape[2], -1)
    if any(visible.key_starts):
        rows = total.expand(call.query.shape[0], -1, -1, -1)
        moved = [row.roll(-at, -1) for row, at in zip(rows, visible.key_starts, strict=True)]
        total = torch.stack(moved)
    lengths = visible.queries
    starts = torch.tensor(visible.query_starts, device=total.device)
    return DenseBias(
        total, lengths.sequence_of_token, lengths.positions + starts[lengths.sequence_of_token]
    )


def is_causal(mask: Mask) -> bool:
    """Whether no query sees a later key.

    >>> from manyheads.parts.masks import Causal
    >>> is_causal(Causal()), is_causal(Full())
    (True, False)
    """
    return mask.reach.after == 0 or simple_form(mask, 2, 2) == "causal"
