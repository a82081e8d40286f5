"""Pruning: a new model without some heads, neurons or layers, and the origins of its heads."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from manyheads.bridge.automatic import native_models_only
from manyheads.errors import InputError
from manyheads.lens.causal import evaluate, replacements
from manyheads.lens.inputs.cached_run import StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results.addresses import Address, Heads, blocks_of, heads_in
from manyheads.models.build import Model, eval_mode
from manyheads.models.stack import Stack
from manyheads.surgery.addresses import find_separable_heads, find_stack
from manyheads.surgery.rebuild import AnyModel, LayerPlan, Means, full_plan, rebuild
from manyheads.taps import Head, Sublayer

FILE = "surgery.json"


@native_models_only
def origins(model: Model) -> dict[Address, Address]:
    """For every head of a model its address in the model that pruning started from.

    >>> from manyheads.models.build import build
    >>> from manyheads.surgery import prune
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> {str(new): str(old) for new, old in origins(prune(model, ["L0H1", "L0H2"])).items()}
    {'L0H0': 'L0H0', 'L0H1': 'L0H3'}
    """
    addresses = [address for block in blocks_of(model) for address in block.addresses]
    recorded = model.side_files.get(FILE)
    if recorded is None:
        return {address: address for address in addresses}
    recorded_heads = json.loads(recorded)["heads"]
    if len(recorded_heads) != len(addresses):
        raise InputError(
            f"{FILE} lists {len(recorded_heads)} heads and the model has {len(addresses)}",
            "delete the file: it belongs to another model",
        )
    return {address: Address.parse(recorded_heads[str(address)]) for address in addresses}


def origins_in(before: Model, after: Model) -> dict[Address, Address] | None:
    """For every head of `after` its address in `before`, which may have been pruned too.

    None if `after` has no record, in which case both number their heads alike.
    """
    if FILE not in after.side_files:
        return None
    present = {first: address for address, first in origins(before).items()}
    addresses = {}
    for address, first in origins(after).items():
        if first not in present:
            raise InputError(
                f"{address} of the second model is {first} of the original, which the first model "
                "does not have",
                "give the model that the second one was pruned from",
            )
        addresses[address] = present[first]
    return addresses


def record_origins(fresh: Model, model: Model, plans: Mapping[str, Sequence[LayerPlan]]) -> None:
    """Record in a new model the original addresses of its heads."""
    before = origins(model)
    addresses = {
        str(Address(Head(index, place), stack, sublayer)): str(
            before[Address(Head(layer.source, head), stack, sublayer)]
        )
        for stack, layers in plans.items()
        for index, layer in enumerate(layers)
        for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS)
        for place, head in enumerate(
            layer.heads(sublayer) or _mixer_heads(model.stacks()[stack], layer.source, sublayer)
        )
    }
    # Without the last heads of a layer the others keep their numbers, but some are missing.
    same = len(addresses) == len(before) and all(new == old for new, old in addresses.items())
    if FILE not in model.side_files and same:
        return
    text = json.dumps({"heads": addresses}, indent=1).encode()
    fresh.side_files = {**model.side_files, FILE: text}


def _mixer_heads(stack: Stack, layer: int, sublayer: Sublayer) -> range:
    """The heads of a mixer, which all stay."""
    config = stack.config.layers[layer]
    return range(0 if config.mixer is None else heads_in(config, sublayer))


ReplaceWith = Literal["zero", "mean"]


@native_models_only
def prune(
    model: AnyModel, heads: Heads, replace_with: ReplaceWith = "zero", texts: Inputs | None = None
) -> AnyModel:
    """A new model without these heads, which computes the same as this one with them ablated.

    `heads` are named as in `lens.ablate`: "L5H1", "decoder L2H0 cross", "L3" for a layer. With
    replace_with="mean" their mean output over `texts` stays, in the bias of the output projection.
    The new model numbers its heads anew; `origins` has their old addresses.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=4, vocabulary=50, seed=0)
    >>> pruned = prune(model, ["L0H1", "L1H0", "L1H3"])
    >>> [layer.attention.inner.heads for layer in pruned.config.stack.layers]
    [3, 2]
    """
    chosen = find_separable_heads(model, heads)
    if replace_with not in ("zero", "mean"):
        raise InputError(
            f'replace_with must be "zero" or "mean", got {replace_with!r}', 'use "zero" or "mean"'
        )
    means = None
    if replace_with == "mean":
        if texts is None:
            raise InputError('replace_with="mean" needs texts to average over', "give texts=")
        means = _means(model, chosen, texts)
    removed: dict[tuple[str, int], list[Address]] = {}
    for address in chosen:
        removed.setdefault((address.stack, address.head.layer), []).append(address)
    plans = {
        stack: tuple(layer.without(removed.get((stack, layer.source), ())) for layer in layers)
        for stack, layers in full_plan(model).items()
    }
    return _pruned(model, plans, means)


@native_models_only
def prune_neurons(
    model: AnyModel, neurons: Mapping[int, Sequence[int]], *, stack: StackName | None = None
) -> AnyModel:
    """A new model without these neurons of its feed-forwards, listed by layer.

    The result computes the same as the model with these neurons at zero. One neuron of a layer has
    to stay.
    """
    chosen = find_stack(model, stack)
    plans = {name: list(layers) for name, layers in full_plan(model).items()}
    for layer, removed in neurons.items():
        if not 0 <= layer < len(chosen.config.layers):
            raise InputError(
                f"there is no layer {layer}", f"use 0 to {len(chosen.config.layers) - 1}"
            )
        plan, excluded = plans[chosen.name][layer], set(removed)
        if not plan.neurons:
            raise InputError(f"layer {layer} has no neurons to prune", "choose another layer")
        if odd := sorted(excluded - set(plan.neurons)):
            raise InputError(
                f"layer {layer} has no neuron {odd[0]}", f"use 0 to {len(plan.neurons) - 1}"
            )
        remaining = tuple(neuron for neuron in plan.neurons if neuron not in excluded)
        if not remaining:
            raise InputError(f"layer {layer} would have no neuron left", "keep at least one")
        plans[chosen.name][layer] = replace(plan, neurons=remaining)
    return _pruned(model, plans)


@native_models_only
def prune_layers(
    model: AnyModel, layers: Iterable[int], *, stack: StackName | None = None
) -> AnyModel:
    """A new model without these layers: the input of each goes to the next layer that stays."""
    chosen = find_stack(model, stack)
    removed, count = set(layers), len(chosen.config.layers)
    if odd := sorted(removed - set(range(count))):
        raise InputError(f"there is no layer {odd[0]}", f"use 0 to {count - 1}")
    if len(removed) == count:
        raise InputError(f"all {count} layers would be removed", "keep at least one")
    plans: dict[str, Sequence[LayerPlan]] = dict(full_plan(model))
    plans[chosen.name] = [layer for layer in plans[chosen.name] if layer.source not in removed]
    return _pruned(model, plans)


def _pruned(
    model: AnyModel, plans: Mapping[str, Sequence[LayerPlan]], means: Means | None = None
) -> AnyModel:
    fresh = rebuild(model, plans, means)
    record_origins(fresh, model, plans)
    return fresh


def _means(model: Model, heads: Sequence[Address], texts: Inputs) -> Means:
    """The mean output of every head of the layers that lose some, as in ablation."""
    inputs = read_inputs(model, texts)
    batch_tokens = evaluate.default_batch_tokens(model)
    result: dict[tuple[str, Sublayer, int], Tensor] = {}
    stacks = model.stacks()
    for name, sublayer in dict.fromkeys((head.stack, head.sublayer) for head in heads):
        assert name in stacks, "the addresses were checked"
        part = head_scope(model, name, sublayer)
        with eval_mode(model), torch.no_grad():
            means = replacements.replacement_values(
                part, inputs, "mean", seed=0, batch_tokens=batch_tokens
            ).means
        result |= {(name, sublayer, layer): mean for layer, mean in means.items()}
    return result
