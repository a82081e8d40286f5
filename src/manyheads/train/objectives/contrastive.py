"""Contrastive learning of text embeddings from pairs of texts and negatives."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import check_fields
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.taps import Watcher
from manyheads.train.objectives import text_similarity
from manyheads.train.objectives.objective import Loss, PreparedBatch


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive(text_similarity.TextSimilarity):
    """Each text must find its own among the candidates of its micro-batch (arXiv 1705.00652).

    Candidates are the `others` and the negatives of all texts, except those of an equal text and
    those equal to the right one. `both_ways` also classifies the others among the texts, and takes
    the mean; it is for cosines, since MaxSim grows with the length of a text.
    """

    both_ways: bool = False

    def check(self, model: nn.Module) -> None:
        text_similarity.TextSimilarity.check(self, model)
        if self.both_ways and self.is_late(model):
            raise ConfigError(
                "both_ways cannot be used with MaxSim, which grows with the length of a text",
                "set both_ways to false, or similarity to cosine",
            )

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator, *, watch: Watcher | None = None
    ) -> Loss:
        if batch.texts is not None and len(batch.texts) == 1 and not batch.negatives:
            raise InputError(
                "Contrastive got one pair without negatives, and nothing to compare",
                "give two pairs or more, or negatives",
            )
        return text_similarity.TextSimilarity.loss(self, model, batch, generator, watch=watch)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        assert isinstance(prepared, text_similarity.PreparedCandidates)
        scores, router = self.scores(model, prepared, watch)
        total = _own_entropy(scores, prepared)
        if self.both_ways:
            others = scores[:, : prepared.count].T
            total = (total + _own_entropy(others, prepared)) / 2
        return self.with_router_losses(total, prepared, router)


def _own_entropy(
    scores: Float[Tensor, "q d"], prepared: text_similarity.PreparedCandidates
) -> Float[Tensor, ""]:
    """The cross-entropy of the candidate with the number of the text, summed over texts."""
    own = torch.arange(prepared.count, device=scores.device)
    right = prepared.candidate_numbers
    also_right = right[: prepared.count, None] == right[None, : scores.shape[1]]
    also_right[:, : prepared.count] |= prepared.text_numbers[:, None] == prepared.text_numbers
    also_right[own, own] = False
    return F.cross_entropy(scores.masked_fill(also_right, -torch.inf), own, reduction="sum")
