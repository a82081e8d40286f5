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


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer of the module at `path`, or a `part` of its rows with a name of its own.

    `attention` is None in a feed-forward or a mixer. `whole` means all rows of a layer whose parts
    have names.
    """

    path: str
    layer_name: str
    layer: nn.Linear
    place: tuple[str, int, Sublayer]
    attention: Attention | None = None
    part: str = ""
    span: tuple[int, int] | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        return self.part or self.layer_name

    @property
    def address(self) -> str:
        return f"{self.path}.{self.name}"

    @property
    def linear(self) -> str:
        """The path of the layer itself."""
        return f"{self.path}.{self.layer_name}"

    @property
    def rows(self) -> tuple[int, int]:
        return self.span or (0, self.layer.out_features)

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
            for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS):
                attention: Attention | None = getattr(layer, sublayer.value)
                if attention is not None:
                    place = (stack.name, index, sublayer)
                    projections += _of_attention(f"{address}.{sublayer.value}", attention, place)
            place = (stack.name, index, Sublayer.ATTENTION)
            # Linear layers as they are: what their rows mean differs from mixer to mixer.
            for name, linear in () if layer.mixer is None else layer.mixer.named_children():
                if isinstance(linear, nn.Linear):
                    projections.append(Projection(f"{address}.mixer", name, linear, place))
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
    make = partial(Projection, path, place=place, attention=attention)
    for name, linear, rows in attention.input_layers:
        start = 0
        for part, count in rows.items():
            yield make(name, linear, part=part, span=(start, start + count))
            start += count
        yield make(name, linear, whole=True)
    yield make("output", attention.output)


def _of_feedforward(
    path: str, feedforward: FeedForward, place: tuple[str, int, Sublayer]
) -> Iterator[Projection]:
    make, hidden = partial(Projection, path, place=place), feedforward.config.hidden
    if feedforward.gated:
        yield make("expand", feedforward.expand, part="gate", span=(0, hidden))
        yield make("expand", feedforward.expand, part="up", span=(hidden, 2 * hidden))
    yield make("expand", feedforward.expand, whole=feedforward.gated)
    yield make("contract", feedforward.contract)


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
    chosen = list(projections.values())
    for part in chosen:
        siblings = [other for other in chosen if other.linear == part.linear and other is not part]
        if part.whole and siblings:
            raise ConfigError(
                f"{part.name!r} and {siblings[0].name!r} are both rows of {part.linear}", "keep one"
            )
    return chosen


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
    chosen = {owners[head] for head in heads}
    for group in sorted(chosen):
        sharing = [head for head, owner in enumerate(owners) if owner == group]
        names = {head: str(Head(part.index, head)) for head in sharing}
        others = [names[head] for head in sharing if head not in heads]
        if others:
            raise ConfigError(
                f"{part.name} of {names[min(heads & set(sharing))]} is shared with "
                f"{', '.join(others)}",
                f"choose all of {', '.join(names.values())}, or leave {part.name} out",
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
