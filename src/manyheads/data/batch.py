"""What the data gives and an objective takes: one micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.ragged import Ragged

# A label that asks nothing, as torch has it.
UNLABELLED = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Texts or images that are trained on together, and what is known of them.

    `others` are the second texts of pairs: what a `Seq2Seq` is to write, or what a sentence should
    lie close to. `labels` are one a sequence, one a token, or one an image.
    """

    texts: Ragged | None = None
    others: Ragged | None = None
    images: tuple[Tensor, ...] = ()
    labels: Int[Tensor, " b"] | Int[Tensor, " n"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all texts, for rates and budgets."""
        return sum(part.lengths.total for part in (self.texts, self.others) if part is not None)

    def to(self, device: torch.device | str) -> "Batch":
        return self._changed(lambda tensor: tensor.to(device))

    def pinned(self) -> "Batch":
        """In memory that a GPU copies from by itself."""
        return self._changed(Tensor.pin_memory)

    def sent(self, device: torch.device | str) -> "Batch":
        """On a device; pinned memory is copied while the host goes on."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            texts=None if self.texts is None else _changed(self.texts, change),
            others=None if self.others is None else _changed(self.others, change),
            images=tuple(change(image) for image in self.images),
            labels=None if self.labels is None else change(self.labels),
        )


def _changed(ragged: Ragged, change: Callable[[Tensor], Tensor]) -> Ragged:
    lengths = replace(
        ragged.lengths,
        offsets=change(ragged.lengths.offsets),
        positions=change(ragged.lengths.positions),
        sequence_of_token=change(ragged.lengths.sequence_of_token),
    )
    return Ragged(change(ragged.values), lengths)
