"""One answer of a model to one text, and what becomes of it under other weights of attention.

Only the queries that the answer is read off decide: what they look at, in some layers or all, is
how the rest of the text reaches them. Their weights can be looked at, followed by a gradient, and
replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Edits, Part, Trunk
from manyheads.lens.inputs.texts import Given
from manyheads.models.decoder import Decoder
from manyheads.models.readout import ClassHead, ReadoutLayer, pooled
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.masks import visible
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap

# The position of each text whose answer is looked at; whole texts with classes need none.
At = Literal["last"] | Sequence[int]
# From a layer, the number of a copy and its weights to the weights that take their place.
Reshape = Callable[[int, int, Float[Tensor, "h r s"]], Float[Tensor, "h r s"]]

# Weights that are formed at once by copies of a text side by side: 256 MB.
WEIGHTS_AT_ONCE = 2**26


class _Reshaping(Edits):
    """A watcher that lets some queries of some layers look elsewhere."""

    def __init__(self, part: Part, layers: Sequence[int], rows: Tensor, reshape: Reshape) -> None:
        super().__init__({})
        self._layers = {part.site(layer, Tap.PATTERN): layer for layer in layers}
        self._rows, self._reshape = rows, reshape

    def wants(self, site: Site) -> bool:
        return site in self._layers

    def see(self, site: Site, value: Ragged | Patterns) -> Patterns:
        assert isinstance(value, Patterns)
        layer, found = self._layers[site], []
        for copy, pattern in enumerate(value.each):
            rows = self._reshape(layer, copy, pattern[:, self._rows])
            found.append(pattern.index_copy(1, self._rows, rows.to(pattern.dtype)))
        return Patterns(tuple(found))


@dataclass(frozen=True, eq=False)
class Decision:
    """The answer at one place of one text; `rows` are the queries it is read off."""

    part: Part
    layers: tuple[int, ...]
    trunk: Trunk
    rows: Int[Tensor, " r"]

    @cached_property
    def probabilities(self) -> Float[Tensor, " v"]:
        """Of every answer, as things stand."""
        with torch.no_grad():
            return self._read(self.trunk.hidden, 1)[0]

    @property
    def answer(self) -> int:
        return int(self.probabilities.argmax())

    @cached_property
    def weights(self) -> dict[int, Float[Tensor, "h r s"]]:
        """What the deciding queries look at in each layer, as things stand."""
        found: dict[int, Tensor] = {}

        def keep(layer: int, _: int, weights: Tensor) -> Tensor:
            found[layer] = weights
            return weights

        with torch.no_grad():
            self.under(keep)
        return found

    @cached_property
    def seen(self) -> dict[int, Bool[Tensor, "r s"]]:
        """Which keys the mask of each layer shows to the deciding queries."""
        found = {}
        for layer, weights in self.weights.items():
            length = self._queries
            mask = self.part.attention(layer).config.mask
            every = visible(mask, range(length), length, weights.shape[-1], weights.device)
            found[layer] = every.expand(length, -1)[self.rows]
        return found

    @cached_property
    def keys(self) -> Int[Tensor, " k"]:
        """The keys that any deciding query may see in any of the layers."""
        return torch.stack([each.any(0) for each in self.seen.values()]).any(0).nonzero().flatten()

    def slopes(self) -> dict[int, Float[Tensor, "h r s"]]:
        """The gradient of the answer's probability by each of the weights."""
        added = {layer: torch.zeros_like(each) for layer, each in self.weights.items()}
        for each in added.values():
            each.requires_grad_()
        with torch.enable_grad():
            found = self.under(lambda layer, _, weights: weights + added[layer])
            slopes = torch.autograd.grad(found[0, self.answer], list(added.values()))
        return dict(zip(added, slopes, strict=True))

    def under(self, reshape: Reshape, copies: int = 1) -> Float[Tensor, "copies v"]:
        """The probabilities of all answers in copies of the text whose weights are replaced."""
        watch = _Reshaping(self.part, self.layers, self.rows, reshape)
        return self._read(self.trunk.resume(min(self.layers), watch, copies), copies)

    @property
    def copies_at_once(self) -> int:
        """How many copies can run side by side."""
        heads = max(len(each) for each in self.weights.values())
        keys = max(each.shape[-1] for each in self.weights.values())
        return max(1, WEIGHTS_AT_ONCE // (heads * self._queries * keys))

    @property
    def has_sink(self) -> dict[int, bool]:
        """Whether weight may fall on no key at all."""
        return {layer: self.part.attention(layer).sink is not None for layer in self.layers}

    @property
    def _queries(self) -> int:
        return self.trunk.head_outputs(self.layers[0]).lengths.total

    def _read(self, hidden: Ragged, copies: int) -> Float[Tensor, "copies v"]:
        model = self.part.model
        readout = _readout(self.part)
        if isinstance(readout.config, ClassHead):
            x = pooled(hidden.values, hidden.lengths, readout.config.pool)
        else:
            x = hidden.values.unflatten(0, (copies, -1))[:, int(self.rows[0])]
        vectors = readout.vectors(None if isinstance(model, Vision) else model.table)
        return F.linear(readout.features(x), vectors, readout.bias).float().softmax(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A decision before its text has been read."""

    part: Part
    layers: tuple[int, ...]
    given: Given
    rows: range

    def open(self) -> Decision:
        """The text is read once; all that follows goes on from the first of the layers."""
        device = next(self.part.model.parameters()).device
        with torch.no_grad():
            trunk = Trunk(self.part, self.given, layers=self.layers)
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        return Decision(self.part, self.layers, trunk, rows)


def decisions_of(part: Part, layers: Sequence[int], given: Given, at: At) -> list[Opening]:
    """Each text's decision, to be opened one after another."""
    _check(part, at, given)
    lengths = given.lengths(part.model).each
    found = []
    for text, length in enumerate(lengths):
        rows = _rows(part, length, text, at)
        found.append(Opening(part, tuple(layers), given.select([text]), rows))
    return found


def _readout(part: Part) -> ReadoutLayer:
    assert part.model.readout is not None, "_check() has seen that there is one"
    return part.model.readout


def _check(part: Part, at: At, given: Given) -> None:
    model = part.model
    if model.readout is None:
        raise InputError(
            f"this {type(model).__name__} has no readout and decides nothing",
            "use one with a language or class head",
        )
    if part.stack_name == "encoder":
        raise InputError(
            "no answer is read off a token of the encoder", 'use stack="decoder", or Sublayer.CROSS'
        )
    whole = isinstance(model.config.readout, ClassHead)
    if whole and at != "last":
        raise InputError("whole texts have one class and no positions", "leave at out")
    if not whole and at == "last" and not isinstance(model, Decoder | Seq2Seq):
        raise InputError(
            f"this {type(model).__name__} answers at every token",
            "give at, the position of each text to look at",
        )
    if at != "last" and len(at) != len(given):
        raise InputError(f"at has {len(at)} positions for {len(given)} texts", "give one each")


def _rows(part: Part, length: int, text: int, at: At) -> range:
    config = part.model.config.readout
    if isinstance(config, ClassHead):
        whole = {"first": range(1), "last": range(length - 1, length), "mean": range(length)}
        return whole[config.pool]
    place = length - 1 if at == "last" else at[text]
    if not 0 <= place < length:
        raise InputError(f"text {text} has no position {place}", f"use 0 to {length - 1}")
    return range(place, place + 1)
