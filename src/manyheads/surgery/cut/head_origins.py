"""Where the heads of a pruned model come from, kept with it and saved beside its weights."""

import json
from collections.abc import Mapping, Sequence

from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.models.build import Model
from manyheads.surgery.addresses import parse_address
from manyheads.surgery.cut.layer_plan import LayerPlan
from manyheads.taps import Head, Sublayer

FILE = "surgery.json"


def origins(model: Model) -> dict[Address, Address]:
    """For every head of a model its address in the model that pruning started from.

    >>> from manyheads.models.build import build
    >>> from manyheads.surgery import prune
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> {str(new): str(old) for new, old in origins(prune(model, ["L0H1", "L0H2"])).items()}
    {'L0H0': 'L0H0', 'L0H1': 'L0H3'}
    """
    here = [address for block in blocks_of(model) for address in block.addresses]
    written = model.side_files.get(FILE)
    if written is None:
        return {address: address for address in here}
    noted = json.loads(written)["heads"]
    if len(noted) != len(here):
        raise InputError(
            f"{FILE} lists {len(noted)} heads and the model has {len(here)}",
            "delete the file: it belongs to another model",
        )
    return {address: _address(noted[str(address)]) for address in here}


def origins_in(before: Model, after: Model) -> dict[Address, Address] | None:
    """For every head of `after` its address in `before`, which may have been changed too.

    None where nothing is recorded: then both number their heads alike, or nobody knows.
    """
    if FILE not in after.side_files:
        return None
    here = {first: address for address, first in origins(before).items()}
    found = {}
    for address, first in origins(after).items():
        if first not in here:
            raise InputError(
                f"{address} of the second model was {first} at first, which the first model no "
                "longer has",
                "give the model that the second one was pruned from",
            )
        found[address] = here[first]
    return found


def note_origins(fresh: Model, model: Model, kept: Mapping[str, Sequence[LayerPlan]]) -> None:
    """Record in a new model where its heads were in `model`, and before that."""
    before = origins(model)
    found = {
        str(Address(Head(index, place), stack, sublayer)): str(
            before[Address(Head(layer.source, head), stack, sublayer)]
        )
        for stack, layers in kept.items()
        for index, layer in enumerate(layers)
        for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS)
        for place, head in enumerate(layer.heads(sublayer))
    }
    # A model that lost its last heads numbers the others as before, and is still another model.
    same = len(found) == len(before) and all(new == old for new, old in found.items())
    if FILE not in model.side_files and same:
        return
    told = json.dumps({"heads": found}, indent=1).encode()
    fresh.side_files = {**model.side_files, FILE: told}


def _address(text: str) -> Address:
    stack, head, sublayer = parse_address(text)
    return Address(head, stack or "main", sublayer)
