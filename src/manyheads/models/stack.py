"""A stack of layers, each with its own config."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.attention import AttentionConfig, PositionEncoding
from manyheads.cache import (
    Cache,
    CachePlan,
    CacheSlot,
    DynamicCache,
    KeyValues,
    StateSlot,
    StaticCache,
    StaticCachePlan,
)
from manyheads.errors import ConfigError, InputError
from manyheads.kernels.choose import Choice
from manyheads.kernels.contract import Request
from manyheads.models.layer import Layer, LayerConfig
from manyheads.parts.experts import RouterLosses
from manyheads.parts.masks import Mask
from manyheads.parts.norms import NoNorm, Norm, make_norm
from manyheads.parts.positions import Disentangled, Rotary
from manyheads.parts.positions.relative import Bias, ShawBias
from manyheads.parts.positions.rotary import LongRopeScaling
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Look, Sublayer, Tap, Watcher, seen


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The layers of one residual stream, and the norm after the last."""

    width: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm = NoNorm()

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.widths - {self.width}:
                raise ConfigError(
                    f"layer {index} has width {layer.widths.pop()}, and the stack {self.width}",
                    "give all layers the width of the stack",
                )

    def attention(self, layer: int) -> AttentionConfig | None:
        branch = self.layers[layer].attention
        return None if branch is None else branch.inner


@dataclass(frozen=True, slots=True)
class Explained:
    """Which kernel each attention of a stack uses, and why."""

    choices: tuple[tuple[str, Choice], ...]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {choice}" for name, choice in self.choices)


