"""Pruning: a new model without some heads, neurons or whole layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import default_batch_tokens
from manyheads.lens.causal.replacement import stand_ins
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.inputs.texts import read
from manyheads.lens.results.addresses import Address, stacks_of
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.surgery.addresses import AnyHead, find_addresses, find_stack
from manyheads.surgery.cut.head_origins import note_origins
from manyheads.surgery.cut.layer_plan import LayerPlan, whole
from manyheads.surgery.cut.rebuild import Means, rebuild
from manyheads.taps import Sublayer

ReplaceWith = Literal["zero", "mean"]
AnyModel = TypeVar("AnyModel", bound=Model)


def prune(
    model: AnyModel,
    heads: AnyHead | Iterable[AnyHead],
    replace_with: ReplaceWith = "zero",
    texts: Any = None,
) -> AnyModel:
    """A new model without these heads, which computes what this one does with them ablated.

    A head is a `Head`, an `Address` or its text, "L5H1" or "decoder L2H0 cross". With
    replace_with="mean" their mean output over `texts` stays, in the bias of the output projection.
    Heads are numbered anew in the new model; `origins` says which they were.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=4, vocabulary=50, seed=0)
    >>> pruned = prune(model, ["L0H1", "L1H0", "L1H3"])
    >>> [layer.attention.inner.heads for layer in pruned.config.stack.layers]
    [3, 2]
    """
    chosen = find_addresses(model, heads)
    if replace_with not in ("zero", "mean"):
        raise InputError(
            f'replace_with must be "zero" or "mean", got {replace_with!r}', 'use "zero" or "mean"'
        )
    if replace_with == "mean" and texts is None:
        raise InputError('replace_with="mean" needs texts to average over', "give texts=")
    gone: dict[tuple[str, int], list[Address]] = {}
    for address in chosen:
        gone.setdefault((address.stack, address.head.layer), []).append(address)
    kept = {
        stack: tuple(layer.without(gone.get((stack, layer.source), ())) for layer in layers)
        for stack, layers in whole(model).items()
    }
    means = _means(model, chosen, texts) if replace_with == "mean" else None
    return _made(model, kept, means)


def prune_neurons(
    model: AnyModel, neurons: Mapping[int, Sequence[int]], *, stack: StackName | None = None
) -> AnyModel:
    """A new model without these neurons of its feed-forwards, listed by layer.

    The result computes what the model does with the neurons at zero. One neuron of a layer has to
    stay.
    """
    chosen = find_stack(model, stack)
    kept = {name: list(layers) for name, layers in whole(model).items()}
    for layer, gone in neurons.items():
        if not 0 <= layer < len(chosen.config.layers):
            raise InputError(
                f"there is no layer {layer}", f"use 0 to {len(chosen.config.layers) - 1}"
            )
        there = kept[chosen.name][layer].neurons
        if not there:
            raise InputError(
                f"layer {layer} has no feed-forward whose neurons could go", "choose another"
            )
        odd = sorted(set(gone) - set(there))
        if odd:
            raise InputError(f"layer {layer} has no neuron {odd[0]}", f"use 0 to {len(there) - 1}")
        left = tuple(neuron for neuron in there if neuron not in set(gone))
        if not left:
            raise InputError(f"layer {layer} would have no neuron left", "keep one of them")
        kept[chosen.name][layer] = replace(kept[chosen.name][layer], neurons=left)
    return _made(model, kept, None)


def prune_layers(
    model: AnyModel, layers: Iterable[int], *, stack: StackName | None = None
) -> AnyModel:
    """A new model without these layers: the input of each goes to the next layer that stays."""
    chosen = find_stack(model, stack)
    gone, count = set(layers), len(chosen.config.layers)
    odd = sorted(gone - set(range(count)))
    if odd:
        raise InputError(f"there is no layer {odd[0]}", f"use 0 to {count - 1}")
    if len(gone) == count:
        raise InputError(f"all {count} layers would be removed", "keep one of them")
    kept: dict[str, Sequence[LayerPlan]] = dict(whole(model))
    kept[chosen.name] = [layer for layer in kept[chosen.name] if layer.source not in gone]
    return _made(model, kept, None)


def _made(
    model: AnyModel, kept: Mapping[str, Sequence[LayerPlan]], means: Means | None
) -> AnyModel:
    fresh = rebuild(model, kept, means)
    note_origins(fresh, model, kept)
    return fresh


def _means(model: Model, heads: Sequence[Address], texts: Any) -> Means:
    """The mean output of every head of the layers that lose some, as ablation has it."""
    given = read(model, texts)
    room = default_batch_tokens(model)
    found: dict[tuple[str, Sublayer, int], Tensor] = {}
    stacks = stacks_of(model)
    for name, sublayer in dict.fromkeys((head.stack, head.sublayer) for head in heads):
        assert name in stacks, "the addresses were looked up"
        part = part_of(model, name, sublayer)  # type: ignore[arg-type]
        with resting(model), torch.no_grad():
            means = stand_ins(part, given, "mean", seed=0, room=room).means
        found |= {(name, sublayer, layer): each for layer, each in means.items()}
    return found
