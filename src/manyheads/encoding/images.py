"""Images to classes, by a model with a head for them."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.classify import Classes, names_of
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.models.readout import ClassHead
from manyheads.models.resting import resting
from manyheads.models.vision import Vision
from manyheads.progress import Progress

__all__ = ["classify_images"]


def classify_images(
    model: Model,
    images: Iterable[Float[Tensor, "channels height width"]],
    *,
    batch: int = 64,
    total: int | None = None,
    progress: bool = True,
) -> Classes:
    """The class of each image, in their order; `batch` of them are held at a time.

    `total` is how many there are, where they cannot say so themselves. Images are numbers as the
    model learnt them, such as `manyheads.read_image` makes of files.

    >>> from manyheads.models.build import build
    >>> model = build("vit-b16", layers=1, width=16, heads=2, image=32, classes=3, seed=0)
    >>> classify_images(model, torch.zeros(2, 3, 32, 32)).shares.shape
    torch.Size([2, 3])
    """
    if not isinstance(model, Vision):
        raise InputError(f"this {type(model).__name__} reads no images", "classify texts with it")
    head = model.config.readout
    if not isinstance(head, ClassHead):
        raise InputError(
            "the model tells no classes apart", "train one that does, with model.classes"
        )
    if batch < 1:
        raise InputError(f"batch={batch} holds no image", "use 1 or more")
    if total is None and isinstance(images, Tensor | list | tuple):
        total = len(images)
    weight = next(model.parameters())
    found = []
    with (
        Progress("classifying", total=total, unit="images", shown=progress) as bar,
        resting(model),
        torch.no_grad(),
    ):
        for some in _together(images, batch):
            logits = model([each.to(weight.device, weight.dtype) for each in some]).logits
            assert isinstance(logits, Tensor)
            found.append(logits.float().softmax(1).cpu())
            bar.advance(len(some))
    if not found:
        raise InputError("there is no image to classify", "give at least one")
    return Classes(torch.cat(found), names_of(model, head))


def _together(images: Iterable[Tensor], batch: int) -> Iterator[list[Tensor]]:
    left = iter(images)
    while some := list(islice(left, batch)):
        yield some
