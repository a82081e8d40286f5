"""Contrastive learning of sentence embeddings from pairs of texts."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.encoder import TextModel
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.models.readout import pooled
from manyheads.ragged import Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives.objective import (
    Loss,
    PreparedBatch,
    RoutedObjective,
    unsuitable_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive(RoutedObjective):
    """Each text is classified among the `others` of its micro-batch (arXiv 1705.00652).

    Cosines are divided by `temperature`. `both_ways` also classifies the others among the texts,
    and takes the mean. `pooling="model"` is the pooling of the model's folder, or the mean.
    """

    temperature: float = 0.05
    pooling: Pooling | Literal["model"] = "model"
    both_ways: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature must be above 0, got {self.temperature:g}", "use a value such as 0.05"
            )

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, TextModel):
            raise unsuitable_model(self, model, "a text encoder or decoder")

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del model, generator
        if batch.texts is None or batch.others is None or len(batch.texts) != len(batch.others):
            raise InputError("Contrastive needs pairs of texts", "give as many others as texts")
        positions = torch.arange(len(batch.texts), device=batch.texts.device)
        return PreparedBatch(batch=batch, positions=positions, labels=positions)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        texts, others = prepared.batch.texts, prepared.batch.others
        assert texts is not None
        assert others is not None
        hidden, router = model.hidden(Ragged.concatenate([texts, others]), watch=watch)
        vectors = F.normalize(self._pooled(model, hidden), dim=-1)
        ours, theirs = vectors.tensor_split(2)
        scores = ours @ theirs.T / self.temperature
        total = F.cross_entropy(scores, prepared.labels, reduction="sum")
        if self.both_ways:
            total = (total + F.cross_entropy(scores.T, prepared.labels, reduction="sum")) / 2
        return self.with_router_losses(total, prepared, router)

    def _pooled(self, model: Any, hidden: Ragged) -> Float[Tensor, "b c"]:
        sentence = model.sentence or SentenceConfig()
        pooling = sentence.pooling if self.pooling == "model" else self.pooling
        vectors = pooled(
            hidden.values.float(), hidden.lengths, "first" if pooling == "cls" else pooling
        )
        return sentence.project(vectors)
