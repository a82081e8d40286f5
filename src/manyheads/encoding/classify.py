"""Classify texts, images and words with a model that has a classification head."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.encode import Encoded, Options, read_pooled
from manyheads.encoding.text_reader import Texts, require_text_model
from manyheads.encoding.word_reader import SpannedText, WordOptions, read_words
from manyheads.errors import InputError, TruncationWarning
from manyheads.formatting import kind_of
from manyheads.models.build import Model, eval_mode
from manyheads.models.readout import ClassHead, ReadoutLayer, TokenHead, classifier_of
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tokenizers import join_words

NO_HEAD = "the model has no classification head", "add one with manyheads.with_classes"


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """The probability of each class for each text or image, and the names of the classes.

    The probabilities of `multi_label` classes do not add up to 1, and `thresholds` decide which of
    them are labels.
    """

    probabilities: Float[Tensor, "b classes"]
    names: tuple[str, ...]
    multi_label: bool = False
    thresholds: tuple[float, ...] = (0.5,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The most likely class of each text or image."""
        return tuple(self.names[int(index)] for index in self.probabilities.argmax(1))

    @property
    def label_sets(self) -> tuple[tuple[str, ...], ...]:
        """All labels of each text or image: one, or with `multi_label` any number."""
        if not self.multi_label:
            return tuple((label,) for label in self.labels)
        reached = (self.probabilities >= self.probabilities.new_tensor(self.thresholds)).tolist()
        return tuple(
            tuple(name for name, is_label in zip(self.names, row, strict=True) if is_label)
            for row in reached
        )

    def rows(self) -> list[dict[str, Any]]:
        """One record per text or image: its label, or labels, and the probability of each class."""
        return [
            {
                "label": list(labels) if self.multi_label else labels[0],
                "shares": dict(zip(self.names, row, strict=True)),
            }
            for labels, row in zip(self.label_sets, self.probabilities.tolist(), strict=True)
        ]


def classify(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    progress: bool = True,
) -> Classification:
    """The class of each text, in the order of the texts; a single string is a list of one.

    Texts are truncated and batched as in `encode`.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.models.build import build
    >>> model = with_classes(build("tiny-encoder", seed=0), ("even", "odd"))
    >>> classes = classify(model, [[5, 6, 7], [8]])
    >>> classes.probabilities.shape, classes.names
    (torch.Size([2, 2]), ('even', 'odd'))
    """
    options = Options(
        batch_tokens=batch_tokens, max_length=max_length, progress=progress, doing="classifying"
    )
    classes, encoded = classify_counted(model, texts, options)
    if encoded.truncated:
        warnings.warn(encoded.truncation, TruncationWarning, stacklevel=2)
    return classes


def classify_counted(
    model: Model, texts: Texts, options: Options
) -> tuple[Classification, Encoded]:
    """`classify` with counts and without a warning."""
    logits, encoded = read_logits(model, texts, options)
    return _classification(model, classifier_of(model).probabilities(logits)), encoded


def read_logits(
    model: Model, texts: Texts, options: Options
) -> tuple[Float[Tensor, "b classes"], Encoded]:
    """The logits of the classes of each text, at least in float32, with counts."""
    reader = require_text_model(model)
    head, readout = model.config.readout, getattr(reader, "readout", None)
    if not isinstance(head, ClassHead) or not isinstance(readout, ReadoutLayer):
        if isinstance(head, TokenHead):
            raise InputError("the model classifies tokens, not texts", "use manyheads.tag")
        raise InputError(*NO_HEAD)

    def pooled(states: Ragged) -> Tensor:
        logits = readout(states, None)
        assert isinstance(logits, Tensor)
        # The column of ones stays zero for a text without tokens.
        return F.pad(logits.float(), (0, 1), value=1.0)

    encoded = read_pooled(reader, texts, options, pooled, head.classes + 1)
    empty = (encoded.vectors[:, -1] == 0).nonzero()
    if len(empty):
        raise InputError(f"text {int(empty[0])} has no tokens", "leave it out")
    return encoded.vectors[:, :-1], encoded


def _classification(model: Model, probabilities: Tensor) -> Classification:
    head, classifier = model.config.readout, classifier_of(model)
    assert isinstance(head, ClassHead)
    return Classification(
        probabilities, class_names_of(model, head), classifier.multi_label, classifier.thresholds
    )


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
    if not model.reads_images:
        raise InputError(f"{kind_of(model)} does not read images", "use classify for texts")
    if not isinstance(model.config.readout, ClassHead):
        raise InputError(*NO_HEAD)
    if batch < 1:
        raise InputError(f"batch must be at least 1, got {batch}")
    if total is None and isinstance(images, Tensor | list | tuple):
        total = len(images)
    weight, classifier = next(model.parameters()), classifier_of(model)
    probabilities = []
    with (
        Progress("classifying", total=total, unit="images", enabled=progress) as bar,
        eval_mode(model),
        torch.no_grad(),
    ):
        remaining = iter(images)
        while pixels := list(islice(remaining, batch)):
            logits = model([image.to(weight.device, weight.dtype) for image in pixels]).logits
            assert isinstance(logits, Tensor)
            probabilities.append(classifier.probabilities(logits).cpu())
            bar.advance(len(pixels))
    if not probabilities:
        raise InputError("there are no images", "give at least one")
    return _classification(model, torch.cat(probabilities))


class Tag(NamedTuple):
    """A word, its most likely class and that probability; no class if the word was not read."""

    word: str
    label: str = ""
    probability: float = 0.0


WORD = re.compile(r"\S+")


def tag(
    model: Model,
    texts: Sequence[str] | Sequence[Sequence[str]],
    *,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    progress: bool = True,
) -> list[list[Tag]]:
    """The class of each word, from its first token, as in training with `TokenClassification`.

    Texts are split into words at white space, or given as lists of words, which are read with a
    space between them. A `TruncationWarning` counts texts with words that were not read, beyond
    `max_length` tokens or without any token.
    """
    options = WordOptions(batch_tokens=batch_tokens, max_length=max_length, progress=progress)
    spanned = [
        SpannedText(text, [match.span() for match in WORD.finditer(text)])
        if isinstance(text, str)
        else SpannedText(*join_words(text))
        for text in texts
    ]
    shares = read_words(model, spanned, options)
    names = class_names_of(model, cast(TokenHead, model.config.readout))
    tags = []
    for (text, spans), rows in zip(spanned, shares, strict=True):
        best, classes = rows.nan_to_num(-1.0).max(1)
        read = zip(spans, classes.tolist(), best.tolist(), strict=True)
        tags.append(
            [
                Tag(text[start:end], names[index], share) if share >= 0 else Tag(text[start:end])
                for (start, end), index, share in read
            ]
        )
    incomplete = sum(any(not word.label for word in row) for row in tags)
    if incomplete:
        message = f"{incomplete:,} of {len(tags):,} texts were read only in part"
        warnings.warn(message, TruncationWarning, stacklevel=2)
    return tags
