"""A stack of layers, each with its own config."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.argument_checks import check_fields
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
from manyheads.models.context_parallel import check_context_parallel
from manyheads.models.layer import Layer, LayerConfig
from manyheads.parts.halting import AddedLoss, Halting, HaltingSteps
from manyheads.parts.norms import NoNorm, Norm, make_norm
from manyheads.parts.positions import Disentangled, Rotary
from manyheads.parts.positions.relative import Bias, ShawBias
from manyheads.parts.positions.rotary import LongRopeScaling
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Sublayer, Tap, WatchContext, Watcher, observe


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The layers of one residual stream, and the norm after the last.

    Layers may share weights across depth: `weights_of="first"` uses those of the first layer at
    every depth, as ALBERT (arXiv 1909.11942) and Universal Transformers (arXiv 1807.03819) do, and
    (0, 0, 2, 2) those of layers 0 and 2 twice each. With `halting` tokens stop on their own.
    """

    width: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm = NoNorm()
    weights_of: tuple[int, ...] | Literal["own", "first"] = "own"
    halting: Halting | None = None

    def __post_init__(self) -> None:
        self._check_sharing()
        # There is one way to say it, so that equal stacks compare equal.
        if self.owners == tuple(range(len(self.layers))):
            object.__setattr__(self, "weights_of", "own")
        elif not any(self.owners):
            object.__setattr__(self, "weights_of", "first")
        if self.reversible and self.halting is not None:
            raise ConfigError(
                "tokens of reversible layers cannot stop on their own",
                "use halting=None, or another residual",
            )
        if self.reversible and any(layer.residual != "reversible" for layer in self.layers):
            remedy = "make all of them reversible"
            raise ConfigError("some layers are reversible and others not", remedy)
        for index, layer in enumerate(self.layers):
            if layer.widths - {self.width}:
                raise ConfigError(
                    f"layer {index} has width {layer.widths.pop()}, and the stack {self.width}",
                    "give all layers the width of the stack",
                )

    def _check_sharing(self) -> None:
        if len(self.owners) != len(self.layers):
            raise ConfigError(
                f"weights_of has {len(self.owners)} numbers, and the stack {len(self.layers)} "
                "layers",
                "give one number per layer",
            )
        for index, owner in enumerate(self.owners):
            if not 0 <= owner <= index or self.owners[owner] != owner:
                raise ConfigError(
                    f"layer {index} cannot use the weights of {owner}",
                    "name an earlier layer with weights of its own, or the layer itself",
                )
            if self.layers[index] != self.layers[owner]:
                raise ConfigError(
                    f"layer {index} uses the weights of layer {owner} and has another config",
                    "give both the same config",
                )

    @property
    def owners(self) -> tuple[int, ...]:
        """For each layer the one whose weights it uses: itself, or an earlier one."""
        if isinstance(self.weights_of, tuple):
            return self.weights_of
        shared = self.weights_of == "first"
        return tuple(0 if shared else index for index in range(len(self.layers)))

    @property
    def reversible(self) -> bool:
        """Whether there are two residual streams."""
        return any(layer.residual == "reversible" for layer in self.layers)

    @property
    def output_width(self) -> int:
        """Channels of what the readout receives: both streams of reversible layers."""
        return 2 * self.width if self.reversible else self.width

    def attention(self, layer: int) -> AttentionConfig | None:
        branch = self.layers[layer].attention
        return None if branch is None else branch.inner


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """Which kernel each attention of a stack uses, and why."""

    choices: tuple[tuple[str, Choice], ...]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {choice}" for name, choice in self.choices)


class SharedLayers(nn.ModuleList):
    """One layer per depth, of which several are the same module; it is registered once."""

    def __init__(self, layers: dict[int, Layer], owners: tuple[int, ...]) -> None:
        super().__init__()
        self.owners = owners
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __len__(self) -> int:
        return len(self.owners)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return cast(Layer, self._modules[str(self.owners[index])])


