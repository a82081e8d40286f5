"""Which heads learn: some alone, all but some, or gates alone, whatever matrix they are rows of."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.errors import ConfigError
from manyheads.lens.addresses import attention_at, stacks_of
from manyheads.parts.gates import Gate
from manyheads.surgery.targets import AnyHead, chosen_heads

__all__ = ["learn_all", "learn_all_but", "learn_as", "learn_gates", "learn_only"]

# On a module that owns parameters of which some places rest: those that learn by name, and hooks.
PARTLY, HOOKS = "partly", "partly_hooks"

# A parameter by its owner and name, and the places of it that are meant.
Owned = tuple[nn.Module, str, Bool[Tensor, "..."]]


def learn_only(model: nn.Module, heads: Iterable[AnyHead]) -> int:
    """Let these heads learn and nothing else; says how many numbers that are.

    A head has its rows of the queries, its columns of the output projection, its gates, its sink
    and scale. Keys and values are a head's where all queries that share them are chosen; else they
    rest. Norms, tables of positions and the output's bias are no head's. Weight decay spares what
    learns in part.
    """
    owned = list(_owned(model, heads, shared_by=all))
    learn_all(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return sum(_hold(module, name, places) for module, name, places in owned)


def learn_all_but(model: nn.Module, heads: Iterable[AnyHead]) -> int:
    """Let everything learn but these heads, and the keys and values that they share with others."""
    owned = list(_owned(model, heads, shared_by=any))
    learn_all(model)
    for module, name, places in owned:
        _hold(module, name, ~places)
    partly = sum(int(places.sum()) for _, _, places in owned)
    return sum(parameter.numel() for parameter in model.parameters()) - partly


def learn_gates(model: nn.Module) -> int:
    """Let the gates of all attentions learn and nothing else; says how many numbers that are."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not any(attention.config.gates for attention in attentions):
        raise ConfigError("the model has no gates", "add some with surgery.add_gates")
    learn_all(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    count = 0
    for attention in attentions:
        for linear, rows in _inputs(attention):
            gates = torch.cat(
                [torch.full((n,), name.startswith("gate_")) for name, n in rows.items()]
            )
            if gates.any():
                for name, parameter in linear.named_parameters(recurse=False):
                    count += _hold(linear, name, _along(gates, 0, parameter))
    return count


def learn_all(model: nn.Module) -> None:
    """Let every parameter learn, as in the beginning."""
    for module in model.modules():
        for hook in module.__dict__.pop(HOOKS, ()):
            hook.remove()
        module.__dict__.pop(PARTLY, None)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)


def learn_as(model: nn.Module, other: nn.Module) -> None:
    """Let of a model learn what does of another of the same parts."""
    learn_all(model)
    ours = dict(model.named_modules())
    for path, module in other.named_modules():
        partly = module.__dict__.get(PARTLY, {})
        for name, parameter in module.named_parameters(recurse=False):
            if name in partly:
                _hold(ours[path], name, partly[name])
            else:
                getattr(ours[path], name).requires_grad_(parameter.requires_grad)


def _hold(module: nn.Module, name: str, learns: Bool[Tensor, "..."]) -> int:
    """Let only some places of a parameter learn."""
    parameter = getattr(module, name)
    parameter.requires_grad_(bool(learns.any()))
    if learns.any() and not learns.all():
        hook = parameter.register_hook(partial(_masked, learns))
        module.__dict__.setdefault(HOOKS, []).append(hook)
        module.__dict__.setdefault(PARTLY, {})[name] = learns
    return int(learns.sum())


def _masked(learns: Bool[Tensor, "..."], gradient: Tensor) -> Tensor:
    # Chosen, not multiplied: what rests stays where it is even beside a gradient that is no number.
    return torch.where(learns.to(gradient.device), gradient, 0.0)


def _owned(model: nn.Module, heads: Iterable[AnyHead], *, shared_by: Any) -> Iterator[Owned]:
    stacks = stacks_of(model)
    for (stack, layer, sublayer), numbers in chosen_heads(model, heads).items():
        yield from _of_attention(attention_at(stacks[stack], layer, sublayer), numbers, shared_by)


def _of_attention(attention: Attention, heads: frozenset[int], shared_by: Any) -> Iterator[Owned]:
    """What belongs to these heads of one attention."""
    config = attention.config
    queries = torch.tensor([head in heads for head in range(config.heads)])
    sharing: dict[int, list[bool]] = {}
    for head, owner in enumerate(config.owners):
        sharing.setdefault(owner, []).append(head in heads)
    keys = torch.tensor([shared_by(sharing[owner]) for owner in sorted(sharing)])
    meant = {"query": queries, "key": keys, "value": keys}
    for gate in config.gates:
        meant[f"gate_{gate.at}"] = _of_gate(gate, queries, keys)
    for linear, rows in _inputs(attention):
        places = torch.cat(
            [
                meant[name].repeat_interleave(count // len(meant[name]))
                for name, count in rows.items()
            ]
        )
        for name, parameter in linear.named_parameters(recurse=False):
            yield linear, name, _along(places, 0, parameter)
    columns = queries.repeat_interleave(config.size)
    yield attention.output, "weight", _along(columns, 1, attention.output.weight)
    for name in ("sink", "head_scale"):
        if getattr(attention, name) is not None:
            yield attention, name, queries


def _of_gate(gate: Gate, queries: Bool[Tensor, " h"], keys: Bool[Tensor, " g"]) -> Tensor:
    """A gate that heads share, or one behind them, is no head's."""
    if gate.heads == "shared" or gate.at == "final":
        return torch.zeros(1, dtype=torch.bool)
    return keys if gate.at in ("key", "value") else queries


def _inputs(attention: Attention) -> Iterator[tuple[nn.Linear, dict[str, int]]]:
    yield attention.project, attention.our_rows
    if attention.project_memory is not None:
        yield attention.project_memory, attention.memory_rows


def _along(places: Bool[Tensor, " k"], axis: int, parameter: Tensor) -> Bool[Tensor, "..."]:
    """Places along one axis, for every place of the others."""
    shape = [-1 if each == axis else 1 for each in range(parameter.dim())]
    return places.view(shape).expand(parameter.shape)
