"""The step of an ordinary decoder on the CPU, operation by operation.

There a step reads the weights once and does little else, so what Python does between the products
counts: a fifth of the time in GPT-2 small. The sums are those of the layers themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.cache import Cache, LayerCache, RingLayerCache
from manyheads.decoding.alone import Alone
from manyheads.kernels.fused import flash_cpu
from manyheads.models.decoder import Decoder
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.parts.masks.render import exact_band
from manyheads.parts.norms import NoNorm, Pre
from manyheads.parts.positions import NoPosition, Rotary
from manyheads.parts.positions.rotary import Turn
from manyheads.ragged import Ragged

__all__ = ["Plain", "cannot"]

Function = Callable[[Tensor], Tensor]


def cannot(model: object) -> str | None:
    """Why a model needs its layers called; None if it does not."""
    if not isinstance(model, Decoder):
        return "it is no decoder"
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return "it is not on the CPU"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "somebody hooked into it"
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"a {type(module).__name__} is more than its weight"
    return next(_differences(model), None)


def _differences(model: Decoder) -> Iterator[str]:
    head = model.config.readout
    if not isinstance(head, LanguageHead) or head.transform is not None:
        yield "its readout is no plain language head"
    for layer in model.config.stack.layers:
        yield from _layer_differences(layer)
    for each in model.stack.layers:
        attention, feedforward = cast(Layer, each).attention, cast(Layer, each).feedforward
        assert attention is not None
        assert isinstance(feedforward, FeedForward)
        linears = (attention.project, attention.output, feedforward.expand, feedforward.contract)
        if any(type(linear) is not nn.Linear for linear in linears):
            yield "a projection is more than its weight"


def _layer_differences(layer: LayerConfig) -> Iterator[str]:
    attention, feedforward = layer.attention, layer.feedforward
    if attention is None or feedforward is None or layer.cross is not None:
        yield "a layer is not attention and feed-forward"
        return
    if isinstance(feedforward.inner, Experts):
        yield "a layer has experts"
    if not (isinstance(attention.norm, Pre) and isinstance(feedforward.norm, Pre)):
        yield "a layer norms elsewhere than before its sublayers"
    inner = attention.inner
    if inner.gates or inner.sink != "none" or inner.head_scale != "none":
        yield "a layer has gates, a sink or scaled heads"
    if inner.groups is not None:
        yield "a layer shares keys unevenly"
    if not isinstance(inner.position, NoPosition | Rotary):
        yield "a layer has a bias by position"
    if exact_band(inner.mask) is None or inner.kernel != "auto":
        yield "a layer has a mask or kernel of its own"


@dataclass(frozen=True, slots=True)
class Sublayers:
    """What one layer does to a token, without the layer around it."""

    config: AttentionConfig
    before: float
    norms: tuple[Function, Function]
    query_norm: Function | None
    key_norm: Function | None
    project: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    expand: tuple[Tensor, Tensor | None]
    contract: tuple[Tensor, Tensor | None]
    activate: Function
    gated: bool

    @classmethod
    def of(cls, layer: Layer) -> "Sublayers":
        attention, feedforward = layer.attention, layer.feedforward
        assert isinstance(attention, Attention)
        assert isinstance(feedforward, FeedForward)
        config = attention.config
        linears = (attention.project, attention.output, feedforward.expand, feedforward.contract)
        project, output, expand, contract = ((each.weight, each.bias) for each in linears)
        return cls(
            config=config,
            before=float(config.mask.reach.before),
            norms=(layer.attention_residual.norm.forward, layer.feedforward_residual.norm.forward),
            query_norm=_norm(attention.query_norm, config.query_norm),
            key_norm=_norm(attention.key_norm, config.key_norm),
            project=project,
            output=output,
            expand=expand,
            contract=contract,
            activate=ACTIVATIONS[feedforward.config.activation],
            gated=feedforward.gated,
        )

    def __call__(
        self, x: Float[Tensor, "b c"], store: LayerCache, where: "Where", turn: Turn | None
    ) -> Float[Tensor, "b c"]:
        x = x + F.linear(self._read(self.norms[0](x), store, where, turn), *self.output)
        inside = F.linear(self.norms[1](x), *self.expand)
        if self.gated:
            gate, passed = inside.chunk(2, dim=-1)
            inside = self.activate(gate) * passed
        else:
            inside = self.activate(inside)
        return x + F.linear(inside, *self.contract)

    def _read(
        self, x: Float[Tensor, "b c"], store: LayerCache, where: "Where", turn: Turn | None
    ) -> Float[Tensor, "b hd"]:
        config = self.config
        heads, keys = config.heads, config.key_heads
        rows = F.linear(x, *self.project).view(-1, heads + 2 * keys, config.size)
        query, key, value = rows.split((heads, keys, keys), dim=1)
        if self.query_norm is not None:
            query = self.query_norm(query).to(query.dtype)
        if self.key_norm is not None:
            key = self.key_norm(key).to(key.dtype)
        if turn is not None:
            query, key = turn(query), turn(key)
        where.keep(store, key, value)
        read = [
            _attend(query[some], store.k[some, seen], store.v[some, seen], config.score_scale)
            for some, seen in where.groups
        ]
        return read[0] if len(read) == 1 else torch.cat(read)


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """Where new tokens are kept in a store, and which keys they see: sequences, and their keys."""

    columns: tuple[int, ...]
    groups: tuple[tuple[slice, slice], ...]

    @classmethod
    def of(cls, store: LayerCache, seen: tuple[int, ...], before: float) -> "Where":
        if isinstance(store, RingLayerCache):
            columns = tuple(position % store.room for position in seen)
            spans = [(0, min(position + 1, store.room)) for position in seen]
        else:
            columns = seen
            spans = [(position - int(min(before, position)), position + 1) for position in seen]
        if len(set(spans)) == 1:
            return cls(columns, ((slice(None), slice(*spans[0])),))
        each = ((slice(index, index + 1), slice(*span)) for index, span in enumerate(spans))
        return cls(columns, tuple(each))

    def keep(
        self, store: LayerCache, key: Float[Tensor, "b g d"], value: Float[Tensor, "b g d"]
    ) -> None:
        if len(set(self.columns)) == 1:
            store.k[:, self.columns[0]] = key
            store.v[:, self.columns[0]] = value
            return
        rows, columns = torch.arange(len(self.columns)), torch.tensor(self.columns)
        store.k[rows, columns] = key
        store.v[rows, columns] = value


def _attend(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g d"],
    scale: float,
) -> Float[Tensor, "b hd"]:
    read, _ = flash_cpu(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), False, None, scale)
    return read.flatten(1)


class Plain:
    """The next tokens of a decoder's texts, with the cache that the model itself filled."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.layers = [Sublayers.of(cast(Layer, layer)) for layer in model.stack.layers]
        in_float32 = all(each.dtype == torch.float32 for each in model.parameters())
        self.alone = Alone(model) if in_float32 else None

    def fits(self, cache: Cache) -> bool:
        """Whether every text has room for one token more."""
        longest = max(cache.seen, default=0)
        return all(
            isinstance(store, RingLayerCache) or (store is not None and longest < store.room)
            for store in cache.stores
        )

    def next(self, ids: Ragged, cache: Cache) -> Float[Tensor, "b v"]:
        model, seen = self.model, cache.seen
        positions = torch.tensor(seen)
        x = model.embedding.embed(ids, positions).values
        turns = self._turns(positions)
        if self.alone is not None and len(seen) == 1:
            scores = self.alone.next(x[0], cache, turns)
        else:
            scores = self._scores(model.stack.final_norm(self._through(x, cache, turns)))
        cache.seen = tuple(position + 1 for position in seen)
        return scores

    def _turns(self, positions: Int[Tensor, " b"]) -> list[Turn | None]:
        places = self.model.stack._places(positions)
        each = [places[owner] for owner in self.model.stack.place_owner]
        return [place if isinstance(place, Turn) else None for place in each]

    def _through(
        self, x: Float[Tensor, "b c"], cache: Cache, turns: list[Turn | None]
    ) -> Float[Tensor, "b c"]:
        wheres: dict[tuple[bool, int, float], Where] = {}
        for layer, store, turn in zip(self.layers, cache.stores, turns, strict=True):
            assert store is not None
            kind = (isinstance(store, RingLayerCache), store.room, layer.before)
            if kind not in wheres:
                wheres[kind] = Where.of(store, cache.seen, layer.before)
            x = layer(x, store, wheres[kind], turn)
        return x

    def _scores(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b v"]:
        readout, head = self.model.readout, self.model.config.readout
        assert readout is not None
        assert isinstance(head, LanguageHead)
        table = self.model.embedding.tokens.weight if readout.weight is None else readout.weight
        return F.linear(x if head.scale == 1.0 else x * head.scale, table, readout.bias)


def _norm(module: nn.Module, config: object) -> Function | None:
    return None if isinstance(config, NoNorm) else module.forward
