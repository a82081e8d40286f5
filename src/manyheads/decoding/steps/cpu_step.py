"""The step of an ordinary decoder on the CPU, computed from its weights.

A step there reads the weights once and does little else, so the time that Python spends between the
products counts: a fifth of the total in GPT-2 small. The arithmetic is that of the layers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import AttentionConfig
from manyheads.cache import Cache, LayerCache, RingLayerCache
from manyheads.decoding.steps.ordinary import DecoderWeights, LayerWeights, why_not_ordinary
from manyheads.models.decoder import Decoder
from manyheads.parts import feedforward, norms
from manyheads.parts.positions.rotary import Rotation
from manyheads.quantization.integer_layers import IntegerWeight
from manyheads.ragged import Ragged

Function = Callable[[Tensor], Tensor]
# GELU by tanh (arXiv 1606.08415) is x times the sigmoid of x (ROOT + CUBE x^2).
ROOT = 2 * (2 / math.pi) ** 0.5
CUBE = 0.044715 * ROOT


def cannot(model: object) -> str | None:
    """Why the step of this model calls its layers; None if this file computes it."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            if parameter.device.type != "cpu":
                return f"the model is on {parameter.device}, not on the CPU"
    return next(why_not_ordinary(model), None)


class CpuStep:
    """The next token of each sequence of a batch, with the cache that the model itself filled.

    One sequence in float32 is computed in vectors: products go to buffers that are allocated once,
    or are added to the residual stream in place.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        weights = DecoderWeights.of(model)
        self.of_batch = OrdinaryDecoder(weights, vectors=False)
        self.of_one: OrdinaryDecoder | None = None
        if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
            self.of_one = OrdinaryDecoder(weights, vectors=True)

    def fits(self, cache: Cache) -> bool:
        """Whether the cache has room for one more token of every sequence."""
        longest = max(cache.seen, default=0)
        return all(
            isinstance(store, RingLayerCache) or (store is not None and longest < store.capacity)
            for store in cache.stores
        )

    def next(self, ids: Ragged, cache: Cache) -> Float[Tensor, "b v"]:
        seen, stack = cache.seen, self.model.stack
        positions = torch.tensor(seen)
        x = self.model.embedding.embed(ids, positions).values
        encodings = stack.encode_positions(positions)
        by_layer = [encodings[owner] for owner in stack.position_owner]
        rotations = [code if isinstance(code, Rotation) else None for code in by_layer]
        if self.of_one is not None and len(seen) == 1:
            logits = self.of_one(x[0], cache, rotations).unsqueeze(0)
        else:
            logits = self.of_batch(x, cache, rotations)
        cache.seen = tuple(position + 1 for position in seen)
        return logits


class OrdinaryDecoder:
    """From embeddings to logits: of one sequence in `vectors`, or of a batch, a row per sequence.

    Vectors are in float32, and the embedding is overwritten.
    """

    def __init__(self, weights: DecoderWeights, *, vectors: bool) -> None:
        self.layers = [OrdinaryLayer(layer, vectors=vectors) for layer in weights.layers]
        self.vectors = vectors
        self.final_norm = _norm(weights.final_norm, vectors=vectors)
        self.logit_scale = weights.logit_scale
        table = weights.vocabulary
        count = table.codes.shape[0] if isinstance(table, IntegerWeight) else len(table)
        logits = torch.empty(count) if vectors else None
        self.readout = _product(table, weights.vocabulary_bias, out=logits)

    def __call__(
        self, x: Float[Tensor, "*b c"], cache: Cache, rotations: list[Rotation | None]
    ) -> Float[Tensor, "*b v"]:
        slots_of: dict[tuple[bool, int, float], KeyValueSlots] = {}
        turns: dict[int, Rotation | VectorRotation | None] = {
            id(rotation): VectorRotation.of(rotation) if self.vectors and rotation else rotation
            for rotation in {id(rotation): rotation for rotation in rotations}.values()
        }
        for layer, store, rotation in zip(self.layers, cache.stores, rotations, strict=True):
            assert store is not None
            kind = (isinstance(store, RingLayerCache), store.capacity, layer.attention.before)
            if kind not in slots_of:
                slots_of[kind] = KeyValueSlots.of(store, cache.seen, layer.attention.before)
            x = layer(x, store, slots_of[kind], turns[id(rotation)])
        x = self.final_norm(x)
        return self.readout(x if self.logit_scale == 1.0 else x * self.logit_scale)


class OrdinaryLayer:
    """An ordinary layer: pre-norm attention and a pre-norm feed-forward."""

    def __init__(self, weights: LayerWeights, *, vectors: bool) -> None:
        project, expand = weights.project, weights.expand
        projected = torch.empty(project.out_features) if vectors else None
        expanded = torch.empty(expand.out_features) if vectors else None
        self.attention_norm = _norm(weights.attention_norm, vectors=vectors)
        self.project = _product(_matrix(project), project.bias, out=projected)
        self.attention: OrdinaryAttention
        if projected is None:
            self.attention = BatchAttention(weights)
        else:
            self.attention = VectorAttention(weights, projected)
        self.add_output = _sum(weights.output, vectors=vectors)
        self.feedforward_norm = _norm(weights.feedforward_norm, vectors=vectors)
        self.expand = _product(_matrix(expand), expand.bias, out=expanded)
        self.activate = _activation(weights, expanded)
        self.add_contract = _sum(weights.contract, vectors=vectors)
        self.parallel = weights.parallel

    def __call__(
        self,
        x: Float[Tensor, "*b c"],
        store: LayerCache,
        slots: "KeyValueSlots",
        rotation: "Rotation | VectorRotation | None",
    ) -> Float[Tensor, "*b c"]:
        projected = self.project(self.attention_norm(x))
        attended = self.attention(projected, store, slots, rotation)
        # Sums of vectors are in place, so a parallel feed-forward reads before the sum.
        expanded = self.expand(self.feedforward_norm(x)) if self.parallel else None
        x = self.add_output(x, attended)
        if expanded is None:
            expanded = self.expand(self.feedforward_norm(x))
        return self.add_contract(x, self.activate(expanded))


@dataclass(frozen=True, slots=True, eq=False)
class KeyValueSlots:
    """The slots of a store that the new tokens are written to, and those that they read.

    `reads` pairs sequences with slots: sequences that read the same ones are read together.
    """

    write: tuple[slice, int] | tuple[Int[Tensor, " b"], Int[Tensor, " b"]]
    reads: tuple[tuple[slice, slice], ...]

    @classmethod
    def of(cls, store: LayerCache, seen: tuple[int, ...], before: float) -> "KeyValueSlots":
        """For one new token of each sequence, which sees `before` tokens to its left."""
        if isinstance(store, RingLayerCache):
            slots = tuple(position % store.capacity for position in seen)
            spans = [(0, min(position + 1, store.capacity)) for position in seen]
        else:
            slots = seen
            spans = [(position - int(min(before, position)), position + 1) for position in seen]
        write: tuple[slice, int] | tuple[Tensor, Tensor] = (slice(None), slots[0])
        if len(set(slots)) > 1:
            write = (torch.arange(len(slots)), torch.tensor(slots))
        if len(set(spans)) == 1:
            return cls(write, ((slice(None), slice(*spans[0])),))
        places = ((slice(index, index + 1), slice(*span)) for index, span in enumerate(spans))
        return cls(write, tuple(places))


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The rows of a projection seen as queries, keys and values."""

    query: Float[Tensor, "b h 1 d"]
    key: Float[Tensor, "b g d"]
    value: Float[Tensor, "b g d"]
    query_and_key: Float[Tensor, "b hg d"]

    @classmethod
    def of(cls, projected: Float[Tensor, "*b rows"], config: AttentionConfig) -> "Heads":
        heads, keys = config.heads, config.key_heads
        by_head = projected.view(-1, heads + 2 * keys, config.size)
        query_and_key, value = by_head.split((heads + keys, keys), dim=1)
        query, key = query_and_key.split((heads, keys), dim=1)
        return cls(query.unsqueeze(2), key, value, query_and_key)


