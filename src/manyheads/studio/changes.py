"""Heads switched off or fed from another text: the changes that a run is made with."""

from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.trunk import Change
from manyheads.studio.asked import Edit
from manyheads.studio.reading import Reading
from manyheads.taps import Head, Site, Tap

__all__ = ["changes_of"]


def changes_of(
    edit: Edit, whole: Reading, other: Callable[[], Reading] | None
) -> dict[Site, Change]:
    """What to put in the place of heads' outputs.

    "mean" is a head's mean over the tokens of this text, as `lens.ablate` takes it over all texts.
    `other` runs the text that patched heads come from; it must have as many tokens.
    """
    whole.check((*edit.off, *edit.patched))
    source = other() if edit.patched and other is not None else None
    if source is not None and source.length != whole.length:
        raise InputError(
            f"the other prompt has {source.length} tokens and this one {whole.length}",
            "change it word by word until both have as many",
        )
    found: dict[Site, Change] = {}
    for layer in sorted({head.layer for head in (*edit.off, *edit.patched)}):
        off, patched = _of_layer(edit.off, layer), _of_layer(edit.patched, layer)
        instead = whole.means[layer][off] if edit.how == "mean" else None
        given = None if source is None or not patched else source.outputs[layer][:, patched]
        found[Site(layer, Tap.HEAD_OUTPUT)] = _change(off, instead, patched, given)
    return found


def _of_layer(heads: tuple[Head, ...], layer: int) -> list[int]:
    return [head.head for head in heads if head.layer == layer]


def _change(
    off: list[int], instead: Tensor | None, patched: list[int], given: Tensor | None
) -> Change:
    def change(values: Tensor) -> Tensor:
        changed = torch.clone(values)
        if off:
            changed[:, off] = 0.0 if instead is None else instead
        if given is not None:
            changed[:, patched] = given
        return changed

    return change
