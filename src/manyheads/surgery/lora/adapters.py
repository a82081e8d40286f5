"""The adapters of a model: add, activate by name, merge into the weights, unmerge, delete."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from manyheads.bridge.automatic import native_models_only
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model
from manyheads.surgery.lora import low_rank, modules_to_save, quantization, targets


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: the addresses of its projections, and how many parameters it trains.

    `modules` are the addresses of parameters that it trains in full (`modules_to_save`).
    """

    name: str
    projections: tuple[str, ...]
    parameters: int
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name}: {self.parameters:,} parameters in {len(self.projections)} projections"
        owners = dict.fromkeys(address.partition(".")[0] for address in self.modules)
        return f"{text} and in {' and '.join(owners)}" if owners else text


@native_models_only
def adapt(
    model: Model, config: low_rank.LoraConfig, name: str = "default", *, seed: int = 0
) -> Adapter:
    """Add an adapter, make it the only active one, and freeze everything else.

    It starts at zero, so that the model's output does not change.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, seed=0)
    >>> print(adapt(model, low_rank.LoraConfig(rank=4, heads=("L0H1",))))
    default: 384 parameters in 2 projections
    """
    check_name(model, name)
    planned = list(_plan(model, config))
    modules = modules_to_save.addresses_of(model, config.modules_to_save)
    generator = torch.Generator().manual_seed(seed)
    for part, rows, columns in planned:
        update = low_rank.LowRankUpdate(
            rank=config.rank,
            scale=config.scale,
            dropout=config.dropout,
            shape=(part.layer.out_features, part.layer.in_features),
            rows=rows,
            columns=columns,
            root=config.scaling == "root",
        )
        update.initialize(generator)
        low_rank.attach(part.layer, name, part.name, _like_linear(update, part.layer))
    modules_to_save.add_modules(model, name, dict.fromkeys(modules))
    set_adapter(model, name)
    model.requires_grad_(False)
    for linear in _adapted_linears(model):
        for update in low_rank.adapters_on(linear).get(name, {}).values():
            update.requires_grad_(True)
    for parameter in modules_to_save.modules_of(model, name).values():
        parameter.requires_grad_(True)
    return list_adapters(model)[name]


def _plan(
    model: Model, config: low_rank.LoraConfig
) -> Iterator[tuple[targets.Projection, targets.Spans, targets.Spans]]:
    parts = targets.find_projections(targets.projections_of(model), config.targets, config.layers)
    heads = targets.heads_by_attention(model, config.heads)
    count = 0
    for part in parts:
        rows: targets.Spans = (part.rows,)
        columns: targets.Spans = ((0, part.layer.in_features),)
        if config.heads:
            if part.attention is not None and part.place not in heads:
                continue
            rows, own = targets.rows_of_heads(part, heads.get(part.place, frozenset()))
            columns = own or columns
        count += 1
        yield part, rows, columns
    if not count:
        raise ConfigError(
            f"targets={config.targets} and layers={config.layers} match none of the heads",
            "choose heads of those layers",
        )


def _like_linear(update: low_rank.LowRankUpdate, linear: nn.Linear) -> low_rank.LowRankUpdate:
    """Move an update to the device and mode of the projection, in at least float32."""
    first = next(iter((*linear.parameters(), *linear.buffers())))
    exact = torch.float64 if first.dtype == torch.float64 else torch.float32
    return update.to(device=first.device, dtype=exact).train(linear.training)


def check_name(model: nn.Module, name: str) -> None:
    """Raise for an invalid or used name, or a model with merged adapters."""
    if not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ConfigError(f"{name!r} is not a valid adapter name", "use a word without dots")
    if name in list_adapters(model):
        raise ConfigError(f"there is already an adapter {name!r}", "delete it or use another name")
    _check_unmerged(model)


