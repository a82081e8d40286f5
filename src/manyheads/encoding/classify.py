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
from manyheads.tokenizers import surrogates_refused


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """The probability of each class for each text or image, and the names of the classes."""

    probabilities: Float[Tensor, "b classes"]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The most likely class of each text or image."""
        return tuple(self.names[int(index)] for index in self.probabilities.argmax(1))


def classify(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    longest: int | None = None,
    progress: bool = True,
) -> Classification:
    """The class of each text, in the order of the texts; a single string is a list of one.

    Texts are truncated and batched as in `encode`.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.models.build import build
    >>> model = with_classes(build("tiny-encoder", seed=0), ("even", "odd"))
    >>> found = classify(model, [[5, 6, 7], [8]])
    >>> found.probabilities.shape, found.names
    (torch.Size([2, 2]), ('even', 'odd'))
    """
    options = Options(
        batch_tokens=batch_tokens, longest=longest, progress=progress, doing="classifying"
    )
    classes, done = classify_counted(model, texts, options)
    if done.cut:
        warnings.warn(done.truncation, TruncationWarning, stacklevel=2)
    return classes


def classify_counted(
    model: Model, texts: Texts, options: Options
) -> tuple[Classification, Encoded]:
    """`classify` with counts and without a warning."""
    reader = require_text_model(model)
    head, readout = model.config.readout, getattr(reader, "readout", None)
    if not isinstance(head, ClassHead) or not isinstance(readout, ReadoutLayer):
        if isinstance(head, TokenHead):
            raise InputError("the model classifies tokens, not texts", "use manyheads.tag")
        raise InputError(
            "the model has no classification head", "add one with manyheads.with_classes"
        )

    def pooled(read: Ragged) -> Tensor:
        logits = readout(read, None)
        assert isinstance(logits, Tensor)
        return logits.float().softmax(1)

    done = read_pooled(reader, texts, options, pooled, head.classes)
    empty = (done.vectors.sum(1) == 0).nonzero()
    if len(empty):
        raise InputError(f"text {int(empty[0])} has no tokens", "leave it out")
    return Classification(done.vectors, class_names_of(model, head)), done


def class_names_of(model: Model, head: ClassHead | TokenHead) -> tuple[str, ...]:
    """The names of the classes, or their numbers."""
    return model.class_names or tuple(str(index) for index in range(head.classes))


def classify_images(
    model: Model,
    images: Iterable[Float[Tensor, "channels height width"]],
    *,
    batch: int = 64,
    total: int | None = None,
    progress: bool = True,
) -> Classification:
    """The class of each image, in order; `batch` of them are in memory at a time.

    `total` is their number, for the progress bar, if `images` has no length. Images are tensors
    preprocessed for the model, as by `manyheads.read_image`.

    >>> from manyheads.models.build import build
    >>> model = build("vit-b16", layers=1, width=16, heads=2, image=32, classes=3, seed=0)
    >>> classify_images(model, torch.zeros(2, 3, 32, 32)).probabilities.shape
    torch.Size([2, 3])
    """
    if not isinstance(model, Vision):
        raise InputError(f"a {type(model).__name__} does not read images", "use classify for texts")
    head = model.config.readout
    if not isinstance(head, ClassHead):
        raise InputError(
            "the model has no classification head", "add one with manyheads.with_classes"
        )
    if batch < 1:
        raise InputError(f"batch must be at least 1, got {batch}")
    if total is None and isinstance(images, Tensor | list | tuple):
        total = len(images)
    weight = next(model.parameters())
    found = []
    with (
        Progress("classifying", total=total, unit="images", enabled=progress) as bar,
        eval_mode(model),
        torch.no_grad(),
    ):
        for some in _batches(images, batch):
            logits = model([each.to(weight.device, weight.dtype) for each in some]).logits
            assert isinstance(logits, Tensor)
            found.append(logits.float().softmax(1).cpu())
            bar.advance(len(some))
    if not found:
        raise InputError("there are no images", "give at least one")
    return Classification(torch.cat(found), class_names_of(model, head))


def _batches(images: Iterable[Tensor], batch: int) -> Iterator[list[Tensor]]:
    left = iter(images)
    while some := list(islice(left, batch)):
        yield some


class Tag(NamedTuple):
    """A word, its most likely class and that probability; no class if the word was not read."""

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
    """The class of each word, from its first token, as in training with `TokenClassification`.

    Texts are split into words at white space, or given as lists of words. A `TruncationWarning`
    counts texts with words that were not read, beyond `longest` tokens or without any token.
    """
    reader = require_text_model(model)
    head = model.config.readout
    if not isinstance(head, TokenHead):
        raise InputError(
            "the model does not classify tokens",
            'add a head with manyheads.with_classes(model, names, of="tokens")',
        )
    words = [text.split() if isinstance(text, str) else list(text) for text in texts]
    tokenizer = truncating_tokenizer(reader, resolve_max_length(reader, longest))
    with surrogates_refused(words):
        encoded: Sequence[Any] = tokenizer.encode_batch(words, is_pretokenized=True)
    names = class_names_of(model, head)
    device = next(model.parameters()).device
    batch_tokens = batch_tokens or BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]
    tags: list[list[Tag]] = [[Tag(word, *NOT_READ) for word in each] for each in words]
    tokens = [np.array(one.ids, dtype=np.int64) for one in encoded]
    lengths = [len(each) for each in tokens]
    total = sum(lengths)
    with (
        Progress("tagging", total=total, unit="tokens", enabled=progress) as bar,
        eval_mode(model),
        torch.inference_mode(),
    ):
        for indices in batch_by_length(lengths, batch_tokens):
            batch = to_device_batch([tokens[index] for index in indices], device)
            logits = reader(batch).logits
            assert isinstance(logits, Ragged)
            probabilities, classes = logits.values.float().softmax(1).max(1)
            predictions = zip(classes.tolist(), probabilities.tolist(), strict=True)
            for index in indices:
                for word in encoded[index].word_ids:
                    number, probability = next(predictions)
                    if word is not None and not tags[index][word].label:
                        tags[index][word] = Tag(words[index][word], names[number], probability)
            bar.advance(batch.values.shape[0])
    part = sum(any(not each.label for each in row) for row in tags)
    if part:
        message = f"{part:,} of {len(tags):,} texts were read only in part"
        warnings.warn(message, TruncationWarning, stacklevel=2)
    return tags
