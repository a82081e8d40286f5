"""Gates: values that scale or shift activations, computed from the normed input of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import check_fields
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


def raised_sigmoid(logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """0.5 + 0.5 sigmoid: between a half and one, so that the gate cannot close."""
    return 0.5 + 0.5 * torch.sigmoid(logits)


GateActivation = Literal["sigmoid", "silu", "raised_sigmoid"]
ACTIVATIONS: dict[GateActivation, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "raised_sigmoid": raised_sigmoid,
}


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gate of the gated-attention study (arXiv 2505.06708).

    `at` is "query" (G4), "key" (G3), "value" (G2), "output" of attention (G1) or "final", after the
    output projection (G5). The gate has one number `per` head or per channel, for each head its
    own or shared by all `heads`. After the output projection there are no heads: there the width
    is divided into equal `slices`, by default as many as heads; pruned layers keep theirs.

    The study's controls: `activation="raised_sigmoid"` is 0.5 + 0.5 sigmoid, which cannot close.
    A gate that `reads` "nothing" is a parameter, the same for every token. One that reads "itself"
    is computed from what it gates and has no weights: multiplied by its own sigmoid, the output of
    a head is SiLU of it.

    >>> Gate(at="output", per="channel").rows(heads=8, size=16), Gate(at="output").rows(8, 16)
    (128, 8)
    """

    at: GatePlace
    per: Literal["head", "channel"] = "head"
    heads: Literal["own", "shared"] = "own"
    operation: Literal["multiply", "add"] = "multiply"
    activation: GateActivation = "sigmoid"
    slices: int | Literal["heads"] = "heads"
    reads: Literal["input", "nothing", "itself"] = "input"

    def __post_init__(self) -> None:
        if self.slices != "heads" and self.at != "final":
            raise ConfigError(
                f"slices={self.slices} is not possible for a gate at {self.at!r}, which has heads",
                'use slices only with at="final"',
            )
        if self.reads == "itself" and (self.per, self.heads) != ("channel", "own"):
            raise ConfigError(
                f"a gate that reads itself has a value for each channel of each head, got "
                f"per={self.per!r}, heads={self.heads!r}",
                'use per="channel", heads="own"',
            )

    def slice_count(self, heads: int) -> int:
        """The number of slices of a final gate in a layer with this many heads."""
        return heads if self.slices == "heads" else self.slices

    def rows(self, heads: int, size: int) -> int:
        """How many numbers the gate has per token."""
        return (heads if self.heads == "own" else 1) * (size if self.per == "channel" else 1)

    def values(
        self, logits: Float[Tensor, "n rows"], heads: int, size: int
    ) -> Float[Tensor, "n heads_or_1 size_or_1"]:
        """The activated gate, in a shape that broadcasts to n x heads x size."""
        shape = (heads if self.heads == "own" else 1, size if self.per == "channel" else 1)
        return ACTIVATIONS[self.activation](logits).unflatten(-1, shape)

    def apply(
        self, x: Float[Tensor, "n h d"], values: Float[Tensor, "n heads_or_1 size_or_1"]
    ) -> Float[Tensor, "n h d"]:
        return x * values if self.operation == "multiply" else x + values


def check_gates(gates: tuple[Gate, ...], width: int, heads: int) -> None:
    """Refuse gates that a layer of this shape cannot have."""
    places = [gate.at for gate in gates]
    for place in set(places):
        if places.count(place) > 1:
            raise ConfigError(f"there are {places.count(place)} gates at {place!r}", "keep one")
    for slices in (gate.slice_count(heads) for gate in gates if gate.at == "final"):
        if slices < 1 or width % slices:
            raise ConfigError(f"the slices of a final gate must divide width={width}, got {slices}")
