"""Classification of texts, tokens and images."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.argument_checks import check_fields
from manyheads.data.batch import IGNORE_INDEX, Batch
from manyheads.errors import InputError
from manyheads.models import encoder, provenance, readout, vision
from manyheads.ragged import Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives import objective
from manyheads.train.objectives.objective import Loss, PreparedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyingObjective(objective.RoutedObjective):
    """One or more classes per text, token or image, from a model of this kind and its head."""

    classified: ClassVar[provenance.Classified] = "texts"
    model_type: ClassVar[type[nn.Module]] = encoder.TextModel
    head: ClassVar[type] = readout.ClassHead

    def check(self, model: nn.Module) -> None:
        objective.check_readout(self, model, self.model_type, self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassObjective(ClassifyingObjective):
    """Cross-entropy over classes; labels below zero are ignored."""

    label_smoothing: objective.Smoothing = 0.0

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del generator
        expected = self._label_count(batch)
        if batch.labels is None or batch.labels.shape[0] != expected:
            count = "no" if batch.labels is None else batch.labels.shape[0]
            raise InputError(
                f"{type(self).__name__} needs {expected} labels, got {count}",
                "give one label per item",
            )
        if batch.labels.dim() > 1:
            raise InputError(
                f"{type(self).__name__} needs one label per text, and texts have lists of them",
                "use MultiLabelClassification",
            )
        positions = (batch.labels >= 0).nonzero().squeeze(1)
        labels = batch.labels[positions]
        classes = model.config.readout.classes
        if labels.numel() and int(labels.max()) >= classes:
            raise InputError(
                f"label {int(labels.max())} is out of range for classes={classes}",
                f"use 0 to {classes - 1}, or {IGNORE_INDEX} for none",
            )
        return PreparedBatch(batch=batch, positions=positions, labels=labels)

    @abstractmethod
    def _label_count(self, batch: Batch) -> int:
        """The number of labels that the batch should have."""

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        output = model(self._read(prepared.batch), watch=watch)
        logits = output.logits.values if isinstance(output.logits, Ragged) else output.logits
        logits = logits.index_select(0, prepared.positions).float()
        total = F.cross_entropy(
            logits, prepared.labels, label_smoothing=self.label_smoothing, reduction="sum"
        )
        loss = self.with_router_losses(total, prepared, output.router)
        if torch.is_grad_enabled():
            return loss
        return replace(loss, correct=(logits.argmax(1) == prepared.labels).sum())

    def _read(self, batch: Batch) -> Any:
        return batch.texts


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassification(ClassObjective):
    """One class per text."""

    def _label_count(self, batch: Batch) -> int:
        return len(objective.require_texts(self, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLabelClassification(ClassifyingObjective):
    """Any number of labels per text: binary cross-entropy, the mean over the classes.

    Evaluation counts texts as correct whose labels are all right.
    """

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del generator
        expected, classes = len(objective.require_texts(self, batch)), model.config.readout.classes
        labels = batch.labels
        if labels is None or labels.dim() != 2 or labels.shape[0] != expected:
            raise InputError(
                f"{type(self).__name__} needs a list of labels for each of {expected} texts",
                'write labels as a list: "label": ["a", "b"], or [] for none',
            )
        if labels.shape[1] > classes:
            raise InputError(
                f"label {labels.shape[1] - 1} is out of range for classes={classes}",
                f"use 0 to {classes - 1}",
            )
        # Labels that are numbers may end before the last class.
        labels = F.pad(labels, (0, classes - labels.shape[1]))
        return PreparedBatch(batch=batch, positions=torch.arange(expected), labels=labels)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        output = model(prepared.batch.texts, watch=watch)
        logits = output.logits.float()
        total = F.binary_cross_entropy_with_logits(
            logits, prepared.labels.to(logits), reduction="sum"
        )
        loss = self.with_router_losses(total / logits.shape[1], prepared, output.router)
        if torch.is_grad_enabled():
            return loss
        thresholds = logits.new_tensor(readout.classifier_of(model).thresholds)
        right = (logits.sigmoid() >= thresholds) == prepared.labels.bool()
        return replace(loss, correct=right.all(1).sum())


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassification(ClassObjective):
    """One class per token."""

    classified: ClassVar[provenance.Classified] = "tokens"
    head: ClassVar[type] = readout.TokenHead

    def _label_count(self, batch: Batch) -> int:
        return objective.require_texts(self, batch).lengths.total


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassification(ClassObjective):
    """One class per image."""

    classified: ClassVar[provenance.Classified] = "images"
    model_type: ClassVar[type[nn.Module]] = vision.Vision

    def _label_count(self, batch: Batch) -> int:
        return len(batch.images)

    def _read(self, batch: Batch) -> Any:
        return batch.images
