"""What a model is asked about plain texts or images, so that it can be judged by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyheads.data.masking import Masking, mask_tokens, masking_vocabulary
from manyheads.errors import InputError
from manyheads.lens.given import Given, Targets, read
from manyheads.lens.metrics import Metric, Similarity
from manyheads.models.build import Model
from manyheads.models.encoder import Encoder
from manyheads.models.readout import LanguageHead

__all__ = ["Questions", "questions"]

# As BERT was asked, but never shown another word in the place of the right one.
HIDDEN = Masking(share=0.15, hidden=1.0, replaced=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Texts as the model reads them, the metric, and the right answers where texts lack them."""

    given: Given
    metric: Metric
    targets: Targets | None


def questions(
    model: Model, texts: Any, *, targets: Targets | None = None, seed: int = 0
) -> Questions:
    """The next word of a model that writes, masked words of one that reads, or its own vectors.

    A model without any readout is asked to stay like itself, one of classes for the `targets`.
    """
    given = read(model, texts)
    if model.readout is None:
        return Questions(given, Similarity(), None)
    if targets is not None:
        return Questions(given, "loss", targets)
    if not isinstance(model.config.readout, LanguageHead):
        kind = type(model.config.readout).__name__
        raise InputError(
            f"nothing says what a {kind} should answer", "give targets, the right classes"
        )
    if not isinstance(model, Encoder):
        return Questions(given, "loss", None)
    return _masked(model, given, seed)


def _masked(model: Encoder, given: Given, seed: int) -> Questions:
    assert given.ids is not None
    words = masking_vocabulary(model.tokenizer, model.config.embedding.vocabulary)
    draw = torch.Generator().manual_seed(seed)
    masked = mask_tokens(given.ids, words, HIDDEN, draw)
    lengths = given.ids.lengths
    targets: list[dict[int, int]] = [{} for _ in range(len(given))]
    owners = lengths.sequence_of_token[masked.positions].tolist()
    positions = lengths.positions[masked.positions].tolist()
    answers: Sequence[int] = masked.labels.tolist()
    for owner, position, answer in zip(owners, positions, answers, strict=True):
        targets[owner][position] = answer
    if not any(targets):
        raise InputError("no word of the texts could be masked", "give longer texts")
    return Questions(Given(ids=masked.texts), "loss", targets)