@dataclass(frozen=True, slots=True, eq=False)
class VectorRotation:
    """A rotation of one token in place, in a third of the operations."""

    rotation: Rotation
    cos: Float[Tensor, "2 half"]
    sin: Float[Tensor, "2 half"]

    @classmethod
    def of(cls, rotation: Rotation) -> "VectorRotation":
        cos, sin = rotation.cos[0], rotation.sin[0]
        return cls(rotation, torch.cat((cos, cos)), torch.cat((-sin, sin)))

    def rotate_(self, x: Float[Tensor, "1 h d"]) -> None:
        if x.shape[2] != self.cos.numel():
            x.copy_(self.rotation(x))
            return
        halves = x.view(*x.shape[:2], *self.cos.shape)
        swapped = halves.flip(2)
        halves.mul_(self.cos).addcmul_(swapped, self.sin)


class OrdinaryAttention(ABC):
    """Attention of the new tokens to those in the cache, from the projection to the heads' output.

    Subclasses decide how keys and values lie in memory.
    """

    def __init__(self, weights: LayerWeights) -> None:
        config = weights.attention
        self.config = config
        self.before = float(config.mask.reach.before)
        self.query_norm = None if weights.query_norm is None else _norm(weights.query_norm)
        self.key_norm = None if weights.key_norm is None else _norm(weights.key_norm)
        shared = config.heads != config.key_heads
        sdpa = F.scaled_dot_product_attention
        self.attend = partial(sdpa, scale=config.score_scale, enable_gqa=shared)

    def __call__(
        self,
        projected: Float[Tensor, "*b rows"],
        store: LayerCache,
        slots: KeyValueSlots,
        rotation: Rotation | VectorRotation | None,
    ) -> Float[Tensor, "*b hd"]:
        heads = self.heads(projected)
        if self.query_norm is not None:
            heads.query.copy_(self.query_norm(heads.query))
        if self.key_norm is not None:
            heads.key.copy_(self.key_norm(heads.key))
        if isinstance(rotation, VectorRotation):
            rotation.rotate_(heads.query_and_key)
        elif rotation is not None:
            heads.query_and_key.copy_(rotation(heads.query_and_key))
        return self.read(heads, store, slots)

    @abstractmethod
    def heads(self, projected: Float[Tensor, "*b rows"]) -> Heads: ...

    @abstractmethod
    def read(self, heads: Heads, store: LayerCache, slots: KeyValueSlots) -> Float[Tensor, "*b hd"]:
        """Write the keys and values to the store, and attend to the slots that are seen."""


