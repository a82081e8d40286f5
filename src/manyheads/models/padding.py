"""Padded batches to ragged ones and back: inside a model there is no padding."""

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

from manyheads.errors import InputError, ShapeError
from manyheads.formatting import kind_of
from manyheads.parts.halting import AddedLoss
from manyheads.ragged import Ragged, check_dense


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The output of a model, in the layout of its input.

    `logits` is None without a readout; `router` has one entry per layer with experts.
    """

    hidden: Ragged | Tensor
    logits: Ragged | Tensor | None = None
    router: tuple[AddedLoss, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """The layout of an input and so of the output: ragged, rectangular, or masked."""

    rectangle: tuple[int, int] | None = None
    mask: Shaped[Tensor, "b t"] | None = None

    def restore(self, batch: Ragged | Tensor | None) -> Ragged | Tensor | None:
        """Outputs per token get the layout of the input; outputs per sequence stay as they are."""
        if not isinstance(batch, Ragged) or self.rectangle is None:
            return batch
        if self.mask is None:
            return batch.values.unflatten(0, self.rectangle)
        return batch.to_padded(self.mask)

    def output(
        self, hidden: Ragged, logits: Ragged | Tensor | None, router: tuple[AddedLoss, ...]
    ) -> Output:
        restored = self.restore(hidden)
        assert restored is not None
        return Output(restored, self.restore(logits), router)


def to_ragged(
    batch: Ragged | Tensor, mask: Shaped[Tensor, "..."] | None, name: str = "ids"
) -> tuple[Ragged, BatchLayout]:
    """The batch as a `Ragged`, and its layout."""
    if isinstance(batch, Ragged):
        if mask is not None:
            raise InputError("a Ragged has no padding to mask", "leave mask out")
        return batch, BatchLayout()
    if not isinstance(batch, Tensor) or not (mask is None or isinstance(mask, Tensor)):
        wrong, value = (name, batch) if not isinstance(batch, Tensor) else ("mask", mask)
        raise InputError(
            f"{wrong} must be a tensor, got {kind_of(value)}",
            "give a (batch, length) tensor, or a Ragged" if wrong == name else "leave it out",
        )
    check_dense(batch, name)
    if batch.dim() != 2:
        raise ShapeError(
            f"{name} have shape {tuple(batch.shape)}",
            "give (batch, length), or a Ragged; one sequence is ids[None]",
        )
    ragged = Ragged.from_padded(batch, mask)
    return ragged, BatchLayout((batch.shape[0], batch.shape[1]), mask)