class Stack(nn.Module):
    """Layers one after another; layers with the same positions encode them once."""

    def __init__(self, config: StackConfig, name: str = "main") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.position_owner = tuple(
            _position_owner(config, index) for index in range(len(config.layers))
        )
        self.layers = nn.ModuleList(
            Layer(layer, config.width, owns_table=self.position_owner[index] == index)
            for index, layer in enumerate(config.layers)
        )
        self.final_norm = make_norm(config.final_norm, config.width)

    def forward(
        self,
        x: Ragged,
        *,
        positions: Int[Tensor, " n"] | None = None,
        memory: Ragged | None = None,
        cache: Cache | None = None,
        plan: CachePlan | StaticCachePlan | None = None,
        watch: Watcher | None = None,
    ) -> tuple[Ragged, tuple[RouterLosses, ...]]:
        if cache is not None and isinstance(plan, CachePlan):
            self._check_rotations(cache, plan)
        look = None if watch is None else Look(watch, stack=self.name)
        x = x.with_values(seen(look, Tap.EMBEDDINGS, x.values, x))
        return self._run(x, 0, positions, memory, cache, plan, look)

    def resume(
        self,
        x: Ragged,
        layer: int,
        *,
        memory: Ragged | None = None,
        watch: Watcher | None = None,
    ) -> tuple[Ragged, tuple[RouterLosses, ...]]:
        """The rest of `forward`, from the residual stream before a layer.

        Nothing below that layer runs or is watched. After the last one only the final norm runs.
        """
        if not 0 <= layer <= len(self.layers):
            raise InputError(f"layer must be in 0 to {len(self.layers)}, got {layer}")
        look = None if watch is None else Look(watch, stack=self.name)
        return self._run(x, layer, None, memory, None, None, look)

    def _run(
        self,
        x: Ragged,
        start: int,
        positions: Int[Tensor, " n"] | None,
        memory: Ragged | None,
        cache: Cache | None,
        plan: CachePlan | StaticCachePlan | None,
        look: Look | None,
    ) -> tuple[Ragged, tuple[RouterLosses, ...]]:
        places = x.lengths.positions if positions is None else positions
        encodings = self.encode_positions(places, x.lengths)
        losses = []
        for index in range(start, len(self.layers)):
            here = None if look is None else look.within(layer=index, sublayer=Sublayer.ATTENTION)
            x, routed = self.layers[index](
                x,
                encoding=encodings[self.position_owner[index]],
                memory=self._memory(index, memory, cache, here),
                cache=_slot(cache, plan, index),
                look=here,
            )
            if routed is not None:
                losses.append(routed)
        final = x.with_values(self.final_norm(x.values))
        return final.with_values(seen(look, Tap.FINAL, final.values, final)), tuple(losses)

    def request(self, layer: int, sublayer: Sublayer, query: Ragged, key: Ragged) -> Request:
        """What the kernel is asked for, given the queries and keys of an attention."""
        module = self._typed_layers()[layer]
        attention = module.cross if sublayer is Sublayer.CROSS else module.attention
        assert attention is not None, "the caller asks for a sublayer that exists"
        bias: Bias | None = None
        if sublayer is Sublayer.ATTENTION:
            owner = self._typed_layers()[self.position_owner[layer]].attention
            assert owner is not None, "an owner has positions"
            bias = attention.bias(query, key, owner.encode_positions(query.lengths.positions))
        if isinstance(bias, ShawBias):
            # Shaw's value vectors do not affect the weights.
            bias = replace(bias, values=None)
        return Request(
            queries=query.lengths,
            keys=key.lengths,
            mask=attention.config.mask,
            scale=attention.config.score_scale,
            bias=bias,
            sink=attention.sink,
            softcap=attention.config.score_cap,
        )

    def new_cache(self, config: DynamicCache | StaticCache) -> Cache:
        masks: list[Mask | None] = []
        for index in range(len(self.config.layers)):
            attention = self.config.attention(index)
            masks.append(None if attention is None else attention.mask)
        mixers = [index for index, layer in enumerate(self.config.layers) if layer.mixer]
        return Cache(masks, config, mixers)

    def explain_kernels(self, queries: Lengths, memory: Lengths | None = None) -> Explained:
        encodings = self.encode_positions(queries.positions)
        choices = []
        for index, layer in enumerate(self._typed_layers()):
            if layer.attention is not None:
                encoding = encodings[self.position_owner[index]]
                choice = layer.attention.explain(queries, queries, encoding)
                choices.append((f"{self.name} layer {index}", choice))
            if layer.cross is not None and memory is not None:
                choice = layer.cross.explain(queries, memory, None)
                choices.append((f"{self.name} layer {index} cross", choice))
        return Explained(tuple(choices))

    def _typed_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def encode_positions(
        self, positions: Int[Tensor, " n"], lengths: Lengths | None = None
    ) -> dict[int, PositionEncoding]:
        encodings: dict[int, PositionEncoding] = {}
        for index, layer in enumerate(self._typed_layers()):
            if self.position_owner[index] == index:
                attention = layer.attention
                encodings[index] = (
                    None if attention is None else attention.encode_positions(positions, lengths)
                )
        return encodings

    @property
    def rotation_switch(self) -> int | None:
        """The length beyond which LongRoPE rotates all tokens of a text in another way."""
        for layer in self.config.layers:
            position = None if layer.attention is None else layer.attention.inner.position
            if isinstance(position, Rotary) and isinstance(position.scaling, LongRopeScaling):
                return position.scaling.original_length
        return None

    def _check_rotations(self, cache: Cache, plan: CachePlan) -> None:
        switch = self.rotation_switch
        if switch is None or torch.compiler.is_compiling():
            return
        for before, after in zip(cache.seen, plan.after, strict=False):
            if 0 < before <= switch < after:
                raise InputError(
                    f"a text grows from {before} to {after} tokens, and beyond {switch} LongRoPE "
                    "rotates the keys in the cache in another way",
                    "start a new cache with the whole text",
                )

    def _memory(
        self, index: int, memory: Ragged | None, cache: Cache | None, look: Look | None
    ) -> Ragged | KeyValues | None:
        """With a cache, the keys and values of the memory are computed once."""
        cross = self._typed_layers()[index].cross
        if cache is None or cross is None:
            return memory
        key_values = cache.memory[index]
        if key_values is None and memory is not None:
            here = None if look is None else look.within(layer=index, sublayer=Sublayer.CROSS)
            key_values = cross.remember(memory, here)
            cache.memory[index] = key_values
        return key_values


def _position_owner(config: StackConfig, index: int) -> int:
    """The first layer whose position encoding this one can use."""
    attention = config.attention(index)
    if attention is None or not attention.shares_position:
        return index
    for earlier in range(index):
        other = config.attention(earlier)
        if other is not None and _position_key(other) == _position_key(attention):
            return earlier
    return index


def _position_key(attention: AttentionConfig) -> tuple[object, ...]:
    if isinstance(attention.position, Disentangled):
        # The vectors of distances belong to no head.
        return (attention.position,)
    return attention.position, attention.heads, attention.size


def _slot(
    cache: Cache | None, plan: CachePlan | StaticCachePlan | None, index: int
) -> CacheSlot | StateSlot | None:
    if cache is None or plan is None:
        return None
    if index in cache.states:
        return StateSlot(cache.states[index])
    store = cache.stores[index]
    return None if store is None else CacheSlot(store, plan)
