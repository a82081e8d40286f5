"""Heads, stacks and sites by name: "L5H1", "decoder L2H0 cross"."""

import re
from collections.abc import Iterable, Mapping

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import layer_input_site
from manyheads.lens.results.addresses import Address, heads_in
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.taps import Head, Site, Sublayer, Tap

AnyHead = Head | Address | str
ADDRESS_FORM = "write it as L5H1, or decoder L2H0 cross"
ADDRESS = re.compile(r"(?:(encoder|decoder|main)\s+)?(L\d+H\d+)(?:\s+(attention|cross))?", re.I)


def parse_address(text: str) -> tuple[str | None, Head, Sublayer]:
    """The stack, if it is named, the head and the sublayer of a printed address.

    >>> parse_address("decoder L2H0 cross")
    ('decoder', Head(layer=2, head=0), <Sublayer.CROSS: 'cross'>)
    """
    match = ADDRESS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not the address of a head", ADDRESS_FORM)
    stack = match[1].lower() if match[1] else None
    return stack, Head.parse(match[2]), Sublayer((match[3] or "attention").lower())


def find_addresses(model: Model, heads: AnyHead | Iterable[AnyHead]) -> tuple[Address, ...]:
    """The addresses of heads, checked; without a stack, those of a `Seq2Seq` are its decoder's."""
    heads = [heads] if isinstance(heads, Head | Address | str) else heads
    stacks = model.stacks()
    default = model.readout_stack
    addresses: dict[Address, None] = {}
    for name in heads:
        if isinstance(name, str):
            stack, head, sublayer = parse_address(name)
            address = Address(head, stack or default, sublayer)
        elif isinstance(name, Head | Address):
            address = name if isinstance(name, Address) else Address(name, default)
        else:
            raise InputError(f"{name!r} is not the address of a head", ADDRESS_FORM)
        _check(stacks, address)
        addresses[address] = None
    return tuple(addresses)


def find_stack(model: Model, name: str | None) -> Stack:
    """The stack of this name, by default the only one, or the decoder of a `Seq2Seq`."""
    stacks = model.stacks()
    name = name or model.readout_stack
    if name not in stacks:
        raise InputError(
            f"this {type(model).__name__} has no stack {name!r}", f"use {' or '.join(stacks)}"
        )
    return stacks[name]


def _check(stacks: Mapping[str, Stack], address: Address) -> None:
    if address.stack not in stacks:
        raise InputError(
            f"there is no stack {address.stack!r} for {address}", f"use {' or '.join(stacks)}"
        )
    layers = stacks[address.stack].config.layers
    head = address.head
    if not 0 <= head.layer < len(layers):
        raise InputError(f"the model has no head {address}", f"use layers 0 to {len(layers) - 1}")
    layer = layers[head.layer]
    branch = layer.cross if address.sublayer is Sublayer.CROSS else layer.attention
    count = 0 if branch is None else branch.inner.heads
    if layer.mixer is not None and head.head < heads_in(layer, address.sublayer):
        raise InputError(
            f"{address} is a head of a mixer, {type(layer.mixer.inner).__name__}, and those share "
            "weights: none can be cut out or trained alone",
            "use lens.ablate to see what it does, or change the whole layer",
        )
    if not count:
        raise InputError(
            f"the model has no head {address}",
            f"layer {head.layer} has no {address.sublayer.value} heads, choose another layer",
        )
    if not 0 <= head.head < count:
        raise InputError(
            f"the model has no head {address}",
            f"use L{head.layer}H0 to L{head.layer}H{count - 1} in that layer",
        )


def layer_ends(stack: Stack, layer: int) -> tuple[Site, Site] | None:
    """The sites of the residual stream before and after a layer.

    None for a layer without any sublayer, which changes nothing.

    >>> from manyheads.models.build import build
    >>> layer_ends(build("gpt2", layers=1, width=32, heads=2, vocabulary=50).stack, 0)
    (Site(0, BEFORE), Site(0, AFTER, FEEDFORWARD))
    """
    config = stack.config.layers[layer]
    if config.feedforward is not None:
        last = Sublayer.FEEDFORWARD
    elif config.cross is not None or config.cross_rest is not None:
        last = Sublayer.CROSS
    elif (config.attention or config.attention_rest or config.mixer) is not None:
        last = Sublayer.ATTENTION
    else:
        return None
    return layer_input_site(stack, layer), Site(layer, Tap.AFTER, last, stack.name)


def neuron_site(stack: Stack, layer: int) -> Site:
    """The site of the neurons of a layer's feed-forward."""
    return Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack.name)
