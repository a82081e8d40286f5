"""What the data gives and an objective takes: one micro-batch."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.ragged import Ragged

__all__ = ["Batch"]


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
        return replace(
            self,
            texts=None if self.texts is None else self.texts.to(device),
            others=None if self.others is None else self.others.to(device),
            images=tuple(image.to(device) for image in self.images),
            labels=None if self.labels is None else self.labels.to(device),
        )
