"""Classify texts, images and words with a model that has a classification head."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.encode import BATCH_TOKENS, Encoded, Options, read_pooled
from manyheads.encoding.text_reader import (
    Texts,
    batch_by_length,
    require_text_model,
    resolve_max_length,
    to_device_batch,
    truncating_tokenizer,
)
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.build import Model, eval_mode
from manyheads.models.readout import ClassHead, ReadoutLayer, TokenHead
from manyheads.models.vision import Vision
from manyheads.progress import Progress
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """For each text the share of each class, which add up to one; `names` are of the classes."""

    probabilities: Float[Tensor, "b classes"]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The likeliest class of each text."""
        return tuple(self.names[int(place)] for place in self.probabilities.argmax(1))


def classify(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    longest: int | None = None,
    progress: bool = True,
) -> Classification:
    """The class of each text, in the order of the texts; a string alone is a list of one.

    Texts are given, cut and batched as for `encode`.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.models.build import build
    >>> model = with_classes(build("council", seed=0), ("even", "odd"))
    >>> found = classify(model, [[5, 6, 7], [8]])
    >>> found.probabilities.shape, found.names
    (torch.Size([2, 2]), ('even', 'odd'))
    """
    options = Options(
        batch_tokens=batch_tokens, longest=longest, progress=progress, doing="classifying"
    )
    classes, done = classify_counted(model, texts, options)
    if done.cut:
        warnings.warn(done.told, TruncationWarning, stacklevel=2)
    return classes


def classify_counted(
    model: Model, texts: Texts, options: Options
) -> tuple[Classification, Encoded]:
    """The classes of `classify` with the counts beside them, and no warning."""
    reader = require_text_model(model)
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
    return Classification(done.vectors, class_names_of(model, head)), done


def class_names_of(model: Model, head: ClassHead | TokenHead) -> tuple[str, ...]:
    """What the classes are called, or else their numbers."""
    return model.class_names or tuple(str(place) for place in range(head.classes))


def classify_images(
    model: Model,
    images: Iterable[Float[Tensor, "channels height width"]],
    *,
    batch: int = 64,
    total: int | None = None,
    progress: bool = True,
) -> Classification:
    """The class of each image, in their order; `batch` of them are held at a time.

    `total` is how many there are, where they cannot say so themselves. Images are numbers as the
    model learnt them, such as `manyheads.read_image` makes of files.

    >>> from manyheads.models.build import build
    >>> model = build("vit-b16", layers=1, width=16, heads=2, image=32, classes=3, seed=0)
    >>> classify_images(model, torch.zeros(2, 3, 32, 32)).probabilities.shape
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
        eval_mode(model),
        torch.no_grad(),
    ):
        for some in _together(images, batch):
            logits = model([each.to(weight.device, weight.dtype) for each in some]).logits
            assert isinstance(logits, Tensor)
            found.append(logits.float().softmax(1).cpu())
            bar.advance(len(some))
    if not found:
        raise InputError("there is no image to classify", "give at least one")
    return Classification(torch.cat(found), class_names_of(model, head))


def _together(images: Iterable[Tensor], batch: int) -> Iterator[list[Tensor]]:
    left = iter(images)
    while some := list(islice(left, batch)):
        yield some


class Tag(NamedTuple):
    """A word, its likeliest class and the share of that; no class where the word was not read."""

    word: str
    label: str
    probability: float


NOT_READ = ("", 0.0)


def tag(
    model: Model,
    texts: Sequence[str] | Sequence[Sequence[str]],
    *,
    batch_tokens: int | None = None,
    longest: int | None = None,
    progress: bool = True,
) -> list[list[Tag]]:
    """The class of each word, as a model of `TokenClassification` learns it: off its first token.

    Texts are split into words at white space, or given as lists of words. A `TruncationWarning`
    counts texts with words that were not read, beyond `longest` tokens or without any token.
    """
    reader = require_text_model(model)
    head = model.config.readout
    if not isinstance(head, TokenHead):
        raise InputError(
            "the model tells no classes of tokens",
            "train one that does, with model.classes and TokenClassification",
        )
    words = [text.split() if isinstance(text, str) else list(text) for text in texts]
    tokenizer = truncating_tokenizer(reader, resolve_max_length(reader, longest))
    encoded: Sequence[Any] = tokenizer.encode_batch(words, is_pretokenized=True)
    names = class_names_of(model, head)
    device = next(model.parameters()).device
    most = batch_tokens or BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]
    found: list[list[Tag]] = [[Tag(word, *NOT_READ) for word in each] for each in words]
    tokens = [np.array(one.ids, dtype=np.int64) for one in encoded]
    lengths = [len(each) for each in tokens]
    total = sum(lengths)
    with (
        Progress("tagging", total=total, unit="tokens", enabled=progress) as bar,
        eval_mode(model),
        torch.inference_mode(),
    ):
        for places in batch_by_length(lengths, most):
            batch = to_device_batch([tokens[place] for place in places], device)
            logits = reader(batch).logits
            assert isinstance(logits, Ragged)
            shares, classes = logits.values.float().softmax(1).max(1)
            told = zip(classes.tolist(), shares.tolist(), strict=True)
            for place in places:
                for word in encoded[place].word_ids:
                    number, share = next(told)
                    if word is not None and not found[place][word].label:
                        found[place][word] = Tag(words[place][word], names[number], share)
            bar.advance(batch.values.shape[0])
    part = sum(any(not each.label for each in row) for row in found)
    if part:
        told_part = f"{part:,} of {len(found):,} texts were read in part"
        warnings.warn(told_part, TruncationWarning, stacklevel=2)
    return found
