"""Heads that can be cut out, and stacks and sites of a model by name."""

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import layer_input_site
from manyheads.lens.results.addresses import Address, Heads, find_heads
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.taps import Site, Sublayer, Tap


def find_separable_heads(model: Model, heads: Heads) -> tuple[Address, ...]:
    """The addresses of heads that can be cut out or trained alone; see `find_heads`."""
    addresses, stacks = find_heads(model, heads), model.stacks()
    for address in addresses:
        mixer = stacks[address.stack].config.layers[address.head.layer].mixer
        if mixer is not None and address.sublayer is Sublayer.ATTENTION:
            raise InputError(
                f"{address} is a head of a mixer, {type(mixer.inner).__name__}, and those share "
                "weights: none can be cut out or trained alone",
                "use lens.ablate to see what it does, or change the whole layer",
            )
    return addresses


def find_stack(model: Model, name: str | None) -> Stack:
    """The stack of this name, by default the only one, or the decoder of a `Seq2Seq`."""
    stacks = model.stacks()
    name = name or model.readout_stack
    if name not in stacks:
        raise InputError(
            f"this {type(model).__name__} has no stack {name!r}", f"use {' or '.join(stacks)}"
        )
    return stacks[name]


def layer_ends(stack: Stack, layer: int) -> tuple[Site, Site] | None:
    """The sites of the residual stream before and after a layer.

    None for a layer without any sublayer, which changes nothing.

    >>> from manyheads.models.build import build
    >>> layer_ends(build("gpt2", layers=1, width=32, heads=2, vocabulary=50).stack, 0)
    (Site(0, BEFORE), Site(0, AFTER, FEEDFORWARD))
    """
    branches = [*stack.config.layers[layer].branches]
    if not branches:
        return None
    return layer_input_site(stack, layer), Site(layer, Tap.AFTER, branches[-1], stack.name)


def neuron_site(stack: Stack, layer: int) -> Site:
    """The site of the neurons of a layer's feed-forward."""
    return Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack.name)
