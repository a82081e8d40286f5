"""A larger model initialized from a smaller one, and another base for rotary positions.

Tiling as for ModernBERT-large (arXiv 2412.13663): each tensor of the small model is placed in the
center of the large one, and the rest is filled by wrapping around.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError
from manyheads.formatting import kind_of
from manyheads.mixers.mixer import Mixer
from manyheads.models import embedding, encoder, seq2seq
from manyheads.models.build import Model, build
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.readout import ReadoutLayer
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts import experts, feedforward
from manyheads.parts.positions import Rotary

Config = TypeVar("Config", bound=ModelConfig)


def tile_tensor(x: Shaped[Tensor, "..."], shape: Sequence[int]) -> Shaped[Tensor, "..."]:
    """The tensor in the center of a larger one, repeated around itself.

    >>> tile_tensor(torch.tensor([1, 2, 3]), [7]).tolist()
    [2, 3, 1, 2, 3, 1, 2]
    """
    for axis, large in enumerate(shape):
        small = x.shape[axis]
        wrapped = (torch.arange(large) - (large - small) // 2) % small
        x = x.index_select(axis, wrapped.to(x.device))
    return x


def source_layers(small: StackConfig, large: StackConfig) -> tuple[int, ...]:
    """For each layer of the large stack, the layer of the small one that it starts from.

    It is the nearest to the same depth, `round(i * small / large)`, of those that see as far: a
    local layer starts from a local one and a global from a global one.
    """
    sources = []
    for index, layer in enumerate(large.layers):
        depth = index * len(small.layers) / len(large.layers)
        fitting = [
            at for at, candidate in enumerate(small.layers) if _kind(candidate) == _kind(layer)
        ]
        if not fitting:
            raise ConfigError(
                f"layer {index} of the large model has no similar layer in the small one",
                "keep sublayers, and local and global layers, as in the small model",
            )
        sources.append(min(fitting, key=lambda at: (abs(at - depth), at != round(depth))))
    return tuple(sources)


def _kind(layer: LayerConfig) -> tuple[object, ...]:
    reaches = []
    for branch in (layer.attention, layer.cross):
        reach = None if branch is None else branch.inner.mask.reach
        ends = () if reach is None else (reach.before, reach.after)
        reaches.append(tuple(end == float("inf") for end in ends))
    feeds = None if layer.feedforward is None else type(layer.feedforward.inner)
    mixes = None if layer.mixer is None else type(layer.mixer.inner)
    return (*reaches, mixes, feeds, layer.convolution is None)


@torch.no_grad()
def tile(small: Model, config: ModelConfig, *, seed: int | None = None) -> Any:
    """A model with the larger `config`, initialized from the weights of a small one.

    Parameters that the small model does not have are initialized from `seed`.
    """
    if type(small.config) is not type(config) or not isinstance(
        small, encoder.TextModel | seq2seq.Seq2Seq
    ):
        raise ConfigError(
            f"{kind_of(small.config)} cannot be tiled into {kind_of(config)}",
            "use a text model of the same type",
        )
    weight = small.embedding.tokens.weight
    large: Any = build(cast(Any, config), seed=seed, device=str(weight.device), dtype=weight.dtype)
    for name, module in small.named_children():
        _grow(module, getattr(large, name, None))
    large.tokenizer, large.sentence = small.tokenizer, small.sentence
    return large


def _grow(small: nn.Module | None, large: nn.Module | None) -> None:
    """Fill the large module from the small one, fused matrices one by one."""
    match small, large:
        case (None, _) | (_, None):
            return
        case Stack(), Stack():
            for index, source in enumerate(source_layers(small.config, large.config)):
                for name, module in large.layers[index].named_children():
                    _grow(getattr(small.layers[source], name, None), module)
            _grow(small.final_norm, large.final_norm)
        case Attention(), Attention():
            _grow_attention(small, large)
        case feedforward.FeedForward(), feedforward.FeedForward():
            _grow_feedforward(small, large)
        case experts.MixtureOfExperts(), experts.MixtureOfExperts():
            _grow_experts(small, large)
        case Mixer(), Mixer():
            # As it is: what the rows of its projections mean differs from mixer to mixer.
            shapes = [
                {name: tensor.shape for name, tensor in mixer.state_dict().items()}
                for mixer in (small, large)
            ]
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{kind_of(small.config)} cannot be tiled into one of another size",
                    "keep its sizes and add layers, or tile a model of attention",
                )
            large.load_state_dict(small.state_dict())
        case embedding.TokenEmbedding(), embedding.TokenEmbedding():
            _check_tables(small, large)
            _grow_each(small, large)
        case ReadoutLayer(), ReadoutLayer() if _classes(small) != _classes(large):
            # With a different number of classes only the transform before the classifier is reused.
            _grow_each(small.transform, large.transform)
        case _:
            _grow_each(small, large)


def _classes(readout: ReadoutLayer) -> int | None:
    return getattr(readout.config, "classes", None)


def _grow_each(small: nn.Module, large: nn.Module) -> None:
    sources = dict(small.named_parameters())
    for name, parameter in large.named_parameters():
        _put(parameter, sources.get(name))


def _put(target: Tensor | None, source: Tensor | None, parts: int = 1, axis: int = 0) -> None:
    """Fill a tensor, or one after another the matrices that are fused along an axis."""
    if target is not None and source is not None:
        for large, small in zip(target.chunk(parts, axis), source.chunk(parts, axis), strict=True):
            large.copy_(tile_tensor(small, large.shape))


def _grow_attention(small: Attention, large: Attention) -> None:
    if isinstance(large.config.position, Rotary) and small.config.size != large.config.size:
        raise ConfigError(
            f"head size {small.config.size} cannot be tiled to {large.config.size} with rotary "
            "positions",
            f"keep head_size={small.config.size}, and use more heads",
        )
    for config in (small.config, large.config):
        if config.groups is not None:
            raise ConfigError(
                f"key heads of {config.groups} queries each cannot be tiled",
                "use a model without pruned heads",
            )
    pairs: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = [
        (input_parts(small, "weight"), input_parts(large, "weight")),
        (input_parts(small, "bias"), input_parts(large, "bias")),
        (small.gate_parameters, large.gate_parameters),
    ]
    for sources, targets in pairs:
        for name in targets.keys() & sources.keys():
            source, target = sources[name], targets[name]
            by_head = source.unflatten(0, _shape(small.config, name, len(source)))
            shape = _shape(large.config, name, len(target))
            grown = tile_tensor(by_head, (*shape, *target.shape[1:]))
            target.copy_(grown.flatten(0, len(shape) - 1))
    columns = _shape(small.config, "query", small.output.in_features)
    shape = _shape(large.config, "query", large.output.in_features)
    grown = tile_tensor(small.output.weight.unflatten(1, columns), (large.config.width, *shape))
    large.output.weight.copy_(grown.flatten(1))
    _put(large.output.bias, small.output.bias)
    for name in ("query_norm", "key_norm", "output_norm", "table"):
        _grow(getattr(small, name), getattr(large, name))
    for name in ("sink", "head_scale"):
        _put(getattr(large, name), getattr(small, name))


def input_parts(attention: Attention, kind: Literal["weight", "bias"]) -> dict[str, Tensor]:
    """The parts of the input projections by name, as views."""
    parts: dict[str, Tensor] = {}
    for _, linear, rows in attention.input_layers:
        joined = getattr(linear, kind)
        if joined is not None:
            parts |= dict(zip(rows, joined.split(list(rows.values())), strict=True))
    return parts


def _shape(config: AttentionConfig, name: str, rows: int) -> tuple[int, ...]:
    """Rows as (key heads, query heads per key head, channels), so that heads are not cut."""
    groups = config.key_heads
    if name in ("query", "gate_query", "gate_output"):
        queries = config.heads // groups
        if rows % (groups * queries) == 0:
            return groups, queries, rows // (groups * queries)
    return (groups, rows // groups) if rows % groups == 0 else (rows,)


def _grow_feedforward(small: feedforward.FeedForward, large: feedforward.FeedForward) -> None:
    for before, after in zip(small.expand.parameters(), large.expand.parameters(), strict=True):
        _put(after, before, 2 if large.gated else 1)
    _grow_each(small.contract, large.contract)


def _grow_experts(small: experts.MixtureOfExperts, large: experts.MixtureOfExperts) -> None:
    _put(large.expand, small.expand, 2, -1)
    _put(large.expand_bias, small.expand_bias, 2, -1)
    _put(large.contract, small.contract)
    _put(large.contract_bias, small.contract_bias)
    for name in ("router", "shared", "shared_gate"):
        _grow(getattr(small, name), getattr(large, name))


def _check_tables(small: embedding.TokenEmbedding, large: embedding.TokenEmbedding) -> None:
    """Rows of an embedding table have an identity and cannot move to the center."""
    for name in ("tokens", "positions", "types"):
        source, target = getattr(small, name), getattr(large, name)
        if source is None or target is None:
            continue
        rows, expected = len(target.weight), len(source.weight)
        if rows != expected:
            raise ConfigError(
                f"the models have {expected} and {rows} {name}",
                f"use {expected} {name}, as in the small model",
            )


def with_rotary_base(config: Config, theta: float) -> Config:
    """The config with another rotary base in the layers with global attention.

    Layers with a window keep their own.
    """
    if theta <= 1:
        raise ConfigError(f"theta must be above 1, got {theta:g}", "use a larger base")
    names = ("encoder", "decoder") if isinstance(config, seq2seq.Seq2SeqConfig) else ("stack",)
    changes: dict[str, Any] = {}
    changed = False
    for name in names:
        stack: StackConfig = getattr(config, name)
        layers = tuple(_with_base(layer, theta) for layer in stack.layers)
        changed |= any(map(operator.is_not, layers, stack.layers))
        changes[name] = replace(stack, layers=layers)
    if not changed:
        raise ConfigError("no layer has rotary positions and global attention", "leave theta out")
    return replace(config, **changes)


def _with_base(layer: LayerConfig, theta: float) -> LayerConfig:
    """A new layer with another rotary base, or the same one without any."""
    if layer.attention is None:
        return layer
    inner = layer.attention.inner
    if not isinstance(inner.position, Rotary) or inner.mask.reach.before < float("inf"):
        return layer
    inner = replace(inner, position=replace(inner.position, theta=theta))
    return replace(layer, attention=replace(layer.attention, inner=inner))


def set_rotary_base(model: Model, theta: float) -> None:
    """Change the rotary base of a model in place, as `with_rotary_base` does for a config.

    Its parameters stay the same objects, so optimizers and wrappers are not affected.
    """
    fresh = build(with_rotary_base(cast(Any, model.config), theta), device="meta")
    # Modules that were added to the model have no counterpart.
    counterparts = dict(fresh.named_modules())
    for name, module in model.named_modules():
        counterpart = counterparts.get(name)
        if isinstance(module, Attention | Layer | Stack) or module is model:
            assert counterpart is not None, f"{name} is not in its own config"
            module.config = counterpart.config
        if isinstance(module, Stack):
            assert isinstance(counterpart, Stack)
            module.position_owner = counterpart.position_owner
