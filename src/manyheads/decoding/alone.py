"""The step of one text by an ordinary decoder on the CPU: vectors, where a batch has rows.

Products are added to the residual stream in place, all else is written to places made once, and
keys and values lie together and head by head, as attention reads them. The sums are those of the
layers themselves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.cache import Cache, LayerCache, RingLayerCache
from manyheads.models.decoder import Decoder
from manyheads.models.layer import Layer
from manyheads.models.readout import LanguageHead
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.parts.norms import LayerNorm, NoNorm, Normalise
from manyheads.parts.positions.rotary import Turn

__all__ = ["Alone"]

Function = Callable[[Tensor], Tensor]
# Gelu by tanh (arXiv 1606.08415) is x times the sigmoid of x (ROOT + CUBE x^2).
ROOT = 2 * (2 / math.pi) ** 0.5
CUBE = 0.044715 * ROOT


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where a layer's input projection is written, seen as its parts."""

    joined: Float[Tensor, " rows"]
    query: Float[Tensor, "1 h 1 d"]
    key: Float[Tensor, "1 g d"]
    turned: Float[Tensor, "1 hg d"]
    kept: Float[Tensor, "2 g d"]

    @classmethod
    def of(cls, config: AttentionConfig) -> "Rows":
        heads, keys, size = config.heads, config.key_heads, config.size
        joined = torch.empty((heads + 2 * keys) * size)
        each = joined.view(1, -1, size)
        return cls(
            joined=joined,
            query=each[:, :heads].unsqueeze(2),
            key=each[:, heads : heads + keys],
            turned=each[:, : heads + keys],
            kept=each[0, heads:].view(2, keys, size),
        )


class Sublayers:
    """What one layer does to a token of a text, without the layer around it."""

    def __init__(self, layer: Layer) -> None:
        attention, feedforward = layer.attention, layer.feedforward
        assert isinstance(attention, Attention)
        assert isinstance(feedforward, FeedForward)
        config = attention.config
        self.before = config.mask.reach.before
        shared = config.heads != config.key_heads
        sdpa = F.scaled_dot_product_attention
        self.attend = partial(sdpa, scale=config.score_scale, enable_gqa=shared)
        self.rows = Rows.of(config)
        self.query_norm = None
        if not isinstance(config.query_norm, NoNorm):
            self.query_norm = _norm(attention.query_norm)
        self.key_norm = None
        if not isinstance(config.key_norm, NoNorm):
            self.key_norm = _norm(attention.key_norm)
        first, second = layer.attention_residual.norm, layer.feedforward_residual.norm
        self.norm, self.second_norm = _norm(first), _norm(second)
        project, expand = attention.project, feedforward.expand
        self.project = _product(project.weight, project.bias, self.rows.joined)
        expanded = torch.empty(expand.out_features)
        self.expand = _product(expand.weight, expand.bias, expanded)
        self.activate = _activation(feedforward, expanded)
        self.add_output = _addition(attention.output)
        self.add_contract = _addition(feedforward.contract)
        self.laid_out: Tensor | None = None
        self.kept = torch.empty(0)

    def __call__(
        self, x: Float[Tensor, " c"], store: LayerCache, seen: int, turn: Turn | None
    ) -> None:
        """Let the residual stream have what the layer adds to it, in place."""
        self.project(self.norm(x))
        self.add_output(x, self._read(store, seen, turn))
        self.expand(self.second_norm(x))
        self.add_contract(x, self.activate())

    def _read(self, store: LayerCache, seen: int, turn: Turn | None) -> Float[Tensor, " hd"]:
        rows = self.rows
        if self.query_norm is not None:
            rows.query.copy_(self.query_norm(rows.query))
        if self.key_norm is not None:
            rows.key.copy_(self.key_norm(rows.key))
        if turn is not None:
            rows.turned.copy_(turn(rows.turned))
        if store.k is not self.laid_out:
            self._lay_out(store)
        ring = isinstance(store, RingLayerCache)
        self.kept.select(2, seen % store.room if ring else seen).copy_(rows.kept)
        first = 0 if ring else seen - int(min(self.before, seen))
        last = min(seen + 1, store.room)
        k, v = self.kept.narrow(2, first, last - first).chunk(2)
        return self.attend(rows.query, k, v).view(-1)

    def _lay_out(self, store: LayerCache) -> None:
        """Keys and values side by side, head by head; for others the store looks as before."""
        self.kept = torch.cat((store.k, store.v)).transpose(1, 2).contiguous()
        store.k, store.v = self.kept.transpose(1, 2).chunk(2)
        self.laid_out = store.k


class Alone:
    """The next token of a decoder's only text, in float32."""

    def __init__(self, model: Decoder) -> None:
        readout, head = model.readout, model.config.readout
        assert readout is not None
        assert isinstance(head, LanguageHead)
        self.layers = [Sublayers(cast(Layer, layer)) for layer in model.stack.layers]
        self.final_norm = _norm(model.stack.final_norm)
        self.scale = head.scale
        table = model.embedding.tokens.weight if readout.weight is None else readout.weight
        self.scores = torch.empty(1, len(table))
        self.score = _product(table, readout.bias, self.scores[0])

    def next(
        self, x: Float[Tensor, " c"], cache: Cache, turns: Sequence[Turn | None]
    ) -> Float[Tensor, "1 v"]:
        """From the newest token's embedding, which is overwritten, to the scores of the next."""
        [seen] = cache.seen
        for layer, store, turn in zip(self.layers, cache.stores, turns, strict=True):
            assert store is not None
            layer(x, store, seen, turn)
        x = self.final_norm(x)
        self.score(x if self.scale == 1.0 else x * self.scale)
        return self.scores


def _norm(module: nn.Module) -> Function:
    """What a norm does, without the calls on the way to it."""
    if not isinstance(module, Normalise) or module.config.centred:
        return module.forward
    weight, bias, eps = module.weight, module.bias, module.config.eps
    if isinstance(module.config, LayerNorm):
        return lambda x: torch.layer_norm(x, weight.shape, weight, bias, eps)
    return module.forward


def _product(weight: Tensor, bias: Tensor | None, out: Tensor) -> Function:
    if bias is None:
        return lambda x: torch.mv(weight, x, out=out)
    return lambda x: torch.addmv(bias, weight, x, out=out)


def _addition(linear: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    weight, bias = linear.weight, linear.bias
    if bias is None:
        return lambda x, y: x.addmv_(weight, y)
    return lambda x, y: x.add_(bias).addmv_(weight, y)


def _activation(feedforward: FeedForward, rows: Float[Tensor, " rows"]) -> Callable[[], Tensor]:
    """From what was expanded to what is contracted."""
    name = feedforward.config.activation
    activate = _gelu_tanh(feedforward.config.hidden) if name == "gelu_tanh" else ACTIVATIONS[name]
    if not feedforward.gated:
        return lambda: activate(rows)
    gate, passed = rows.chunk(2)
    return lambda: activate(gate) * passed


def _gelu_tanh(width: int) -> Function:
    """By the sigmoid, which takes a quarter of the time that the tanh does."""
    root, out = torch.tensor(ROOT), torch.empty(width)
    return lambda x: torch.addcmul(root, x, x, value=CUBE, out=out).mul_(x).sigmoid_().mul_(x)
