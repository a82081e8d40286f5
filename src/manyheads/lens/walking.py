"""Heads taken away one after another, each step going on from the layer at which it differs.

Without one head more, all layers below that head's compute what they did a step before. Their
results are kept, so that a step runs half of the layers in the mean, where a set of heads of its
own would have to begin at its lowest.
"""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from manyheads.lens.effects import Effects, Heads, Measured, Study
from manyheads.lens.metrics import judge
from manyheads.lens.trunk import Change, Edits, Trunk, entry
from manyheads.taps import Head, Tap

__all__ = ["measure_in_order"]


def measure_in_order(study: Study, order: Sequence[Head]) -> Effects:
    """The metric of each text without the first head, the first two, and so on.

    The same as `study.measure` of those sets. What was measured before Ctrl-C is kept.
    """
    sets: tuple[Heads, ...] = tuple(tuple(order[: count + 1]) for count in range(len(order)))
    return study.collect("taking away", sets, lambda texts: _share(study, texts, order))


def _share(study: Study, texts: range, order: Sequence[Head]) -> Iterator[Measured]:
    """First what the texts give with all heads, then with one fewer and one fewer."""
    part, layers = study.part, sorted({head.layer for head in order})
    instead = study.instead.of(texts, layers)
    judged = judge(part.model, study.given, texts, study.metric, study.targets)
    weights = judged.weights.double().cpu()
    trunk = Trunk(part, study.given.select(texts), layers=layers)
    entries = {layer: trunk[entry(part.stack, layer)] for layer in layers}
    yield [], judged(trunk.hidden).double().cpu(), weights
    gone: dict[int, list[int]] = {layer: [] for layer in layers}
    for taken, head in enumerate(order):
        gone[head.layer].append(head.head)
        changes = {
            part.site(layer, Tap.HEAD_OUTPUT): _silence(gone[layer], instead[layer])
            for layer in layers
            if layer >= head.layer and gone[layer]
        }
        above = {layer: entry(part.stack, layer) for layer in layers if layer > head.layer}
        edits = Edits(changes, above.values())
        hidden = trunk.go_on(entries[head.layer], head.layer, edits)
        entries |= {layer: edits[site] for layer, site in above.items()}
        yield [taken], judged(hidden).double().cpu(), weights


def _silence(heads: Sequence[int], instead: Float[Tensor, "_ h d"]) -> Change:
    chosen = list(heads)

    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[:, chosen] = instead[:, chosen].to(values.dtype)
        return values

    return change
