"""Words to their classes, by a model with a head for each token."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manyheads.encoding.classify import names_of
from manyheads.encoding.encode import BATCH_TOKENS
from manyheads.encoding.text_reader import (
    cutting_tokenizer,
    fill,
    find_longest,
    on_device,
    reads_texts,
)
from manyheads.errors import CutWarning, InputError
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.readout import TokenHead
from manyheads.progress import Progress
from manyheads.ragged import Ragged


class Tag(NamedTuple):
    """A word, its likeliest class and the share of that; no class where the word was not read."""

    word: str
    label: str
    share: float


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

    Texts are cut into words at white space, or come as lists of words. A `CutWarning` counts texts
    of which words were not read, beyond `longest` tokens or without any.
    """
    reader = reads_texts(model)
    head = model.config.readout
    if not isinstance(head, TokenHead):
        raise InputError(
            "the model tells no classes of tokens",
            "train one that does, with model.classes and TokenClassification",
        )
    words = [text.split() if isinstance(text, str) else list(text) for text in texts]
    tokenizer = cutting_tokenizer(reader, find_longest(reader, longest))
    encoded: Sequence[Any] = tokenizer.encode_batch(words, is_pretokenized=True)
    names = names_of(model, head)
    device = next(model.parameters()).device
    most = batch_tokens or BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]
    found: list[list[Tag]] = [[Tag(word, *NOT_READ) for word in each] for each in words]
    tokens = [np.array(one.ids, dtype=np.int64) for one in encoded]
    lengths = [len(each) for each in tokens]
    total = sum(lengths)
    with (
        Progress("tagging", total=total, unit="tokens", enabled=progress) as bar,
        resting(model),
        torch.inference_mode(),
    ):
        for places in fill(lengths, most):
            batch = on_device([tokens[place] for place in places], device)
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
        warnings.warn(told_part, CutWarning, stacklevel=2)
    return found
