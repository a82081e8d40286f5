"""Which neurons do what another of their layer does: how alike they are over all tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.trunk import Change
from manyheads.models.stack import Stack
from manyheads.surgery.measuring import Exam
from manyheads.surgery.passage import neuron_site
from manyheads.taps import Site

__all__ = ["Alike", "alike_neurons"]

# Products of all pairs of neurons that are held at once, in float32: 256 MB, or one layer's.
ROOM = 2**26


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """The neurons of one layer: the cosine of each two over all tokens, and who never fires.

    Cosines of a neuron that never fires are 0.
    """

    layer: int
    cosines: Float[Tensor, "f f"]
    silent: Bool[Tensor, " f"]

    def pairs(self, above: float) -> list[tuple[float, int, int]]:
        """The cosine and the neurons of each pair that is more alike than that."""
        found = (self.cosines.triu(1) >= above).nonzero()
        cosines = self.cosines[found[:, 0], found[:, 1]]
        return [
            (cosine, one, other)
            for cosine, (one, other) in zip(cosines.tolist(), found.tolist(), strict=True)
        ]


def alike_neurons(
    exam: Exam, stack: Stack, widths: Mapping[int, int], changes: Mapping[Site, Change]
) -> Iterator[Alike]:
    """One layer after another of those that have so many neurons.

    The products of all pairs are summed over some tokens at a time, so that memory does not grow
    with the texts. Where the layers' products do not fit together, the texts are read again.
    """
    for layers in _fitting(widths):
        sites = {layer: neuron_site(stack, layer) for layer in layers}
        device = next(stack.parameters()).device
        sums = {layer: torch.zeros(widths[layer], widths[layer], device=device) for layer in layers}
        for seen in exam.look(list(sites.values()), "comparing neurons", changes):
            for layer, site in sites.items():
                fired = seen[site].values.float()
                sums[layer].addmm_(fired.T, fired)
        for layer in layers:
            yield _alike(layer, sums.pop(layer).cpu())


def _alike(layer: int, products: Float[Tensor, "f f"]) -> Alike:
    norms = products.diagonal().clamp(min=0).sqrt()
    silent = norms == 0
    inverse = torch.where(silent, 0.0, 1 / norms)
    return Alike(layer, products * inverse[:, None] * inverse, silent)


def _fitting(widths: Mapping[int, int]) -> Iterator[Sequence[int]]:
    """Layers whose products fit the room together, one at the least."""
    together: list[int] = []
    for layer, width in widths.items():
        if together and sum(widths[each] ** 2 for each in together) + width**2 > ROOM:
            yield together
            together = []
        together.append(layer)
    if together:
        yield together
