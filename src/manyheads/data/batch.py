"""One micro-batch of training data."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.ragged import Ragged

# Targets with this label do not count, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Texts or images that are trained on together, with their labels.

    `others` are the second texts of pairs: the target of a `Seq2Seq`, or the text that a sentence
    embedding should be close to. There is one label per sequence, per token, or per image.
    """

    texts: Ragged | None = None
    others: Ragged | None = None
    images: tuple[Tensor, ...] = ()
    labels: Int[Tensor, " b"] | Int[Tensor, " n"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all texts, for rates and budgets."""
        return sum(part.lengths.total for part in (self.texts, self.others) if part is not None)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """A copy on a device; from pinned memory `non_blocking` copies do not stop the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            texts=None if self.texts is None else _map_ragged(self.texts, function),
            others=None if self.others is None else _map_ragged(self.others, function),
            images=tuple(function(image) for image in self.images),
            labels=None if self.labels is None else function(self.labels),
        )


def _map_ragged(ragged: Ragged, function: Callable[[Tensor], Tensor]) -> Ragged:
    lengths = replace(
        ragged.lengths,
        offsets=function(ragged.lengths.offsets),
        positions=function(ragged.lengths.positions),
        sequence_of_token=function(ragged.lengths.sequence_of_token),
    )
    return Ragged(function(ragged.values), lengths)
