"""Texts to classes, by a model with a head for them."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.encode import Encoded, Options, read_pooled
from manyheads.encoding.text_reader import Texts, reads_texts
from manyheads.errors import CutWarning, InputError
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.readout import ClassHead, ReadoutLayer, TokenHead
from manyheads.models.vision import Vision
from manyheads.progress import Progress
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """For each text the share of each class, which add up to one; `names` are of the classes."""

    shares: Float[Tensor, "b classes"]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The likeliest class of each text."""
        return tuple(self.names[int(place)] for place in self.shares.argmax(1))


def classify(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    longest: int | None = None,
    progress: bool = True,
) -> Classes:
    """The class of each text, in the order of the texts; a string alone is a list of one.

    Texts are given, cut and batched as for `encode`.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.models.build import build
    >>> model = with_classes(build("council", seed=0), ("even", "odd"))
    >>> found = classify(model, [[5, 6, 7], [8]])
    >>> found.shares.shape, found.names
    (torch.Size([2, 2]), ('even', 'odd'))
    """
    options = Options(
        batch_tokens=batch_tokens, longest=longest, progress=progress, doing="classifying"
    )
    classes, done = classify_counted(model, texts, options)
    if done.cut:
        warnings.warn(done.told, CutWarning, stacklevel=2)
    return classes


def classify_counted(model: Model, texts: Texts, options: Options) -> tuple[Classes, Encoded]:
    """The classes of `classify` with the counts beside them, and no warning."""
    reader = reads_texts(model)
    head, readout = model.config.readout, getattr(reader, "readout", None)
    if not isinstance(head, ClassHead) or not isinstance(readout, ReadoutLayer):
        if isinstance(head, TokenHead):
            raise InputError("the model tells classes of tokens, not of texts", "use manyheads.tag")
        raise InputError(
            "the model tells no classes apart", "train one that does, with model.classes"
        )

    def pooled(read: Ragged) -> Tensor:
        logits = readout(read, None)
        assert isinstance(logits, Tensor)
        return logits.float().softmax(1)

    done = read_pooled(reader, texts, options, pooled, head.classes)
    empty = (done.vectors.sum(1) == 0).nonzero()
    if len(empty):
        raise InputError(f"text {int(empty[0])} has no token to tell a class by", "leave it out")
    return Classes(done.vectors, names_of(model, head)), done


def names_of(model: Model, head: ClassHead | TokenHead) -> tuple[str, ...]:
    """What the classes are called, or else their numbers."""
    return model.class_names or tuple(str(place) for place in range(head.classes))


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
        Progress("classifying", total=total, unit="images", enabled=progress) as bar,
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
