"""Heads and stacks by the names that a caller gives them."""

import re
from collections.abc import Iterable, Mapping

from torch import nn

from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address, stacks_of
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.taps import Head, Sublayer

AnyHead = Head | Address | str
HOW_TO_NAME = "write it as L5H1, or decoder L2H0 cross"
ADDRESS = re.compile(r"(?:(encoder|decoder|main)\s+)?(L\d+H\d+)(?:\s+(attention|cross))?", re.I)


def parse_address(text: str) -> tuple[str | None, Head, Sublayer]:
    """The stack, where one is named, the head and the sublayer of an address as it is printed.

    >>> parse_address("decoder L2H0 cross")
    ('decoder', Head(layer=2, head=0), <Sublayer.CROSS: 'cross'>)
    """
    match = ADDRESS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not the address of a head", HOW_TO_NAME)
    stack = match[1].lower() if match[1] else None
    return stack, Head.parse(match[2]), Sublayer((match[3] or "attention").lower())


def find_addresses(model: nn.Module, heads: AnyHead | Iterable[AnyHead]) -> tuple[Address, ...]:
    """The named heads, each of which the model has; bare ones of a `Seq2Seq` are its decoder's."""
    heads = [heads] if isinstance(heads, Head | Address | str) else heads
    stacks = stacks_of(model)
    usual = "decoder" if isinstance(model, Seq2Seq) else "main"
    found: dict[Address, None] = {}
    for given in heads:
        if isinstance(given, str):
            stack, head, sublayer = parse_address(given)
            address = Address(head, stack or usual, sublayer)
        elif isinstance(given, Head | Address):
            address = given if isinstance(given, Address) else Address(given, usual)
        else:
            raise InputError(f"{given!r} is not the address of a head", HOW_TO_NAME)
        _check(stacks, address)
        found[address] = None
    return tuple(found)


def find_stack(model: Model, name: str | None) -> Stack:
    """The named stack; a `Seq2Seq` is changed in its decoder unless said otherwise."""
    stacks = stacks_of(model)
    name = name or ("decoder" if isinstance(model, Seq2Seq) else "main")
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
        raise InputError(
            f"the model has no head {address}", f"use layers 0 to {len(layers) - 1}, as it has them"
        )
    layer = layers[head.layer]
    branch = layer.cross if address.sublayer is Sublayer.CROSS else layer.attention
    count = 0 if branch is None else branch.inner.heads
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
