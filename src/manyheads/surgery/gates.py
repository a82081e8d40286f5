"""Gates for a model that was trained without them, started so that it answers as before."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError
from manyheads.lens.addresses import stacks_of
from manyheads.models.build import Model, build
from manyheads.models.layer import Branch, Layer
from manyheads.models.recipes import ModelConfig
from manyheads.parts.gates import Gate
from manyheads.taps import Sublayer

__all__ = ["add_gates"]

AnyModel = TypeVar("AnyModel", bound=Model)
FIELDS = {"main": "stack", "encoder": "encoder", "decoder": "decoder"}
# silu is 1 here.
OPEN_SILU = 1.2784645427610738
# sigmoid is near zero here and can still learn: to add a half would round small numbers away.
CLOSED_SIGMOID = -4.0


def add_gates(
    model: AnyModel,
    gate: Gate,
    layers: tuple[int, ...] | Literal["all"] = "all",
    *,
    sublayer: Literal[Sublayer.ATTENTION, Sublayer.CROSS] = Sublayer.ATTENTION,
    stack: Literal["all", "main", "encoder", "decoder"] = "all",
) -> AnyModel:
    """The same model with a gate in these layers, in memory of its own; its output is the same.

    The gate's weights start at zero, so that it is one number for every token, and what it meets
    is scaled or shifted to undo that number: a sigmoid halves, and the weights before it (of an
    output gate, those after it) are doubled. Only a silu that multiplies, which is zero at zero,
    and a sigmoid that adds need biases, and the layer then has them.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> gated = add_gates(model, Gate(at="output"), (1,))
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> torch.equal(gated(ids).logits, model(ids).logits)
    True
    """
    chosen = _chosen(model, layers, sublayer, stack)
    config: Any = model.config
    for name in {name for name, _ in chosen}:
        held = getattr(config, FIELDS[name])
        each = list(held.layers)
        for index in [index for stack_name, index in chosen if stack_name == name]:
            branch: Branch[AttentionConfig] = getattr(each[index], sublayer.value)
            inner = _gated(branch.inner, gate, index)
            each[index] = replace(each[index], **{sublayer.value: replace(branch, inner=inner)})
        config = replace(config, **{FIELDS[name]: replace(held, layers=tuple(each))})
    fresh = build(cast(ModelConfig, config), device="meta")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, index in chosen:
        old, new = (_attention(each, name, index, sublayer) for each in (model, fresh))
        prefix = f"{FIELDS[name]}.layers.{index}.{sublayer.value}."
        own = _weights(old, new, gate)
        state |= {f"{prefix}{part}": tensor for part, tensor in own.items()}
    if odd := sorted(state.keys() ^ fresh.state_dict().keys()):
        raise ConfigError(
            f"{odd[0]} is no part of a plain model",
            "merge and detach adapters, and dequantise, before gates are added",
        )
    fresh.load_state_dict(state, assign=True)
    fresh.comes_from(model)
    return cast(AnyModel, fresh.train(model.training))


def _chosen(
    model: Model, layers: tuple[int, ...] | Literal["all"], sublayer: Sublayer, stack: str
) -> list[tuple[str, int]]:
    """Stacks and layers that have such an attention; those that are named must."""
    stacks = stacks_of(model)
    if stack != "all" and stack not in stacks:
        raise ConfigError(f"the model has no stack {stack!r}", f"use {', '.join(stacks)}")
    found = []
    for name, each in stacks.items():
        if stack not in ("all", name):
            continue
        having = [
            index
            for index, layer in enumerate(each.config.layers)
            if getattr(layer, sublayer.value) is not None
        ]
        wanted = having if layers == "all" else layers
        # Of two stacks the one without cross-attention has nothing to say here.
        for index in wanted if having else ():
            if index not in having:
                raise ConfigError(
                    f"layer {index} of {name} has no {sublayer.value}",
                    f"use {', '.join(map(str, having))}",
                )
            found.append((name, index))
    if not found:
        raise ConfigError(f"no layer has {sublayer.value}", "choose what the model has")
    return found


@dataclass(frozen=True, slots=True)
class _Start:
    """The logit that a gate starts with, and the value that it then has."""

    logit: float
    value: float

    @classmethod
    def of(cls, gate: Gate) -> "_Start":
        match gate.how, gate.activation:
            case "times", "sigmoid":
                return cls(0.0, 0.5)
            case "plus", "silu":
                return cls(0.0, 0.0)
            case "times", "silu":
                return cls(OPEN_SILU, float(F.silu(torch.tensor(OPEN_SILU))))
            case _:
                return cls(CLOSED_SIGMOID, float(torch.tensor(CLOSED_SIGMOID).sigmoid()))

    @property
    def shifts(self) -> bool:
        return self.value != 0.0


def _gated(config: AttentionConfig, gate: Gate, index: int) -> AttentionConfig:
    if any(each.at == gate.at for each in config.gates):
        raise ConfigError(
            f"layer {index} has a gate at {gate.at!r} already", "choose another place"
        )
    start = _Start.of(gate)
    inputs, output = config.bias in ("inputs", "all"), config.bias in ("output", "all")
    adds = gate.how == "plus" and start.shifts
    inputs |= start.logit != 0.0 or (adds and gate.at in ("query", "key", "value"))
    output |= adds and gate.at in ("output", "final")
    bias: Any = {(0, 0): "none", (1, 0): "inputs", (0, 1): "output", (1, 1): "all"}[inputs, output]
    return replace(config, gates=(*config.gates, gate), bias=bias)


def _attention(model: Model, stack: str, index: int, sublayer: Sublayer) -> Attention:
    layer = cast(Layer, stacks_of(model)[stack].layers[index])
    found = layer.cross if sublayer is Sublayer.CROSS else layer.attention
    assert found is not None
    return found


@torch.no_grad()
def _weights(old: Attention, new: Attention, gate: Gate) -> dict[str, Tensor]:
    """The projections of the gated attention by name."""
    weights, biases = dict(_rows(old, "weight")), dict(_rows(old, "bias"))
    start, like = _Start.of(gate), old.output.weight
    rows = new.config.rows()
    for name, count in rows.items():
        weights.setdefault(name, like.new_zeros(count, new.config.width))
        biases.setdefault(name, like.new_zeros(count))
    biases[f"gate_{gate.at}"] = torch.full_like(biases[f"gate_{gate.at}"], start.logit)
    output = old.output.weight.clone()
    output_bias: Tensor = (
        like.new_zeros(len(output)) if old.output.bias is None else old.output.bias
    )
    if gate.how == "times":
        grow = 1 / start.value
        match gate.at:
            case "output":
                output = output * grow
            case "final":
                output, output_bias = output * grow, output_bias * grow
            case name:
                weights[name], biases[name] = weights[name] * grow, biases[name] * grow
    elif start.shifts:
        match gate.at:
            case "output":
                output_bias = output_bias - start.value * output.sum(1)
            case "final":
                output_bias = output_bias - start.value
            case name:
                biases[name] = biases[name] - start.value
    found = {"output.weight": output, "output.bias": output_bias.clone()}
    for layer, names in (("project", new.our_rows), ("project_memory", new.memory_rows)):
        if names:
            found[f"{layer}.weight"] = torch.cat([weights[name] for name in names])
            found[f"{layer}.bias"] = torch.cat([biases[name] for name in names])
    wanted = new.state_dict().keys()
    return {name: tensor for name, tensor in found.items() if name in wanted}


def _rows(attention: Attention, kind: Literal["weight", "bias"]) -> Iterator[tuple[str, Tensor]]:
    """Each part of the input projections."""
    for linear, rows in (
        (attention.project, attention.our_rows),
        (attention.project_memory, attention.memory_rows),
    ):
        tensor = None if linear is None else getattr(linear, kind)
        if tensor is not None:
            yield from zip(rows, tensor.split(list(rows.values())), strict=True)
