"""The projections of a model by address, and the rows or columns in them that belong to heads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from torch import nn

from manyheads.attention import Attention
from manyheads.errors import ConfigError
from manyheads.lens.results.addresses import Heads
from manyheads.mixers.mixer import Mixer
from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.models.stack import Stack
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import FeedForward
from manyheads.surgery.addresses import find_separable_heads
from manyheads.taps import Head, Sublayer

# Half-open ranges (start, stop).
Spans = tuple[tuple[int, int], ...]
# Head numbers by stack, layer and sublayer.
HeadsByAttention = dict[tuple[str, int, Sublayer], frozenset[int]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Projection:
    """Some rows of a linear layer with a name of their own, which `address` ends with.

    `linear` is the path of the layer itself. `attention` is None in a feed-forward or a mixer.
    `whole` means all rows of a layer whose parts have names.
    """

    address: str
    linear: str
    layer: nn.Linear
    rows: tuple[int, int]
    place: tuple[str, int, Sublayer]
    attention: Attention | None
    whole: bool = False

    @property
    def name(self) -> str:
        return self.address.rpartition(".")[2]

    @property
    def index(self) -> int:
        """The number of its layer in its stack."""
        return self.place[1]


def projections_of(model: nn.Module) -> list[Projection]:
    """Every projection that can be adapted or trained by its address.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, seed=0)
    >>> [part.name for part in projections_of(model) if not part.whole]
    ['query', 'key', 'value', 'output', 'expand', 'contract']
    """
    projections: list[Projection] = []
    for path, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, Layer)
            if stack.config.owners[index] != index:
                continue
            address = f"{path}.layers.{index}"
            for sublayer, attention in (
                (Sublayer.ATTENTION, layer.attention),
                (Sublayer.CROSS, layer.cross),
            ):
                if attention is not None:
                    place = (stack.name, index, sublayer)
                    projections += _of_attention(f"{address}.{sublayer.value}", attention, place)
            if layer.mixer is not None:
                place = (stack.name, index, Sublayer.ATTENTION)
                projections += _of_mixer(f"{address}.mixer", layer.mixer, place)
            place = (stack.name, index, Sublayer.FEEDFORWARD)
            feedforward, prefix = layer.feedforward, f"{address}.feedforward"
            if isinstance(feedforward, MixtureOfExperts):
                feedforward, prefix = feedforward.shared, f"{prefix}.shared"
            if feedforward is not None:
                projections += _of_feedforward(prefix, feedforward, place)
    return projections


def _of_attention(
    path: str, attention: Attention, place: tuple[str, int, Sublayer]
) -> Iterator[Projection]:
    make = partial(_projection, path, place=place, attention=attention)
    inputs = [("project", attention.project, attention.our_rows)]
    if attention.project_memory is not None:
        inputs.append(("project_memory", attention.project_memory, attention.memory_rows))
    for name, linear, rows in inputs:
        start = 0
        for part, count in rows.items():
            yield make(name, linear, part=part, rows=(start, start + count))
            start += count
        yield make(name, linear, whole=True)
    yield make("output", attention.output)


def _of_mixer(path: str, mixer: Mixer, place: tuple[str, int, Sublayer]) -> Iterator[Projection]:
    """Its linear layers as they are: what their rows mean differs from mixer to mixer."""
    for name, linear in mixer.named_children():
        if isinstance(linear, nn.Linear):
            yield _projection(path, name, linear, place=place)


def _of_feedforward(
    path: str, feedforward: FeedForward, place: tuple[str, int, Sublayer]
) -> Iterator[Projection]:
    make, hidden = partial(_projection, path, place=place), feedforward.config.hidden
    if feedforward.gated:
        yield make("expand", feedforward.expand, part="gate", rows=(0, hidden))
        yield make("expand", feedforward.expand, part="up", rows=(hidden, 2 * hidden))
    yield make("expand", feedforward.expand, whole=feedforward.gated)
    yield make("contract", feedforward.contract)


def _projection(
    path: str,
    name: str,
    linear: nn.Linear,
    *,
    place: tuple[str, int, Sublayer],
    attention: Attention | None = None,
    part: str = "",
    rows: tuple[int, int] | None = None,
    whole: bool = False,
) -> Projection:
    """A linear layer, or a named part of its rows."""
    return Projection(
        address=f"{path}.{part or name}",
        linear=f"{path}.{name}",
        layer=linear,
        rows=rows or (0, linear.out_features),
        place=place,
        attention=attention,
        whole=whole,
    )


def find_projections(
    parts: Sequence[Projection], patterns: Iterable[str], layers: tuple[int, ...] | Literal["all"]
) -> list[Projection]:
    """Projections whose address matches a pattern; one word is a name, "query" as "*.query".

    Fused matrices ("project", or a gated "expand") match only by their exact name.
    """
    count = 1 + max((part.index for part in parts), default=-1)
    wrong = [] if layers == "all" else [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"layers has {wrong[0]}", f"use 0 to {count - 1}")
    projections: dict[str, Projection] = {}
    for pattern in patterns:
        full = pattern if "." in pattern or "*" in pattern else f"*.{pattern}"
        last = full.rpartition(".")[2]
        fitting = [
            part
            for part in parts
            if fnmatchcase(part.address, full) and (not part.whole or part.name == last)
        ]
        if not fitting:
            names = sorted({part.name for part in parts})
            near = get_close_matches(pattern, [*names, *(part.address for part in parts)], n=1)
            remedy = f"use {near[0]!r}, " if near else "use "
            raise ConfigError(
                f"no projection is called {pattern!r}", f"{remedy}one of {', '.join(names)}"
            )
        projections |= {
            part.address: part for part in fitting if layers == "all" or part.index in layers
        }
    return _without_overlap(list(projections.values()))


def _without_overlap(parts: list[Projection]) -> list[Projection]:
    for part in parts:
        inside = [
            sibling.name
            for sibling in parts
            if sibling.linear == part.linear and sibling is not part
        ]
        if part.whole and inside:
            raise ConfigError(
                f"{part.name!r} and {inside[0]!r} are both rows of {part.linear}", "keep one"
            )
    return parts


def heads_by_attention(model: Model, heads: Heads) -> HeadsByAttention:
    """Heads by attention layer; raises for a head that does not exist."""
    result: dict[tuple[str, int, Sublayer], set[int]] = {}
    for address in find_separable_heads(model, heads):
        place = (address.stack, address.head.layer, address.sublayer)
        result.setdefault(place, set()).add(address.head.head)
    return {place: frozenset(numbers) for place, numbers in result.items()}


def rows_of_heads(part: Projection, heads: frozenset[int]) -> tuple[Spans, Spans | None]:
    """The rows of a part that belong only to these heads, and for "output" the columns.

    Keys and values that several queries share need all of these queries, since a change affects
    them all.
    """
    attention = part.attention
    if attention is None:
        raise ConfigError(f"{part.address} has no heads", "leave heads out, or that target")
    config = attention.config
    size, start = config.size, part.rows[0]
    match part.name:
        case "query":
            return join_spans((start + h * size, start + (h + 1) * size) for h in heads), None
        case "output":
            return (part.rows,), join_spans((h * size, (h + 1) * size) for h in heads)
        case "key" | "value":
            groups = _groups(part, heads)
            return join_spans((start + g * size, start + (g + 1) * size) for g in groups), None
    raise ConfigError(
        f"{part.address} cannot be divided among heads",
        "choose heads of query, key, value and output",
    )


def _groups(part: Projection, heads: frozenset[int]) -> set[int]:
    """The key heads that only these query heads use."""
    assert part.attention is not None
    owners = part.attention.config.owners
    sharing: dict[int, list[int]] = {}
    for head, owner in enumerate(owners):
        sharing.setdefault(owner, []).append(head)
    chosen = {owners[head] for head in heads}
    for group in sorted(chosen):
        others = [head for head in sharing[group] if head not in heads]
        if others:
            layer = part.index
            sharing_heads = ", ".join(str(Head(layer, head)) for head in sharing[group])
            raise ConfigError(
                f"{part.name} of {Head(layer, min(heads & set(sharing[group])))} is shared with "
                f"{', '.join(str(Head(layer, head)) for head in others)}",
                f"choose all of {sharing_heads}, or leave {part.name} out",
            )
    return chosen


def join_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Sorted spans, with adjacent ones joined.

    >>> join_spans([(4, 8), (0, 4), (12, 16)])
    ((0, 8), (12, 16))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)
