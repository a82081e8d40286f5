"""Images to classes."""

import torch

from manyheads.checkpoints.classification_head import name_classes
from manyheads.encoding.classify import classify_images
from manyheads.errors import InputError
from manyheads.models.build import Model, build
from tests.messages import refuses


def seeing() -> Model:
    model = build("vit-b16", layers=2, width=32, heads=4, hidden=64, image=32, classes=3, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def test_shares_are_those_of_the_logits_however_many_run_together() -> None:
    model, images = seeing().train(), torch.randn(5, 3, 32, 32)
    name_classes(model, ("cat", "dog", "owl"))
    result = classify_images(model, (image for image in images), batch=2, total=5)
    assert model.training
    logits = model.eval()(images).logits
    torch.testing.assert_close(result.probabilities, logits.softmax(1).detach())
    assert result.labels == tuple(("cat", "dog", "owl")[int(each)] for each in logits.argmax(1))
    torch.testing.assert_close(classify_images(model, images).probabilities, result.probabilities)


def test_what_cannot_be_classified_is_refused() -> None:
    with refuses(InputError, "a Decoder does not read images: use classify for texts."):
        classify_images(build("gpt2", layers=1, width=16, heads=2, vocabulary=9), [])
    with refuses(InputError, "there are no images: give at least one."):
        classify_images(seeing(), [])
    with refuses(InputError, "batch must be at least 1, got 0"):
        classify_images(seeing(), [], batch=0)
