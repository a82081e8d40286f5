"""The residual stream of a model as a graph: what writes to it, and what reads it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from manyheads.attention import AttentionConfig
from manyheads.errors import InputError, short_repr
from manyheads.formatting import listed
from manyheads.lens.inputs.cached_run import HeadScope
from manyheads.taps import Head, Sublayer, Tap

EMBEDDINGS, LOGITS = "embeddings", "logits"
INPUT_NAMES = {Tap.QUERY: "query", Tap.KEY: "key", Tap.VALUE: "value"}
Mask = Bool[np.ndarray, "readers writers"]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """From what a part of a model writes to the input of another.

    >>> str(Edge("L0H3", "L2H1 key")), Edge.parse("embeddings → L0 mlp")
    ('L0H3 → L2H1 key', Edge(writer='embeddings', reader='L0 mlp'))
    """

    writer: str
    reader: str

    def __str__(self) -> str:
        return f"{self.writer} → {self.reader}"

    @classmethod
    def parse(cls, text: str) -> "Edge":
        ends = [end.strip() for end in re.split("→|->", text)]
        if len(ends) != 2 or not all(ends):
            raise InputError(f"{short_repr(text)} is not an edge", 'write "L0H3 → L2H1 key"')
        return cls(*ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualStep:
    """A sublayer that reads the residual stream and adds to it.

    `writers` and `readers` are its places among all. It reads what the first `reads` steps and the
    embeddings have written, `early` if not all steps before it. `owners` has the key head of each
    query head of an attention.
    """

    layer: int
    sublayer: Sublayer
    writers: range
    readers: range
    reads: int
    heads: int = 0
    owners: tuple[int, ...] | None = None
    early: bool = False

    @property
    def key_heads(self) -> int:
        return 0 if self.owners is None else max(self.owners) + 1

    def inputs(self) -> list[tuple[Tap, int]]:
        """The reader's tap and head at each place of `readers`, of an attention."""
        counts = {Tap.QUERY: self.heads, Tap.KEY: self.key_heads, Tap.VALUE: self.key_heads}
        return [(tap, head) for tap, count in counts.items() for head in range(count)]

    def readers_of(self, head: int) -> tuple[int, ...]:
        """The readers that the output of a head depends on, counted within the step."""
        if self.owners is None:
            return (0,)
        owner = self.heads + self.owners[head]
        return (head, owner, owner + self.key_heads)


class Graph:
    """The writers and readers of one residual stream, and the edges that can be between them."""

    def __init__(self, scope: HeadScope, *, parallel: bool = False) -> None:
        writers, readers, steps = [EMBEDDINGS], list[str](), list[ResidualStep]()
        limits = list[int]()
        for layer, config in enumerate(scope.stack.config.layers):
            before, entered = len(steps), len(writers)
            apart = parallel or config.residual.startswith("parallel")
            for sublayer in _sublayers(scope, layer):
                attends = sublayer is Sublayer.ATTENTION
                attention = config.attention.inner if attends and config.attention else None
                heads = scope.heads_of(layer) if attends else 0
                part = "mlp" if not attends else "mixer"
                whole = [f"L{layer} {part}"]
                written = [str(Head(layer, head)) for head in range(heads)] or whole
                inputs = whole if attention is None else _head_inputs(layer, attention)
                if attends and config.attention_rest is not None:
                    written, inputs = [], []
                early = apart and not attends
                steps.append(
                    ResidualStep(
                        layer=layer,
                        sublayer=sublayer,
                        writers=range(len(writers), len(writers) + len(written)),
                        readers=range(len(readers), len(readers) + len(inputs)),
                        reads=before if early else len(steps),
                        heads=heads,
                        owners=None if attention is None else attention.owners,
                        early=early,
                    )
                )
                limits += [entered if early else len(writers)] * len(inputs)
                writers += written
                readers += inputs
        self.steps = tuple(steps)
        self.writers = tuple(writers)
        self.readers = (*readers, LOGITS)
        self.limits = (*limits, len(writers))

    @cached_property
    def possible(self) -> Mask:
        """Which writers come before which readers."""
        return np.arange(len(self.writers)) < np.array(self.limits)[:, None]

    @cached_property
    def _places(self) -> tuple[dict[str, int], dict[str, int]]:
        readers = {name: place for place, name in enumerate(self.readers)}
        for step in self.steps:
            for head, owner in enumerate(step.owners or ()):
                for tap in (Tap.KEY, Tap.VALUE):
                    place = step.readers[step.inputs().index((tap, owner))]
                    readers[f"L{step.layer}H{head} {INPUT_NAMES[tap]}"] = place
        return {name: place for place, name in enumerate(self.writers)}, readers

    def mask(self, edges: Iterable[Edge | str | tuple[str, str]]) -> Mask:
        """The edges as a table; heads that share keys may each name the key they share."""
        mask = np.zeros_like(self.possible)
        writers, readers = self._places
        for item in edges:
            edge = Edge.parse(item) if isinstance(item, str) else item
            writer, reader = (edge.writer, edge.reader) if isinstance(edge, Edge) else edge
            for name, places, kind in ((writer, writers, "writer"), (reader, readers, "reader")):
                if name not in places:
                    raise InputError(
                        f"this model has no {kind} {short_repr(name)}",
                        f"use one of {listed(list(places), 12)}",
                    )
            row, column = readers[reader], writers[writer]
            if not self.possible[row, column]:
                raise InputError(
                    f"{writer} comes after {reader}, so that there is no edge between them",
                    "name a writer of a lower layer",
                )
            mask[row, column] = True
        return mask

    def edges(self, mask: Mask) -> tuple[Edge, ...]:
        return tuple(
            Edge(self.writers[column], self.readers[row]) for row, column in np.argwhere(mask)
        )

    def live(self, mask: Mask) -> Mask:
        """The edges from which a path leads to the logits."""
        live = np.zeros_like(mask)
        live[-1] = mask[-1]
        needed = live[-1].copy()
        for step in reversed(self.steps):
            for place, writer in enumerate(step.writers):
                if needed[writer]:
                    for reader in step.readers_of(place):
                        row = step.readers[reader]
                        live[row] = mask[row]
                        needed |= mask[row]
        return live


def _sublayers(scope: HeadScope, layer: int) -> Sequence[Sublayer]:
    if not scope.model.native:
        # What a wrapped layer adds besides its attention counts as its feed-forward.
        attends = scope.stack.config.layers[layer].attention is not None
        return (Sublayer.ATTENTION, Sublayer.FEEDFORWARD) if attends else (Sublayer.FEEDFORWARD,)
    return tuple(scope.stack.config.layers[layer].branches)


def _head_inputs(layer: int, config: AttentionConfig) -> list[str]:
    names = [f"{Head(layer, head)} query" for head in range(config.heads)]
    sharing = [
        [head for head, owner in enumerate(config.owners) if owner == key]
        for key in range(config.key_heads)
    ]
    shared = [
        f"L{layer}H{heads[0]}" + (f"-{heads[-1]}" if len(heads) > 1 else "") for heads in sharing
    ]
    return names + [f"{heads} {part}" for part in ("key", "value") for heads in shared]
