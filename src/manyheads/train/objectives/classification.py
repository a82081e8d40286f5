"""Classes to be named: of texts, of tokens, of images."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.checkpoints.classes import Classified
from manyheads.data.batch import UNLABELLED, Batch
from manyheads.errors import InputError
from manyheads.models.readout import ClassHead, TokenHead
from manyheads.models.text import TextModel
from manyheads.models.vision import Vision
from manyheads.ragged import Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives.objective import (
    Loss,
    RoutedObjective,
    Task,
    check_readout,
    check_smoothing,
    texts_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassObjective(RoutedObjective):
    """A class is asked for where there is a label; labels below zero ask nothing."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        del draw
        asked = self._asked(batch)
        if batch.labels is None or batch.labels.shape[0] != asked:
            given = "none" if batch.labels is None else batch.labels.shape[0]
            raise InputError(
                f"{type(self).__name__} got {given} labels for {asked}", "give one label each"
            )
        places = (batch.labels >= 0).nonzero().squeeze(1)
        answers = batch.labels[places]
        classes = model.config.readout.classes
        if answers.numel() and int(answers.max()) >= classes:
            raise InputError(
                f"label {int(answers.max())} is outside classes={classes}",
                f"use 0 to {classes - 1}, or {UNLABELLED} for none",
            )
        return Task(batch=batch, places=places, answers=answers)

    @abstractmethod
    def _asked(self, batch: Batch) -> int:
        """How many labels there should be."""

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        output = model(self._read(task.batch), watch=watch)
        logits = output.logits.values if isinstance(output.logits, Ragged) else output.logits
        logits = logits.index_select(0, task.places).float()
        total = F.cross_entropy(
            logits, task.answers, label_smoothing=self.label_smoothing, reduction="sum"
        )
        loss = self.summed(total, task, output.router)
        if torch.is_grad_enabled():
            return loss
        return replace(loss, right=(logits.argmax(1) == task.answers).sum())

    def _read(self, batch: Batch) -> Any:
        return batch.texts


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassification(ClassObjective):
    """The class of each text."""

    classified: ClassVar[Classified] = "texts"

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, TextModel, ClassHead)

    def _asked(self, batch: Batch) -> int:
        return len(texts_of(self, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassification(ClassObjective):
    """The class of each token."""

    classified: ClassVar[Classified] = "tokens"

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, TextModel, TokenHead)

    def _asked(self, batch: Batch) -> int:
        return texts_of(self, batch).lengths.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassification(ClassObjective):
    """The class of each image."""

    classified: ClassVar[Classified] = "images"

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, Vision, ClassHead)

    def _asked(self, batch: Batch) -> int:
        return len(batch.images)

    def _read(self, batch: Batch) -> Any:
        return batch.images
