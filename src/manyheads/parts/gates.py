"""Gates: a value computed from the layer's normed input that scales or shifts what passes."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.taps import Tap

GatePlace = Literal["query", "key", "value", "output", "final"]

GATE_TAPS: dict[GatePlace, Tap] = {
    "query": Tap.GATE_QUERY,
    "key": Tap.GATE_KEY,
    "value": Tap.GATE_VALUE,
    "output": Tap.GATE_OUTPUT,
    "final": Tap.GATE_FINAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gate of the gated-attention study (arXiv 2505.06708).

    `at` names the place: "query" (G4), "key" (G3), "value" (G2), "output" of attention (G1), or
    "final", after the output projection (G5). `per` says how finely it acts: one number a head or
    one a channel. `heads` says whether each head has its own or all share one. After the output
    projection no heads are left: there the width is cut into equal `slices`, as many as heads
    unless said otherwise, as after heads were taken away.

    >>> Gate(at="output", per="channel").rows(heads=8, size=16), Gate(at="output").rows(8, 16)
    (128, 8)
    """

    at: GatePlace
    per: Literal["head", "channel"] = "head"
    heads: Literal["own", "shared"] = "own"
    operation: Literal["multiply", "add"] = "multiply"
    activation: Literal["sigmoid", "silu"] = "sigmoid"
    slices: int | Literal["heads"] = "heads"

    def __post_init__(self) -> None:
        if self.slices != "heads" and self.at != "final":
            raise ConfigError(
                f"slices={self.slices} of a gate at {self.at!r}, which meets heads",
                'leave slices to at="final"',
            )

    def cut(self, heads: int) -> int:
        """How many slices a final gate cuts the width of a layer with so many heads into."""
        return heads if self.slices == "heads" else self.slices

    def rows(self, heads: int, size: int) -> int:
        """How many numbers a token's gate has."""
        return (heads if self.heads == "own" else 1) * (size if self.per == "channel" else 1)

    def values(
        self, logits: Float[Tensor, "n rows"], heads: int, size: int
    ) -> Float[Tensor, "n heads_or_1 size_or_1"]:
        """The activated gate, shaped to meet an n x heads x size value."""
        shape = (heads if self.heads == "own" else 1, size if self.per == "channel" else 1)
        activate = torch.sigmoid if self.activation == "sigmoid" else F.silu
        return activate(logits).unflatten(-1, shape)

    def apply(
        self, x: Float[Tensor, "n h d"], values: Float[Tensor, "n heads_or_1 size_or_1"]
    ) -> Float[Tensor, "n h d"]:
        return x * values if self.operation == "multiply" else x + values


def check_gates(gates: tuple[Gate, ...], width: int, heads: int) -> None:
    """Refuse gates that no layer of this shape can have."""
    places = [gate.at for gate in gates]
    for place in set(places):
        if places.count(place) > 1:
            raise ConfigError(f"{places.count(place)} gates stand at {place!r}", "keep one a place")
    for slices in (gate.cut(heads) for gate in gates if gate.at == "final"):
        if slices < 1 or width % slices:
            raise ConfigError(
                f"a final gate cuts width={width} into {slices} slices",
                f"choose a width that is a multiple of {slices}",
            )
