"""What stays of a model: the layers, and the heads and neurons of each."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from manyheads.lens.results.addresses import Address, stacks_of
from manyheads.models.build import Model
from manyheads.models.layer import LayerConfig
from manyheads.parts.experts import Experts
from manyheads.taps import Sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Of one layer, `source` of the model it comes from, the heads and the neurons that stay.

    Empty where the layer has none of them, or loses all.
    """

    source: int
    attention: tuple[int, ...]
    cross: tuple[int, ...]
    neurons: tuple[int, ...]

    @classmethod
    def all_of(cls, index: int, layer: LayerConfig) -> "LayerPlan":
        hidden = 0
        if layer.feedforward is not None and not isinstance(layer.feedforward.inner, Experts):
            hidden = layer.feedforward.inner.hidden
        heads = [0 if each is None else each.inner.heads for each in (layer.attention, layer.cross)]
        return cls(
            source=index,
            attention=tuple(range(heads[0])),
            cross=tuple(range(heads[1])),
            neurons=tuple(range(hidden)),
        )

    def heads(self, sublayer: Sublayer) -> tuple[int, ...]:
        return self.cross if sublayer is Sublayer.CROSS else self.attention

    def without(self, heads: Iterable[Address]) -> "LayerPlan":
        """Less these heads, all of this layer."""
        gone = {(address.sublayer, address.head.head) for address in heads}
        left = {
            sublayer: tuple(head for head in self.heads(sublayer) if (sublayer, head) not in gone)
            for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS)
        }
        return replace(self, attention=left[Sublayer.ATTENTION], cross=left[Sublayer.CROSS])


def whole(model: Model) -> dict[str, tuple[LayerPlan, ...]]:
    """Everything, by the name of its stack."""
    return {
        name: tuple(
            LayerPlan.all_of(index, layer) for index, layer in enumerate(stack.config.layers)
        )
        for name, stack in stacks_of(model).items()
    }
