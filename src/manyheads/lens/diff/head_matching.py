"""Matching the heads of two models, and how far their weights have moved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.bridge.wrapped_parts import WrappedAttention
from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address, Block, blocks_of, find_heads, heads_at
from manyheads.lens.results.tables import ByHead
from manyheads.mixers.mixer import Mixer
from manyheads.models.build import Model
from manyheads.models.vision import Vision

SLICES = ("query", "key", "value", "output")


@dataclass(frozen=True, slots=True)
class HeadMatch:
    """The address in the second model of each head of the first, None if it was removed."""

    blocks: tuple[Block, ...]
    after: dict[Address, Address | None]

    @property
    def removed(self) -> tuple[Address, ...]:
        return tuple(head for head, other in self.after.items() if other is None)

    def rearranged(self, values: Float[np.ndarray, " h"], blocks: tuple[Block, ...]) -> np.ndarray:
        """Values of the second model's heads in the order of the first; NaN for removed heads."""
        addresses = (address for block in blocks for address in block.addresses)
        by_head: dict[Address | None, float] = dict(zip(addresses, values, strict=True))
        return np.array([by_head.get(other, np.nan) for other in self.after.values()])


def match_heads(
    before: Model, after: Model, origins: Mapping[Address, Address] | None = None
) -> HeadMatch:
    """Match heads by address, or by weights in attentions where some were removed.

    A pruned attention renumbers its heads: each remaining head is matched to the one with the
    nearest weights, unless `origins` gives the address in the first model of every head of the
    second; then layers may be missing too. Otherwise both models must have the same shape.
    """
    for what, first, second in _sizes(before, after, same_layers=origins is None):
        if first != second:
            raise InputError(
                f"the models differ in {what}: {first} and {second}",
                "compare models of the same shape",
            )
    if origins is not None:
        return _match_by_origins(before, after, origins)
    ours, after_blocks = blocks_of(before), blocks_of(after)
    other_blocks = {(block.stack, block.layer, block.sublayer): block for block in after_blocks}
    pairs: dict[Address, Address | None] = {}
    for block in ours:
        other = other_blocks.pop((block.stack, block.layer, block.sublayer), None)
        if other is None:
            pairs |= dict.fromkeys(block.addresses)
            continue
        address = block.addresses[0]
        one, two = _at(before, address), _at(after, other.addresses[0])
        _check_sizes(address, one, two)
        if block.heads == other.heads:
            pairs |= dict(zip(block.addresses, other.addresses, strict=True))
            continue
        counts = (
            f"{_where(address)} has {block.heads} heads in the first model and {other.heads} in "
            "the second"
        )
        if other.heads > block.heads:
            raise InputError(counts, "pass the model with more heads first")
        if isinstance(one, Mixer) or isinstance(two, Mixer):
            raise InputError(
                f"{counts}, and heads of mixers are matched by number only",
                "compare models with as many heads in that layer",
            )
        nearest = _nearest(one, two)
        pairs |= {
            head: other.addresses[nearest[index]] if index in nearest else None
            for index, head in enumerate(block.addresses)
        }
    for extra in other_blocks.values():
        raise InputError(
            f"the second model has {extra.sublayer.value} in layer {extra.layer} of "
            f"{extra.stack}, and the first has none there",
            "compare models with the same layers",
        )
    return HeadMatch(ours, pairs)


def _match_by_origins(before: Model, after: Model, origins: Mapping[Address, Address]) -> HeadMatch:
    ours = find_heads(before, "all")
    pairs: dict[Address, Address | None] = dict.fromkeys(ours)
    for head in find_heads(after, "all"):
        origin = origins.get(head)
        if origin is None:
            raise InputError(
                f"origins has no entry for {head} of the second model", "give one for every head"
            )
        if origin not in pairs:
            raise InputError(
                f"origins maps {head} to {origin}, which the first model does not have",
                f"use {ours[0]} to {ours[-1]}",
            )
        if pairs[origin] is not None:
            raise InputError(
                f"origins maps both {pairs[origin]} and {head} to {origin}", "use each origin once"
            )
        _check_sizes(origin, _at(before, origin), _at(after, head))
        pairs[origin] = head
    return HeadMatch(blocks_of(before), pairs)


