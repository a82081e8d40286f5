"""Pairs of texts whose vectors should lie close."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.readout import pooled
from manyheads.models.sentence import Pooling, Sentence
from manyheads.models.text import TextModel
from manyheads.ragged import Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives.objective import Loss, RoutedObjective, Task, unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive(RoutedObjective):
    """Each text must find its own among the `others` of its micro-batch (arXiv 1705.00652).

    Cosines are divided by `temperature`. `both_ways` asks the others to find their texts too, and
    takes the mean. "model" pools as the model's folder says, or by the mean.
    """

    temperature: float = 0.05
    pooling: Pooling | Literal["model"] = "model"
    both_ways: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature:g}", "use a number above 0")

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, TextModel):
            raise unfit(self, model, "an encoder or a decoder of text")

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        del model, draw
        if batch.texts is None or batch.others is None or len(batch.texts) != len(batch.others):
            raise InputError("Contrastive wants pairs of texts", "give as many others as texts")
        places = torch.arange(len(batch.texts), device=batch.texts.device)
        return Task(batch=batch, places=places, answers=places)

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        texts, others = task.batch.texts, task.batch.others
        assert texts is not None
        assert others is not None
        hidden, router = model.hidden(Ragged.concatenate([texts, others]), watch=watch)
        vectors = F.normalize(self._pooled(model, hidden), dim=-1)
        ours, theirs = vectors.tensor_split(2)
        scores = ours @ theirs.T / self.temperature
        total = F.cross_entropy(scores, task.answers, reduction="sum")
        if self.both_ways:
            total = (total + F.cross_entropy(scores.T, task.answers, reduction="sum")) / 2
        return self.summed(total, task, router)

    def _pooled(self, model: Any, hidden: Ragged) -> Float[Tensor, "b c"]:
        pooling = self.pooling
        if pooling == "model":
            pooling = (model.sentence or Sentence()).pooling
        return pooled(
            hidden.values.float(), hidden.lengths, "first" if pooling == "cls" else pooling
        )
