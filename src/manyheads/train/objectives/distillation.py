"""Distillation of a teacher's scores into a model that embeds texts."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.annotations import Above
from manyheads.argument_checks import check_fields
from manyheads.data.batch import Batch
from manyheads.errors import InputError
from manyheads.taps import Watcher
from manyheads.train.objectives.objective import Loss, PreparedBatch
from manyheads.train.objectives.text_similarity import PreparedCandidates, TextSimilarity


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(TextSimilarity):
    """The scores of a text's candidates should be those of a teacher.

    "kl" is the divergence between the two distributions over the candidates of a text, the
    teacher's with its scores divided by `teacher_temperature` (arXiv 2112.01488). "margin_mse" is
    the squared error of the margins between the second text and each negative (arXiv 2010.02666).
    """

    loss_kind: Literal["kl", "margin_mse"] = "kl"
    teacher_temperature: Annotated[float, Above(0, "use a value such as 1")] = 1.0

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedCandidates:
        prepared = TextSimilarity.prepare(self, model, batch, generator)
        if prepared.teacher is None:
            raise InputError(
                "Distillation needs the scores of a teacher",
                "set data.scores to their field, or give scores in the batch",
            )
        if bool((prepared.groups >= 0).sum(1).min() < 2):
            raise InputError(
                "Distillation needs at least one negative per text", "leave out texts without"
            )
        return prepared

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        assert isinstance(prepared, PreparedCandidates)
        assert prepared.teacher is not None
        scores, router = self.scores(model, prepared, watch)
        real = prepared.groups >= 0
        ours = scores.gather(1, prepared.groups.clamp(min=0))
        if self.loss_kind == "kl":
            total = divergence(ours, prepared.teacher / self.teacher_temperature, real)
        else:
            total = margin_error(ours, prepared.teacher, real)
        return self.with_router_losses(total, prepared, router)


def divergence(
    ours: Float[Tensor, "q k"], teacher: Float[Tensor, "q k"], real: Bool[Tensor, "q k"]
) -> Float[Tensor, ""]:
    """KL(teacher, ours) over the real candidates, summed over texts."""
    lowest = torch.finfo(ours.dtype).min
    log_ours, log_teacher = (
        scores.masked_fill(~real, lowest).log_softmax(1) for scores in (ours, teacher)
    )
    return (log_teacher.exp() * (log_teacher - log_ours)).masked_fill(~real, 0).sum()


def margin_error(
    ours: Float[Tensor, "q k"], teacher: Float[Tensor, "q k"], real: Bool[Tensor, "q k"]
) -> Float[Tensor, ""]:
    """The squared error of margins: a mean over the negatives of a text, summed over texts."""
    error = (ours[:, :1] - ours[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    squares = error.square().masked_fill(~real[:, 1:], 0).sum(1)
    return (squares / real[:, 1:].sum(1)).sum()