class BatchAttention(OrdinaryAttention):
    """Attention of a batch, which reads the store as it is."""

    def heads(self, projected: Float[Tensor, "b rows"]) -> Heads:
        return Heads.of(projected, self.config)

    def read(self, heads: Heads, store: LayerCache, slots: KeyValueSlots) -> Float[Tensor, "b hd"]:
        store.k[slots.write] = heads.key
        store.v[slots.write] = heads.value
        outputs = []
        for sequences, seen in slots.reads:
            k, v = store.k[sequences, seen], store.v[sequences, seen]
            output = self.attend(heads.query[sequences], k.transpose(1, 2), v.transpose(1, 2))
            outputs.append(output.flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class VectorAttention(OrdinaryAttention):
    """Attention of one sequence, with keys and values stored head by head, as attention reads them.

    `projected` is the buffer of every projection, so it is sliced once.
    """

    def __init__(self, weights: LayerWeights, projected: Float[Tensor, " rows"]) -> None:
        super().__init__(weights)
        keys, size = self.config.key_heads, self.config.size
        self._heads = Heads.of(projected, self.config)
        self._key_and_value = projected[-2 * keys * size :].view(2, keys, size)
        self._store_k: Tensor | None = None
        self._keys_and_values = torch.empty(0)

    def heads(self, projected: Float[Tensor, " rows"]) -> Heads:
        del projected
        return self._heads

    def read(self, heads: Heads, store: LayerCache, slots: KeyValueSlots) -> Float[Tensor, " hd"]:
        if store.k is not self._store_k:
            # Copied to this layout; the store keeps a view of them in its own shape.
            self._keys_and_values = torch.cat((store.k, store.v)).transpose(1, 2).contiguous()
            store.k, store.v = self._keys_and_values.transpose(1, 2).chunk(2)
            self._store_k = store.k
        (_, slot), [(_, seen)] = slots.write, slots.reads
        assert isinstance(slot, int)
        self._keys_and_values.select(2, slot).copy_(self._key_and_value)
        k, v = self._keys_and_values.narrow(2, seen.start, seen.stop - seen.start).chunk(2)
        return self.attend(heads.query, k, v).view(-1)


def _norm(module: nn.Module, *, vectors: bool = False) -> Function:
    """A norm without the overhead of module calls."""
    if isinstance(module, norms.Normalize) and not module.config.centered:
        weight, bias, eps = module.weight, module.bias, module.config.eps
        if isinstance(module.config, norms.LayerNorm):
            return lambda x: torch.layer_norm(x, weight.shape, weight, bias, eps)
        if vectors and bias is None:
            return _vector_rms_norm(weight, eps)
    return module.forward


def _vector_rms_norm(weight: Float[Tensor, " c"], eps: float) -> Function:
    """RMSNorm of a vector in two operations; torch takes eight on the CPU."""
    size, zeros, out = len(weight), torch.zeros_like(weight), torch.empty_like(weight)

    def norm(x: Tensor) -> Tensor:
        scale = (torch.dot(x, x).item() / size + eps) ** -0.5
        return torch.addcmul(zeros, x, weight, value=scale, out=out)

    return norm


def _matrix(linear: nn.Linear) -> Tensor | IntegerWeight:
    return linear if isinstance(linear, IntegerWeight) else linear.weight


def _product(
    weight: Tensor | IntegerWeight, bias: Tensor | None, *, out: Tensor | None
) -> Function:
    """The product of a batch of rows, or of a vector into the buffer `out`."""
    if isinstance(weight, IntegerWeight):
        return _integer_product(weight, bias, out)
    if out is None:
        return lambda x: F.linear(x, weight, bias)
    if bias is None:
        return lambda x: torch.mv(weight, x, out=out)
    return lambda x: torch.addmv(bias, weight, x, out=out)


def _integer_product(weight: IntegerWeight, bias: Tensor | None, out: Tensor | None) -> Function:
    if out is None:
        return lambda x: weight.multiply(x, bias)
    write = weight.product(1).writer(out)
    return write if bias is None else lambda x: write(x).add_(bias)


def _sum(linear: nn.Linear, *, vectors: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The residual stream plus a product."""
    if isinstance(linear, IntegerWeight):
        if not vectors:
            return lambda x, y: x + linear(y)
        add, bias = linear.product(1).adder(), linear.bias
        return add if bias is None else lambda x, y: add(x, y).add_(bias)
    weight, bias = linear.weight, linear.bias
    if not vectors:
        return lambda x, y: x + F.linear(y, weight, bias)
    if bias is None:
        return lambda x, y: x.addmv_(weight, y)
    return lambda x, y: x.add_(bias).addmv_(weight, y)


def _activation(layer: LayerWeights, buffer: Float[Tensor, " rows"] | None) -> Function:
    """The activation of a feed-forward; a vector is always in the `buffer`."""
    activate = feedforward.ACTIVATIONS[layer.activation]
    if buffer is not None and layer.activation == "gelu_tanh":
        activate = _gelu_tanh(layer.contract.in_features)
    if not layer.gated:
        return activate
    if buffer is not None:
        halves = buffer.chunk(2)
        return lambda _: activate(halves[0]) * halves[1]

    def gated(expanded: Tensor) -> Tensor:
        gate, passed = expanded.chunk(2, dim=-1)
        return activate(gate) * passed

    return gated


def _gelu_tanh(width: int) -> Function:
    """By the sigmoid, which takes a quarter of the time of tanh."""
    root, out = torch.tensor(ROOT), torch.empty(width)
    return lambda x: torch.addcmul(root, x, x, value=CUBE, out=out).mul_(x).sigmoid_().mul_(x)
