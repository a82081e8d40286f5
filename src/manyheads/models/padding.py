"""Where padded batches become ragged and back; nothing inside ever sees padding."""

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

from manyheads.errors import InputError, ShapeError
from manyheads.parts.experts import RouterLosses
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a model answers, in the layout it was asked in.

    `logits` are there if the model has a readout, `router` if it has experts, one entry a layer.
    """

    hidden: Ragged | Tensor
    logits: Ragged | Tensor | None = None
    router: tuple[RouterLosses, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """How a batch came in, and so how its answers go out: ragged, rectangular, or masked."""

    rectangle: tuple[int, int] | None = None
    mask: Shaped[Tensor, "b t"] | None = None

    def restore(self, batch: Ragged | Tensor | None) -> Ragged | Tensor | None:
        """Token by token answers get the layout of the input; one answer a sequence has its own."""
        if not isinstance(batch, Ragged) or self.rectangle is None:
            return batch
        if self.mask is None:
            return batch.values.unflatten(0, self.rectangle)
        return batch.to_padded(self.mask)

    def output(
        self, hidden: Ragged, logits: Ragged | Tensor | None, router: tuple[RouterLosses, ...]
    ) -> Output:
        left = self.restore(hidden)
        assert left is not None
        return Output(left, self.restore(logits), router)


def to_ragged(
    batch: Ragged | Tensor, mask: Shaped[Tensor, "..."] | None, what: str = "ids"
) -> tuple[Ragged, BatchLayout]:
    """A ragged batch from whatever was given."""
    if isinstance(batch, Ragged):
        if mask is not None:
            raise InputError("a ragged batch has no padding to mask", "leave mask out")
        return batch, BatchLayout()
    if batch.dim() != 2:
        raise ShapeError(
            f"{what} have shape {tuple(batch.shape)}",
            "give (batch, length), or a Ragged; one sequence is ids[None]",
        )
    ragged = Ragged.from_padded(batch, mask)
    return ragged, BatchLayout((batch.shape[0], batch.shape[1]), mask)