def weight_changes(before: Model, after: Model, match: HeadMatch) -> ByHead:
    """The relative change of each head's weights: |after - before| / |before|, Frobenius norms.

    "query", "key", "value" and "output" are its rows and columns of the projections, "all" the four
    together. Heads that share keys share these changes. Of a wrapped model and of mixers only
    "output" is known.
    """
    rows = {name: np.full(len(match.after), np.nan) for name in (*SLICES, "all")}
    for index, (address, other) in enumerate(match.after.items()):
        if other is None:
            continue
        one, two = (
            _slices(_at(model, at), at.head.head)
            for model, at in ((before, address), (after, other))
        )
        # Of a wrapped model and of mixers only the output projection is known.
        both = [name for name in SLICES if name in one and name in two]
        names = [name for name in both if one[name].shape == two[name].shape]
        if not names:
            continue
        moved = {name: float((two[name] - one[name]).norm()) for name in names}
        norms = {name: float(one[name].norm()) for name in names}
        for name in names:
            rows[name][index] = _relative(moved[name], norms[name])
        rows["all"][index] = _relative(
            float(np.hypot.reduce(list(moved.values()))),
            float(np.hypot.reduce(list(norms.values()))),
        )
    return ByHead(kind="weight changes", blocks=match.blocks, means=rows)


def _relative(moved: float, norm: float) -> float:
    if norm > 0:
        return moved / norm
    return 0.0 if moved == 0 else float("inf")


def _slices(attention: Attention | Mixer, head: int) -> dict[str, Float[Tensor, "d c"]]:
    """The four weight slices of one head, in float64 on the CPU; of a mixer the output alone."""
    config, slices = attention.config, {}
    if isinstance(attention, Attention) and not isinstance(attention, WrappedAttention):
        for name, rows in attention.projections().items():
            if name in SLICES:
                index = head if name == "query" else config.owners[head]
                slices[name] = rearrange(rows.detach(), "(h d) c -> h d c", d=config.size)[index]
    if attention.output is not None:
        columns = attention.output.weight.detach()
        slices["output"] = rearrange(columns, "c (h d) -> h d c", h=config.heads)[head]
    return {name: weight.double().cpu() for name, weight in slices.items()}


def _nearest(before: Attention | Mixer, after: Attention | Mixer) -> dict[int, int]:
    """Greedy matching of remaining heads to original ones, nearest pairs first."""
    distances = torch.cdist(_flattened(before), _flattened(after)).numpy()
    pairs: dict[int, int] = {}
    for flat in np.argsort(distances, axis=None, kind="stable"):
        index, other = (int(place) for place in np.unravel_index(flat, distances.shape))
        if index not in pairs and other not in pairs.values():
            pairs[index] = other
    return pairs


def _flattened(attention: Attention | Mixer) -> Float[Tensor, "h all"]:
    heads = [_slices(attention, head).values() for head in range(attention.config.heads)]
    return torch.stack([torch.cat([weight.flatten() for weight in head]) for head in heads])


def _at(model: Model, address: Address) -> Attention | Mixer:
    return heads_at(model.stacks()[address.stack], address.head.layer, address.sublayer)


def _sizes(before: Model, after: Model, same_layers: bool) -> Iterator[tuple[str, object, object]]:
    """What must be equal: its name, and its value in both models."""
    yield "stacks", sorted(before.stacks()), sorted(after.stacks())
    read = ["images" if model.reads_images else "texts" for model in (before, after)]
    yield "inputs", read[0], read[1]
    yield "type", type(before).__name__, type(after).__name__
    for name, stack in before.stacks().items():
        other = after.stacks()[name]
        yield f"width of {name}", stack.config.width, other.config.width
        if same_layers:
            yield f"number of layers in {name}", len(stack.layers), len(other.layers)
    if not isinstance(before, Vision) and not isinstance(after, Vision):
        one, two = (model.config.embedding.vocabulary for model in (before, after))
        yield "vocabulary size", one, two


def _where(address: Address) -> str:
    return f"{address.sublayer.value} in layer {address.head.layer} of {address.stack}"


def _check_sizes(address: Address, before: Attention | Mixer, after: Attention | Mixer) -> None:
    kinds = [type(attention.config).__name__ for attention in (before, after)]
    if isinstance(before, Mixer) and isinstance(after, Mixer) and kinds[0] != kinds[1]:
        raise InputError(
            f"{_where(address)} is {kinds[0]} in the first model and {kinds[1]} in the second",
            "compare models with the same kinds of layers",
        )
    if isinstance(before, Mixer) or isinstance(after, Mixer):
        # Statistics and outputs of attention and of a mixer in its place can be compared.
        return
    if before.config.size != after.config.size:
        raise InputError(
            f"{_where(address)} has heads of size {before.config.size} in the first model and "
            f"{after.config.size} in the second",
            "compare models with equal head sizes",
        )