@native_models_only
def list_adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by name."""
    addresses: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for path, linear in _named_adapted_linears(model).items():
        for name, updates in low_rank.adapters_on(linear).items():
            owner = path.rpartition(".")[0]
            addresses.setdefault(name, []).extend(f"{owner}.{part}" for part in updates)
            trained = sum(
                parameter.numel()
                for update in updates.values()
                for parameter in update.parameters()
            )
            numbers[name] = numbers.get(name, 0) + trained
    adapters = {}
    for name, parts in addresses.items():
        modules = modules_to_save.modules_of(model, name)
        trained = numbers[name] + sum(parameter.numel() for parameter in modules.values())
        adapters[name] = Adapter(name, tuple(parts), trained, tuple(modules))
    return adapters


@native_models_only
def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """The names of the active adapters, in the order in which they were set."""
    active = [name for linear in _adapted_linears(model) for name in low_rank.active_on(linear)]
    return tuple(dict.fromkeys(active))


@native_models_only
def set_adapter(model: nn.Module, *names: str) -> None:
    """Activate these adapters, summed, and no others; without a name all are switched off.

    Of adapters that save the same module, only one can be active at a time.
    """
    check_exist(model, *names)
    _check_unmerged(model)
    modules_to_save.activate_modules(model, dict.fromkeys(names))
    for linear in _adapted_linears(model):
        low_rank.set_active(linear, tuple(dict.fromkeys(names)))


@native_models_only
def merge(model: nn.Module, *names: str) -> None:
    """Merge adapters into the weights, by default the active ones; `unmerge` undoes it.

    The projections are then as fast as without any adapter.
    """
    merged = names or active_adapters(model)
    set_adapter(model, *merged)
    for linear in _adapted_linears(model):
        if isinstance(linear, quantization.Quantized):
            raise ConfigError(
                "adapters cannot be merged into four-bit weights, which would lose the update",
                "delete the adapter, call surgery.dequantize, and add it again",
            )
    for linear in _adapted_linears(model):
        active = low_rank.active_on(linear)
        low_rank.set_active(linear, ())
        low_rank.add_to_weight(linear, active, 1)
        low_rank.set_merged(linear, active)


@native_models_only
def unmerge(model: nn.Module) -> None:
    """Subtract merged adapters from the weights and activate them."""
    for linear in _adapted_linears(model):
        merged = low_rank.merged_on(linear)
        low_rank.add_to_weight(linear, merged, -1)
        low_rank.set_merged(linear, ())
        low_rank.set_active(linear, merged)


@native_models_only
def delete_adapter(model: nn.Module, *names: str) -> None:
    """Delete adapters, by default all; what was merged stays in the weights for good."""
    check_exist(model, *names)
    deleted = names or tuple(list_adapters(model))
    merged = {name for linear in _adapted_linears(model) for name in low_rank.merged_on(linear)}
    for linear in list(_adapted_linears(model)):
        for name in low_rank.adapters_on(linear):
            if name in deleted:
                low_rank.remove_adapter(linear, name)
    for name in deleted:
        modules_to_save.drop_modules(model, name, stays=name in merged)


def check_exist(model: nn.Module, *names: str) -> None:
    """Raise for a name of no adapter."""
    existing = list_adapters(model)
    remedy = f"use one of {', '.join(existing)}" if existing else "add one with surgery.adapt"
    for name in names:
        if name not in existing:
            raise InputError(f"there is no adapter {name!r}", remedy)


def _check_unmerged(model: nn.Module) -> None:
    folded = [name for linear in _adapted_linears(model) for name in low_rank.merged_on(linear)]
    if folded:
        raise ConfigError(
            f"{folded[0]!r} is merged into the weights",
            "call surgery.unmerge to undo it, or surgery.delete_adapter to keep the merged weights",
        )


def _adapted_linears(model: nn.Module) -> Iterable[nn.Linear]:
    return _named_adapted_linears(model).values()


def _named_adapted_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "adapters" in module._modules
    }
