"""The output of a classifier or a regression model for each text, which filter rules read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding import classify, encode, filter_rule, text_reader
from manyheads.errors import InputError
from manyheads.models import build, readout
from manyheads.tokenizers import surrogates_refused


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedTexts:
    """The token ids of texts, and whether each was truncated."""

    ids: list[text_reader.Ids]
    truncated: list[bool]


@dataclass(frozen=True, slots=True, eq=False)
class TextScores:
    """A score for each text, and of a classifier the probability of each class too.

    The score is the one output of a regression model, or the expected number of the class: the
    number that its name is, if all names are numbers, else its index; where a text may have several
    labels, it is the highest of their probabilities. A text without tokens has the score NaN.
    `classes` is empty for a regression model.
    """

    scores: tuple[float, ...]
    probabilities: tuple[tuple[float, ...], ...]
    classes: tuple[str, ...]
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]

    def best(self, index: int) -> int:
        """The most likely class of a text."""
        row = self.probabilities[index]
        return row.index(max(row))

    def label(self, index: int) -> str:
        return self.classes[self.best(index)]

    def value(self, name: filter_rule.RuleName, index: int) -> Any:
        """The value of a name in a rule."""
        match name.kind:
            case "score":
                return self.scores[index]
            case "label":
                return self.label(index)
            case "probability":
                return max(self.probabilities[index])
            case "class":
                return self.probabilities[index][self.classes.index(name.name)]
            case "tokens":
                return self.tokens[index]
            case "truncated":
                return self.truncated[index]
        raise AssertionError(f"{name.kind} is not known here")


def scored_classes(model: build.Model) -> tuple[str, ...]:
    """The classes of a text classifier, none of a regression model; other models are refused."""
    head = text_reader.require_text_model(model).config.readout
    if not isinstance(head, readout.ClassHead):
        raise InputError(
            "the model neither classifies nor scores texts",
            "give one with a classification head, such as manyheads.with_classes adds",
        )
    return classify.class_names_of(model, head) if head.classes > 1 else ()


def tokenize_texts(
    model: build.Model, texts: Sequence[str], max_length: int | None
) -> TokenizedTexts:
    """The ids of texts, truncated to `max_length` tokens or to what the model reads."""
    reader = text_reader.require_text_model(model)
    max_length = text_reader.resolve_max_length(reader, max_length)
    tokenizer = text_reader.truncating_tokenizer(reader, max_length)
    with surrogates_refused(texts):
        encoded = tokenizer.encode_batch_fast(list(texts))
    ids = [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]
    return TokenizedTexts(ids, [bool(encoding.overflowing) for encoding in encoded])


def score_texts(model: build.Model, texts: TokenizedTexts, options: encode.Options) -> TextScores:
    """The scores of each text; `options.max_length` does not matter for ids."""
    classes = scored_classes(model)
    lengths = [len(ids) for ids in texts.ids]
    filled = [index for index, length in enumerate(lengths) if length]
    ids = [texts.ids[index] for index in filled]
    scores = torch.full((len(lengths),), torch.nan)
    probabilities = torch.zeros(len(lengths), len(classes))
    if ids and classes:
        classification = classify.classify_counted(model, ids, options)[0]
        shares = classification.probabilities.float().cpu()
        probabilities[filled] = shares
        expected = shares @ class_numbers(classes)
        scores[filled] = shares.max(1).values if classification.multi_label else expected
    elif ids:
        scores[filled] = classify.read_logits(model, ids, options)[0][:, 0].float().cpu()
    return TextScores(
        tuple(scores.tolist()),
        tuple(map(tuple, probabilities.tolist())),
        classes,
        tuple(lengths),
        tuple(texts.truncated),
    )


def class_numbers(classes: Sequence[str]) -> Float[Tensor, " classes"]:
    """The numbers that the names of the classes are, or their indices.

    >>> class_numbers(("1", "2", "5")), class_numbers(("bad", "good"))
    (tensor([1., 2., 5.]), tensor([0., 1.]))
    """
    try:
        numbers = torch.tensor([float(name) for name in classes])
    except ValueError:
        return torch.arange(len(classes)).float()
    return numbers if numbers.isfinite().all() else torch.arange(len(classes)).float()
