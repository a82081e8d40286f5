"""Where the heads of a changed model come from, kept with it and saved beside its weights."""

import json
from collections.abc import Mapping, Sequence

from manyheads.errors import InputError
from manyheads.lens.addresses import Address, blocks_of
from manyheads.models.build import Model
from manyheads.surgery.keeping import Kept, parse
from manyheads.taps import Head, Sublayer

__all__ = ["note_origins", "origins", "origins_in"]

FILE = "surgery.json"


def origins(model: Model) -> dict[Address, Address]:
    """For every head of a model its address in the one that surgery first began with.

    >>> from manyheads.models.build import build
    >>> from manyheads.surgery.prune import prune
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
            f"{FILE} tells of {len(noted)} heads and the model has {len(here)}",
            "take the file away: it belongs to another model",
        )
    return {address: _address(noted[str(address)]) for address in here}


def origins_in(before: Model, after: Model) -> dict[Address, Address] | None:
    """For every head of `after` its address in `before`, which may have been changed too.

    None where nothing is written down, so that the two number their heads alike or nobody knows.
    """
    if FILE not in after.side_files:
        return None
    here = {first: address for address, first in origins(before).items()}
    found = {}
    for address, first in origins(after).items():
        if first not in here:
            raise InputError(
                f"{address} of the second model was {first} at first, which the first model has "
                "no more",
                "give a model that the second one came from",
            )
        found[address] = here[first]
    return found


def note_origins(fresh: Model, model: Model, kept: Mapping[str, Sequence[Kept]]) -> None:
    """Write down in a new model where its heads were in `model`, and before that."""
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
    # Whoever lost heads behind all others numbers the rest as before, and still is another model.
    same = len(found) == len(before) and all(new == old for new, old in found.items())
    if FILE not in model.side_files and same:
        return
    told = json.dumps({"heads": found}, indent=1).encode()
    fresh.side_files = {**model.side_files, FILE: told}


def _address(text: str) -> Address:
    stack, head, sublayer = parse(text)
    return Address(head, stack or "main", sublayer)
