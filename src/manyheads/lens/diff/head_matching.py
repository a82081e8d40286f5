"""Which head of one model is which of another, and how far its weights have moved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address, Block, attention_at, blocks_of, stacks_of
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model
from manyheads.models.vision import Vision

SLICES = ("query", "key", "value", "output")


@dataclass(frozen=True, slots=True)
class Match:
    """For each head of the first model its place in the second, or None where it is gone."""

    blocks: tuple[Block, ...]
    after: dict[Address, Address | None]

    @property
    def gone(self) -> tuple[Address, ...]:
        return tuple(head for head, other in self.after.items() if other is None)

    def rearranged(self, values: Float[np.ndarray, " h"], blocks: tuple[Block, ...]) -> np.ndarray:
        """Values by the second model's heads, in the order of the first's; NaN for the gone."""
        places = {
            address: place
            for place, address in enumerate(head for block in blocks for head in block.addresses)
        }
        return np.array(
            [np.nan if other is None else values[places[other]] for other in self.after.values()]
        )


def match_heads(
    before: Model, after: Model, origins: Mapping[Address, Address] | None = None
) -> Match:
    """By address where an attention has as many heads as before; by weights where some are gone.

    A pruned attention numbers its heads anew: each that is left is taken to be the one whose
    weights are nearest, unless `origins` say for every head of the second model which it was in the
    first; then whole layers may be gone too. Models of other shapes are refused.
    """
    _check_models(before, after, same_layers=origins is None)
    if origins is not None:
        return _told(before, after, origins)
    ours, theirs = blocks_of(before), blocks_of(after)
    other_blocks = {(each.stack, each.layer, each.sublayer): each for each in theirs}
    found: dict[Address, Address | None] = {}
    for block in ours:
        other = other_blocks.pop((block.stack, block.layer, block.sublayer), None)
        if other is None:
            found |= dict.fromkeys(block.addresses)
            continue
        one, two = _attention(before, block), _attention(after, other)
        _check_sizes(block.addresses[0], one, two)
        _check_counts(block, other)
        if block.heads == other.heads:
            found |= dict(zip(block.addresses, other.addresses, strict=True))
        else:
            kept = _nearest(one, two)
            found |= {
                address: other.addresses[kept[place]] if place in kept else None
                for place, address in enumerate(block.addresses)
            }
    for extra in other_blocks.values():
        raise InputError(
            f"the second model has {extra.sublayer.value} in layer {extra.layer} of "
            f"{extra.stack}, and the first has none there",
            "compare models of the same layers",
        )
    return Match(ours, found)


def _told(before: Model, after: Model, origins: Mapping[Address, Address]) -> Match:
    """As somebody says who knows."""
    ours = [address for block in blocks_of(before) for address in block.addresses]
    theirs = [address for block in blocks_of(after) for address in block.addresses]
    found: dict[Address, Address | None] = dict.fromkeys(ours)
    for head in theirs:
        origin = origins.get(head)
        if origin is None:
            raise InputError(
                f"origins say nothing of {head} in the second model", "name all its heads"
            )
        if origin not in found:
            raise InputError(
                f"origins take {head} to {origin}, which the first model does not have",
                f"use {ours[0]} to {ours[-1]}",
            )
        if found[origin] is not None:
            raise InputError(
                f"origins take {found[origin]} and {head} both to {origin}", "name each but once"
            )
        _check_sizes(origin, _at(before, origin), _at(after, head))
        found[origin] = head
    return Match(blocks_of(before), found)


def weight_changes(before: Model, after: Model, match: Match) -> ByHead:
    """By how much the slices of each head changed: |after - before| / |before|, Frobenius norms.

    "query", "key", "value" and "output" are its rows and columns of the projections, "all" the four
    together. Heads that share keys share those changes.
    """
    rows = {name: np.full(len(match.after), np.nan) for name in (*SLICES, "all")}
    for place, (address, other) in enumerate(match.after.items()):
        if other is None:
            continue
        one, two = (
            _slices(_at(model, at), at) for model, at in ((before, address), (after, other))
        )
        moved = {name: float((two[name] - one[name]).norm()) for name in SLICES}
        norms = {name: float(one[name].norm()) for name in SLICES}
        for name in SLICES:
            rows[name][place] = _share(moved[name], norms[name])
        rows["all"][place] = _share(
            float(np.hypot.reduce(list(moved.values()))),
            float(np.hypot.reduce(list(norms.values()))),
        )
    return ByHead(kind="weight changes", blocks=match.blocks, means=rows)


def _share(moved: float, norm: float) -> float:
    if norm > 0:
        return moved / norm
    return 0.0 if moved == 0 else float("inf")


def _slices(attention: Attention, address: Address) -> dict[str, Float[Tensor, "d c"]]:
    """The four slices of one head, in float64 on the host."""
    config, head = attention.config, address.head.head
    found = {}
    for name, rows in attention.projections().items():
        if name in SLICES:
            place = head if name == "query" else config.owners[head]
            found[name] = rearrange(rows.detach(), "(h d) c -> h d c", d=config.size)[place]
    columns = attention.output.weight.detach()
    found["output"] = rearrange(columns, "c (h d) -> h d c", d=config.size)[head]
    return {name: each.double().cpu() for name, each in found.items()}


def _nearest(before: Attention, after: Attention) -> dict[int, int]:
    """For each head that is left, the place of the nearest that no nearer one has taken."""
    distances = torch.cdist(_flattened(before), _flattened(after)).numpy()
    found: dict[int, int] = {}
    for flat in np.argsort(distances, axis=None, kind="stable"):
        place, other = (int(each) for each in np.unravel_index(flat, distances.shape))
        if place not in found and other not in found.values():
            found[place] = other
    return found


def _flattened(attention: Attention) -> Float[Tensor, "h all"]:
    heads = Block(0, attention.config.heads).addresses
    return torch.stack(
        [
            torch.cat([each.flatten() for each in _slices(attention, head).values()])
            for head in heads
        ]
    )


def _attention(model: Model, block: Block) -> Attention:
    return attention_at(stacks_of(model)[block.stack], block.layer, block.sublayer)


def _at(model: Model, address: Address) -> Attention:
    return attention_at(stacks_of(model)[address.stack], address.head.layer, address.sublayer)


def _check_models(before: Model, after: Model, *, same_layers: bool) -> None:
    for what, one, two in _sizes(before, after, same_layers):
        if one != two:
            raise InputError(
                f"the first model has {what} {one} and the second {two}",
                "compare models of the same shape",
            )


def _sizes(before: Model, after: Model, same_layers: bool) -> Iterator[tuple[str, object, object]]:
    yield "stacks", sorted(stacks_of(before)), sorted(stacks_of(after))
    read = ["images" if isinstance(each, Vision) else "texts" for each in (before, after)]
    yield "to read", read[0], read[1]
    yield "the form of", type(before).__name__, type(after).__name__
    for name, stack in stacks_of(before).items():
        other = stacks_of(after)[name]
        yield f"in {name} a width of", stack.config.width, other.config.width
        if same_layers:
            yield f"in {name} layers:", len(stack.layers), len(other.layers)
    if not isinstance(before, Vision) and not isinstance(after, Vision):
        one, two = (each.config.embedding.vocabulary for each in (before, after))
        yield "a vocabulary of", one, two


def _where(address: Address | Block) -> str:
    layer = address.layer if isinstance(address, Block) else address.head.layer
    return f"{address.sublayer.value} in layer {layer} of {address.stack}"


def _check_sizes(address: Address, before: Attention, after: Attention) -> None:
    if before.config.size != after.config.size:
        raise InputError(
            f"{_where(address)} has heads of size {before.config.size} in the first model and "
            f"{after.config.size} in the second",
            "compare models whose heads are of one size",
        )


def _check_counts(before: Block, after: Block) -> None:
    if after.heads > before.heads:
        raise InputError(
            f"{_where(before)} has {before.heads} heads in the first model and "
            f"{after.heads} in the second",
            "give the model with more heads first",
        )
