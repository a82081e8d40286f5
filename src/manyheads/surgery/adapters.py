"""Adapters of a whole model: added, switched by name, folded into the weights and out of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from manyheads.errors import ConfigError, InputError
from manyheads.surgery.lowrank import (
    LowRank,
    Update,
    active_on,
    adapters_on,
    attach,
    fold,
    merged_on,
    set_active,
    set_merged,
    strip,
)
from manyheads.surgery.quantised import Quantised
from manyheads.surgery.targets import Part, Spans, chosen_heads, chosen_parts, of_heads, parts_of
from manyheads.surgery.wholes import addresses_of, bring, forget, put_in_place, wholes_of

__all__ = [
    "Adapter",
    "active",
    "adapt",
    "adapters",
    "check_name",
    "detach",
    "merge",
    "unmerge",
    "use",
]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter changes: the addresses of its projections, and how many numbers learn.

    `wholes` are the addresses of parameters that it brings whole.
    """

    name: str
    parts: tuple[str, ...]
    parameters: int
    wholes: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.name}: {self.parameters:,} numbers in {len(self.parts)} projections"
        owners = dict.fromkeys(address.partition(".")[0] for address in self.wholes)
        return f"{said} and the whole {' and '.join(owners)}" if owners else said


def adapt(model: nn.Module, config: LowRank, name: str = "default", *, seed: int = 0) -> Adapter:
    """Add an adapter, make it the active one, and let nothing else learn.

    It starts at zero, so that the model's output does not change.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, seed=0)
    >>> print(adapt(model, LowRank(rank=4, heads=("L0H1",))))
    default: 384 numbers in 2 projections
    """
    check_name(model, name)
    planned = list(_planned(model, config))
    wholes = addresses_of(model, config.whole)
    generator = torch.Generator().manual_seed(seed)
    for part, rows, columns in planned:
        update = Update(
            rank=config.rank,
            scale=config.scale,
            dropout=config.dropout,
            shape=(part.layer.out_features, part.layer.in_features),
            rows=rows,
            columns=columns,
            root=config.scaling == "root",
        )
        update.draw(generator)
        attach(part.layer, name, part.name, _beside(update, part.layer))
    bring(model, name, dict.fromkeys(wholes))
    use(model, name)
    for each in model.parameters():
        each.requires_grad_(False)
    for linear in _carriers(model):
        for update in adapters_on(linear).get(name, {}).values():
            update.requires_grad_(True)
    for parameter in wholes_of(model, name).values():
        parameter.requires_grad_(True)
    return adapters(model)[name]


def _planned(model: nn.Module, config: LowRank) -> Iterator[tuple[Part, Spans, Spans]]:
    parts = chosen_parts(parts_of(model), config.targets, config.layers)
    heads = chosen_heads(model, config.heads)
    count = 0
    for part in parts:
        rows: Spans = (part.rows,)
        columns: Spans = ((0, part.layer.in_features),)
        if config.heads:
            if part.attention is not None and part.place not in heads:
                continue
            rows, own = of_heads(part, heads.get(part.place, frozenset()))
            columns = own or columns
        count += 1
        yield part, rows, columns
    if not count:
        raise ConfigError(
            f"targets={config.targets} and layers={config.layers} meet none of the chosen heads",
            "choose heads of those layers",
        )


def _beside(update: Update, linear: nn.Linear) -> Update:
    """On the projection's device and in its mode; numbers that learn are float32 at least."""
    first = next(iter((*linear.parameters(), *linear.buffers())))
    exact = torch.float64 if first.dtype == torch.float64 else torch.float32
    return update.to(device=first.device, dtype=exact).train(linear.training)


def check_name(model: nn.Module, name: str) -> None:
    """Refuse a name that modules cannot have, or that is taken, or a model with merged adapters."""
    if not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ConfigError(f"an adapter cannot be called {name!r}", "use a word without dots")
    if name in adapters(model):
        raise ConfigError(f"there is an adapter {name!r} already", "detach it or use another name")
    _check_unmerged(model)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by name."""
    addresses: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for path, linear in _named_carriers(model):
        for name, updates in adapters_on(linear).items():
            owner = path.rpartition(".")[0]
            addresses.setdefault(name, []).extend(f"{owner}.{part}" for part in updates)
            learns = sum(each.numel() for one in updates.values() for each in one.parameters())
            numbers[name] = numbers.get(name, 0) + learns
    found = {}
    for name, parts in addresses.items():
        wholes = wholes_of(model, name)
        learns = numbers[name] + sum(each.numel() for each in wholes.values())
        found[name] = Adapter(name, tuple(parts), learns, tuple(wholes))
    return found


def active(model: nn.Module) -> tuple[str, ...]:
    """The adapters whose updates count, in the order that they were asked for."""
    found = [name for linear in _carriers(model) for name in active_on(linear)]
    return tuple(dict.fromkeys(found))


def use(model: nn.Module, *names: str) -> None:
    """Let these adapters count, summed, and no others; no name switches all of them off.

    Of adapters that bring the same part whole, one counts at a time.
    """
    known = adapters(model)
    for name in names:
        if name not in known:
            raise InputError(
                f"there is no adapter {name!r}", f"use one of {', '.join(known) or 'none: add one'}"
            )
    _check_unmerged(model)
    put_in_place(model, dict.fromkeys(names))
    for linear in _carriers(model):
        set_active(linear, tuple(dict.fromkeys(names)))


def merge(model: nn.Module, *names: str) -> None:
    """Fold adapters into the weights, by default the active ones; `unmerge` takes them out again.

    The projections are plain ones from then on, as fast as before any adapter.
    """
    folded = names or active(model)
    use(model, *folded)
    for linear in _carriers(model):
        if isinstance(linear, Quantised):
            raise ConfigError(
                "four bits cannot take up a small update", "detach, dequantise, and add it again"
            )
    for linear in _carriers(model):
        here = active_on(linear)
        set_active(linear, ())
        fold(linear, here, 1)
        set_merged(linear, here)


def unmerge(model: nn.Module) -> None:
    """Take folded adapters out of the weights and let them count beside them."""
    for linear in _carriers(model):
        here = merged_on(linear)
        fold(linear, here, -1)
        set_merged(linear, ())
        set_active(linear, here)


def detach(model: nn.Module, *names: str) -> None:
    """Forget adapters, by default all; what was merged stays in the weights for good."""
    for name in names:
        if name not in adapters(model):
            raise InputError(
                f"there is no adapter {name!r}", f"use one of {', '.join(adapters(model))}"
            )
    gone = names or tuple(adapters(model))
    merged = {name for linear in _carriers(model) for name in merged_on(linear)}
    for linear in list(_carriers(model)):
        for name in adapters_on(linear):
            if name in gone:
                strip(linear, name)
    for name in gone:
        forget(model, name, stays=name in merged)


def _check_unmerged(model: nn.Module) -> None:
    folded = [name for linear in _carriers(model) for name in merged_on(linear)]
    if folded:
        raise ConfigError(
            f"{folded[0]!r} is merged into the weights",
            "unmerge(model) to go back, or detach(model) to keep the weights as they are",
        )


def _carriers(model: nn.Module) -> Iterator[nn.Linear]:
    for _, linear in _named_carriers(model):
        yield linear


def _named_carriers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "adapters" in module._modules:
            yield path, module
