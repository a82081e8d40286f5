"""Trainable heads: only some, all but some, or only gates, by rows and columns of matrices."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge.automatic import native_models_only
from manyheads.errors import ConfigError
from manyheads.lens.results.addresses import Heads, attention_at
from manyheads.models.build import Model
from manyheads.surgery.lora.targets import heads_by_attention

# On a module with partly frozen parameters: masks of what is trainable by name, and hooks.
PARTLY, HOOKS = "partly", "partly_hooks"

# A module, the name of a parameter, and a mask over its elements.
MaskedParameter = tuple[nn.Module, str, Bool[Tensor, "..."]]


@native_models_only
def freeze_except(model: Model, heads: Heads) -> int:
    """Freeze everything but these heads; returns the number of trainable values.

    A head has its rows of the queries, its columns of the output projection, its gates, its sink
    and scale. Keys and values belong to a head where all queries that share them are chosen,
    else they are frozen. Norms, position tables and the output's bias belong to no head. Weight
    decay skips parameters that are trained in part.
    """
    masked = list(_head_parameters(model, heads, shared_by=all))
    unfreeze_all(model)
    model.requires_grad_(False)
    return sum(_train_only(module, name, mask) for module, name, mask in masked)


@native_models_only
def freeze(model: Model, heads: Heads) -> int:
    """Freeze these heads, with keys and values that they share with others, and nothing else."""
    masked = list(_head_parameters(model, heads, shared_by=any))
    unfreeze_all(model)
    for module, name, mask in masked:
        _train_only(module, name, ~mask)
    partly = sum(int(mask.sum()) for _, _, mask in masked)
    return sum(parameter.numel() for parameter in model.parameters()) - partly


@native_models_only
def freeze_except_gates(model: nn.Module) -> int:
    """Freeze everything but the gates of all attentions; returns the number of trainable values."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not any(attention.config.gates for attention in attentions):
        raise ConfigError("the model has no gates", "add some with surgery.add_gates")
    unfreeze_all(model)
    model.requires_grad_(False)
    count = 0
    for attention in attentions:
        for _, linear, rows in attention.input_layers:
            gates = torch.cat(
                [torch.full((n,), name.startswith("gate_")) for name, n in rows.items()]
            )
            if gates.any():
                for name, parameter in linear.named_parameters(recurse=False):
                    count += _train_only(linear, name, _along(gates, 0, parameter))
        for name, logits in attention.gate_parameters.items():
            count += _train_only(attention, name, torch.ones_like(logits, dtype=torch.bool))
    return count


@native_models_only
def unfreeze_all(model: nn.Module) -> None:
    """Make every parameter trainable."""
    for module in model.modules():
        for hook in module.__dict__.pop(HOOKS, ()):
            hook.remove()
        module.__dict__.pop(PARTLY, None)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)


def copy_trainable(model: nn.Module, source: nn.Module) -> None:
    """Make the same parameters of a model trainable as of another of the same shape."""
    unfreeze_all(model)
    ours = dict(model.named_modules())
    for path, module in source.named_modules():
        partly = module.__dict__.get(PARTLY, {})
        for name, parameter in module.named_parameters(recurse=False):
            if name in partly:
                _train_only(ours[path], name, partly[name])
            else:
                getattr(ours[path], name).requires_grad_(parameter.requires_grad)


def _train_only(module: nn.Module, name: str, mask: Bool[Tensor, "..."]) -> int:
    """Make only some elements of a parameter trainable."""
    parameter = getattr(module, name)
    parameter.requires_grad_(bool(mask.any()))
    if mask.any() and not mask.all():
        hook = parameter.register_hook(partial(_mask_gradient, mask))
        module.__dict__.setdefault(HOOKS, []).append(hook)
        module.__dict__.setdefault(PARTLY, {})[name] = mask
    return int(mask.sum())


def _mask_gradient(mask: Bool[Tensor, "..."], gradient: Tensor) -> Tensor:
    # Selected, not multiplied, so that a NaN gradient does not change frozen elements.
    return torch.where(mask.to(gradient.device), gradient, 0.0)


def _head_parameters(model: Model, heads: Heads, *, shared_by: Any) -> Iterator[MaskedParameter]:
    stacks = model.stacks()
    for (stack, layer, sublayer), numbers in heads_by_attention(model, heads).items():
        yield from _of_attention(attention_at(stacks[stack], layer, sublayer), numbers, shared_by)


def _of_attention(
    attention: Attention, heads: frozenset[int], shared_by: Any
) -> Iterator[MaskedParameter]:
    """The parameters of these heads of one attention layer."""
    config = attention.config
    queries = torch.tensor([head in heads for head in range(config.heads)])
    sharing: dict[int, list[bool]] = {}
    for head, owner in enumerate(config.owners):
        sharing.setdefault(owner, []).append(head in heads)
    keys = torch.tensor([shared_by(sharing[owner]) for owner in sorted(sharing)])
    masks = {"query": queries, "key": keys, "value": keys}
    for gate in config.gates:
        # A gate that heads share, or a final one, belongs to no head.
        shared = gate.heads == "shared" or gate.at == "final"
        none = torch.zeros(1, dtype=torch.bool)
        masks[f"gate_{gate.at}"] = none if shared else masks.get(gate.at, queries)
    for _, linear, rows in attention.input_layers:
        parts = [masks[name].repeat_interleave(n // len(masks[name])) for name, n in rows.items()]
        for name, parameter in linear.named_parameters(recurse=False):
            yield linear, name, _along(torch.cat(parts), 0, parameter)
    for name, logits in attention.gate_parameters.items():
        yield attention, name, masks[name].repeat_interleave(len(logits) // len(masks[name]))
    columns = queries.repeat_interleave(config.size)
    yield attention.output, "weight", _along(columns, 1, attention.output.weight)
    for name in ("sink", "head_scale"):
        if getattr(attention, name) is not None:
            yield attention, name, queries


def _along(mask: Bool[Tensor, " k"], axis: int, parameter: Tensor) -> Bool[Tensor, "..."]:
    """A mask along one axis, expanded to the shape of the parameter."""
    shape = [-1 if dimension == axis else 1 for dimension in range(parameter.dim())]
    return mask.view(shape).expand(parameter.shape)
