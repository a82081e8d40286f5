"""Classes of texts, tokens and images: torch's cross-entropy where there is a label."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.train.objectives import (
    ImageClassification,
    MultiLabelClassification,
    Objective,
    SequenceClassification,
    TokenClassification,
)
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, LENGTHS, VISIONS, ids, images, values

NOBODY = torch.Generator()


def case(kind: str, smoothing: float = 0.0) -> tuple[Objective, Any, Batch]:
    match kind:
        case "texts":
            labels = torch.tensor([0, 2, -100, 1, 1])
            batch = Batch(texts=ids(), labels=labels)
            return SequenceClassification(label_smoothing=smoothing), "classes", batch
        case "tokens":
            labels = torch.arange(sum(LENGTHS)) % 4 - 1
            batch = Batch(texts=ids(), labels=labels)
            return TokenClassification(label_smoothing=smoothing), "tags", batch
        case _:
            batch = Batch(images=tuple(images()), labels=torch.tensor([4, 0, 2, -1]))
            return ImageClassification(label_smoothing=smoothing), "mean", batch


def model_of(name: str) -> Any:
    return build((ENCODERS | VISIONS)[name], seed=0)


def logits_of(model: Any, batch: Batch) -> Tensor:
    return values(model(batch.texts if batch.texts is not None else batch.images).logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["texts", "tokens", "images"])
def test_the_loss_is_that_of_torch_at_labeled_items(kind: str, smoothing: float) -> None:
    objective, name, batch = case(kind, smoothing)
    model = model_of(name)
    loss = objective.loss(model, batch, NOBODY)
    labels = torch.where(batch.labels < 0, -100, batch.labels)
    expected = F.cross_entropy(
        logits_of(model, batch), labels, label_smoothing=smoothing, reduction="sum"
    )
    assert loss.targets == int((labels >= 0).sum())
    torch.testing.assert_close(loss.total, expected)
    assert ("router balance" in loss.parts) == (kind == "images")


@pytest.mark.parametrize("kind", ["texts", "tokens", "images"])
def test_right_answers_are_counted_where_nothing_is_learnt(kind: str) -> None:
    objective, name, batch = case(kind)
    model = model_of(name)
    assert objective.loss(model, batch, NOBODY).correct is None
    with torch.no_grad():
        right = objective.loss(model, batch, NOBODY).correct
        expected = logits_of(model, batch).argmax(1) == batch.labels
    assert right is not None
    assert int(right) == int(expected.sum())


@pytest.mark.parametrize("kind", ["texts", "tokens", "images"])
def test_no_label_gives_zero_and_zero_gradients(kind: str) -> None:
    objective, name, batch = case(kind)
    model = model_of(name)
    none = Batch(texts=batch.texts, images=batch.images, labels=torch.full_like(batch.labels, -100))
    loss = objective.loss(model, none, NOBODY)
    assert (loss.targets, loss.combined.item()) == (0, 0)
    loss.combined.backward()
    assert all(each.grad is None or (each.grad == 0).all() for each in model.parameters())


def test_what_does_not_fit_is_refused() -> None:
    model = model_of("classes")
    with refuses(
        InputError, "SequenceClassification needs 5 labels, got 3: give one label per item."
    ):
        batch = Batch(texts=ids(), labels=torch.tensor([0, 1, 2]))
        SequenceClassification().loss(model, batch, NOBODY)
    with refuses(
        InputError, "label 3 is out of range for classes=3: use 0 to 2, or -100 for none."
    ):
        batch = Batch(texts=ids(), labels=torch.tensor([0, 1, 2, 3, 0]))
        SequenceClassification().loss(model, batch, NOBODY)
    with refuses(
        ConfigError,
        "TokenClassification cannot use the readout LanguageHead: "
        "add classes: model.classes in a run file, with_classes in Python.",
    ):
        TokenClassification().check(build(DECODERS["gpt2"]))
    with refuses(ConfigError, "ImageClassification cannot train an Encoder: use a vision model."):
        ImageClassification().check(model)


def test_several_labels_per_text_are_scored_as_transformers_does() -> None:
    model = model_of("classes")
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
    batch = Batch(texts=ids(), labels=labels)
    loss = MultiLabelClassification().loss(model, batch, NOBODY)
    logits = logits_of(model, batch)
    expected = F.binary_cross_entropy_with_logits(logits, labels.float())
    torch.testing.assert_close(loss.total / loss.targets, expected)
    with torch.no_grad():
        correct = MultiLabelClassification().loss(model, batch, NOBODY).correct
    assert correct is not None
    assert int(correct) == int(((logits >= 0) == labels.bool()).all(1).sum())
    # Labels that are numbers may end before the last class.
    two = Batch(texts=ids(), labels=labels[:, :2])
    padded = Batch(texts=ids(), labels=labels * torch.tensor([1, 1, 0]))
    torch.testing.assert_close(
        MultiLabelClassification().loss(model, two, NOBODY).total,
        MultiLabelClassification().loss(model, padded, NOBODY).total,
    )
    with refuses(InputError, "list of labels", "5 texts"):
        MultiLabelClassification().loss(model, Batch(texts=ids(), labels=labels[:, 0]), NOBODY)
    with refuses(InputError, "one label per text", "use MultiLabelClassification"):
        SequenceClassification().loss(model, batch, NOBODY)