class Stack(nn.Module):
    """Layers one after another; layers with the same positions encode them once."""

    def __init__(self, config: StackConfig, name: str = "main") -> None:
        super().__init__()
        self.config = config
        self.name = name
        owners = tuple(_position_owner(config, index) for index in range(len(config.layers)))
        self.position_owner = owners
        layers = {
            index: Layer(config.layers[index], config.width, owns_table=owners[index] == index)
            for index in sorted(set(config.owners))
        }
        self.layers = nn.ModuleList(layers.values())
        if config.weights_of != "own":
            self.layers = SharedLayers(layers, config.owners)
        self.final_norm = make_norm(config.final_norm, config.output_width)
        self.halting = None if config.halting is None else nn.Linear(config.width, 1)

    def forward(
        self,
        x: Ragged,
        *,
        positions: Int[Tensor, " n"] | None = None,
        memory: Ragged | None = None,
        cache: Cache | None = None,
        plan: CachePlan | StaticCachePlan | None = None,
        watch: Watcher | None = None,
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        if cache is not None and isinstance(plan, CachePlan):
            self._check_cache(cache, plan)
        context = None if watch is None else WatchContext(watch, stack=self.name)
        x = x.with_values(observe(context, Tap.EMBEDDINGS, x.values, x))
        if self.config.reversible:
            x = x.with_values(x.values.repeat(1, 2))
        return self._run(x, 0, positions, memory, cache, plan, context)

    def resume(
        self,
        x: Ragged,
        layer: int,
        *,
        stop: int | None = None,
        memory: Ragged | None = None,
        cache: Cache | None = None,
        plan: CachePlan | None = None,
        watch: Watcher | None = None,
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        """The rest of `forward`, from the residual stream before a layer.

        Nothing below that layer runs or is watched. After the last one only the final norm runs.
        With `stop` the result is the residual stream before that layer, without the final norm.
        """
        if not 0 <= layer <= len(self.layers):
            raise InputError(f"layer must be in 0 to {len(self.layers)}, got {layer}")
        if (layer or stop is not None) and self.halting is not None:
            raise InputError(
                f"tokens of this model stop on their own, and which ones have at layer {layer} "
                "depends on the layers below",
                "use a model without halting",
            )
        if layer == 0 and self.config.reversible and x.values.shape[1] == self.config.width:
            x = x.with_values(x.values.repeat(1, 2))
        if x.values.shape[1] != self.config.output_width:
            raise InputError(
                f"the layers have residual streams of {self.config.output_width} channels "
                f"together, got {x.values.shape[1]}",
                "run the model from its tokens: one stream alone does not determine the rest",
            )
        context = None if watch is None else WatchContext(watch, stack=self.name)
        positions = None if plan is None else plan.positions
        return self._run(x, layer, positions, memory, cache, plan, context, stop)

    def _run(
        self,
        x: Ragged,
        start: int,
        positions: Int[Tensor, " n"] | None,
        memory: Ragged | None,
        cache: Cache | None,
        plan: CachePlan | StaticCachePlan | None,
        context: WatchContext | None,
        stop: int | None = None,
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        if x.lengths.shard is not None:
            check_context_parallel(self.config.layers, self.config.halting, trains=self.training)
        places = x.lengths.positions if positions is None else positions
        encodings = self.encode_positions(places, x.lengths)
        losses: list[AddedLoss] = []
        halts = self.config.halting
        halting = None if halts is None else HaltingSteps(halts, x.values)
        for index in range(start, len(self.layers) if stop is None else stop):
            weights = None if halting is None else self._stop(halting, x, index)
            inside = None
            if context is not None:
                inside = context.within(layer=index, sublayer=Sublayer.ATTENTION)
            x, routed = self.layers[index](
                x,
                encoding=encodings[self.position_owner[index]],
                memory=self._memory(index, memory, cache, inside),
                cache=self._slot(cache, plan, index),
                context=inside,
            )
            if routed is not None:
                losses.append(routed)
            if halting is not None and weights is not None:
                halting.add(x.values, weights)
                # A later token may need this one's keys at every depth, and a watcher its states;
                # in training every layer takes part.
                whole = cache is not None or context is not None or torch.is_grad_enabled()
                if not (whole or torch.compiler.is_compiling() or halting.running.any()):
                    break
        if stop is not None:
            return x, tuple(losses)
        if halting is not None:
            losses.append(halting.loss())
            x = x.with_values(halting.output)
        final = x.with_values(self.final_norm(x.values))
        return final.with_values(observe(context, Tap.FINAL, final.values, final)), tuple(losses)

    def _stop(self, halting: HaltingSteps, x: Ragged, index: int) -> Float[Tensor, " n"]:
        assert self.halting is not None
        logits = self.halting(x.values).squeeze(1)
        return halting.weights(logits, last=index == len(self.layers) - 1)

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
        layers = self.config.layers
        branches = [layer.attention for layer in layers]
        masks = [None if branch is None else branch.inner.mask for branch in branches]
        return Cache(masks, config, [index for index, layer in enumerate(layers) if layer.mixer])

    def explain_kernels(self, queries: Lengths, memory: Lengths | None = None) -> KernelChoices:
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
        return KernelChoices(tuple(choices))

    def _typed_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def encode_positions(
        self, positions: Int[Tensor, " n"], lengths: Lengths | None = None
    ) -> dict[int, PositionEncoding]:
        encodings: dict[int, PositionEncoding] = {}
        for index, layer in enumerate(self._typed_layers()):
            if self.position_owner[index] == index:
                encodings[index] = None
                if layer.attention is not None:
                    encodings[index] = layer.attention.encode_positions(positions, lengths)
        return encodings

    @property
    def rotation_switch(self) -> int | None:
        """The length beyond which LongRoPE rotates all tokens of a text in another way."""
        for layer in self.config.layers:
            position = None if layer.attention is None else layer.attention.inner.position
            if isinstance(position, Rotary) and isinstance(position.scaling, LongRopeScaling):
                return position.scaling.original_length
        return None

    def _check_cache(self, cache: Cache, plan: CachePlan) -> None:
        mixers = {index for index, layer in enumerate(self.config.layers) if layer.mixer}
        if len(cache.stores) != len(self.config.layers) or set(cache.states) != mixers:
            raise InputError(
                f"the cache is for {len(cache.stores)} layers, {len(cache.states)} of them mixers, "
                f"and this model has {len(self.config.layers)} and {len(mixers)}",
                "use model.new_cache()",
            )
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

    def _slot(
        self, cache: Cache | None, plan: CachePlan | StaticCachePlan | None, index: int
    ) -> CacheSlot | StateSlot | None:
        if cache is None or plan is None:
            return None
        mixer = self.config.layers[index].mixer
        if mixer is not None:
            return StateSlot(cache.states[index], mixer.inner)
        store = cache.stores[index]
        return None if store is None else CacheSlot(store, plan)

    def _memory(
        self, index: int, memory: Ragged | None, cache: Cache | None, context: WatchContext | None
    ) -> Ragged | KeyValues | None:
        """With a cache, the keys and values of the memory are computed once."""
        cross = self._typed_layers()[index].cross
        if cache is None or cross is None:
            return memory
        key_values = cache.memory[index]
        if key_values is None and memory is not None:
            if context is not None:
                context = context.within(layer=index, sublayer=Sublayer.CROSS)
            key_values = cache.memory[index] = cross.remember(memory, context)
        return key_values


def _position_owner(config: StackConfig, index: int) -> int:
    """The first layer whose position encoding this one can use."""
    attention = config.attention(index)
    if attention is None or not attention.shares_position:
        return index
    for earlier in range(index):
        candidate = config.attention(earlier)
        if candidate is not None and _position_key(candidate) == _position_key(attention):
            return earlier
    return index


def _position_key(attention: AttentionConfig) -> tuple[object, ...]:
    if isinstance(attention.position, Disentangled):
        # The vectors of distances belong to no head.
        return (attention.position,)
    return attention.position, attention.heads, attention.size
