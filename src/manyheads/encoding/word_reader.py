"""The probabilities of the classes of each word, of texts of any length."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.encoding import text_reader
from manyheads.errors import InputError
from manyheads.models import build, readout
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tokenizers import Span, first_tokens, surrogates_refused, truncating_copy

# Texts that are tokenized and read together.
TEXTS_AT_ONCE = 2048


class SpannedText(NamedTuple):
    """A text and the spans of its words."""

    text: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordOptions(text_reader.ReadOptions):
    """How words are read; None means as the model says, or by device.

    Texts of more than `max_length` tokens are truncated, or with `windows` read in windows of that
    many tokens which overlap by a quarter.
    """

    windows: bool = False
    doing: str = "tagging"


class _Window(NamedTuple):
    """A part of a text that the model reads at once, and its tokens for words.

    `words` have for each word its first token, and how many tokens of the text are to the nearest
    end of the window, without limit where the text ends there too.
    """

    text: int
    ids: Sequence[int]
    words: list[tuple[int, int, float]]


def read_words(
    model: build.Model, texts: Sequence[SpannedText], options: WordOptions
) -> list[Float[Tensor, "w c"]]:
    """The probability of each class for each word of each text, from the word's first token.

    Where windows overlap, a word is read in the one with the most text around it. The
    probabilities of a word that was not read are NaN.
    """
    reader, head = text_reader.require_text_model(model), model.config.readout
    if not isinstance(head, readout.TokenHead):
        raise InputError(
            "the model does not classify tokens",
            'add a head with manyheads.with_classes(model, names, of="tokens")',
        )
    tokenizer, classifier = _tokenizer(reader, options), readout.classifier_of(model)
    device = next(model.parameters()).device
    batch_tokens = options.tokens_per_batch(device)
    results = [torch.full((len(text.spans), head.classes), torch.nan) for text in texts]
    tokens = 0
    with (
        Progress(options.doing, unit="tokens", enabled=options.progress) as bar,
        build.eval_mode(model),
        torch.inference_mode(),
    ):
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            block = texts[start : start + TEXTS_AT_ONCE]
            windows = list(_windows(tokenizer, block, start))
            lengths = [len(window.ids) for window in windows]
            tokens += sum(lengths)
            bar.expect(tokens * len(texts) / (start + len(block)))
            best = [np.full(len(text.spans), -inf) for text in block]
            for indices in text_reader.batch_by_length(lengths, batch_tokens):
                chosen = [windows[index] for index in indices]
                ids = [np.array(window.ids, dtype=np.int64) for window in chosen]
                batch = text_reader.to_device_batch(ids, device)
                logits = reader(batch).logits
                assert isinstance(logits, Ragged)
                shares = classifier.probabilities(logits.values).cpu()
                for window, rows in zip(chosen, batch.lengths.slices(), strict=True):
                    # Words are kept that have more text around them here than in windows before.
                    own, result = shares[rows], results[window.text]
                    margins = best[window.text - start]
                    for word, token, margin in window.words:
                        if margin > margins[word]:
                            margins[word], result[word] = margin, own[token]
                bar.advance(batch.values.shape[0])
    return results


def _tokenizer(model: text_reader.TextReader, options: WordOptions) -> Any:
    if model.tokenizer is None:
        raise InputError(
            "this model has no tokenizer",
            "load it from a folder with tokenizer.json, or set model.tokenizer",
        )
    max_length = text_reader.resolve_max_length(model, options.max_length)
    if options.windows and options.max_length is None and model.trained_length is not None:
        max_length = min(max_length or model.trained_length, model.trained_length)
    tokenizer = truncating_copy(model.tokenizer, max_length)
    if options.windows and max_length is not None:
        overlap = (max_length - tokenizer.num_special_tokens_to_add(False)) // 4
        tokenizer.enable_truncation(max_length, stride=overlap, direction="right")
    return tokenizer


def _windows(tokenizer: Any, texts: Sequence[SpannedText], first: int) -> Iterator[_Window]:
    strings = [text.text for text in texts]
    with surrogates_refused(strings, first=first):
        encoded = tokenizer.encode_batch(strings)
    windowed = bool((tokenizer.truncation or {}).get("stride"))
    for number, (encoding, text) in enumerate(zip(encoded, texts, strict=True), first):
        parts = [encoding, *encoding.overflowing] if windowed else [encoding]
        last = len(parts) - 1
        for index, part in enumerate(parts):
            words = _first_tokens(part.offsets, text.spans, starts=index == 0, ends=index == last)
            yield _Window(number, part.ids, list(words))


def _first_tokens(
    offsets: Sequence[Span], spans: Sequence[Span], *, starts: bool, ends: bool
) -> Iterator[tuple[int, int, float]]:
    """The words of a window, which may start or end the text, with their tokens and margins."""
    real = [index for index, (begin, end) in enumerate(offsets) if begin < end]
    if not real:
        return
    opening, closing = real[0], real[-1]
    low = bisect_right(spans, offsets[opening][0], key=itemgetter(1))
    high = bisect_left(spans, offsets[closing][1], key=itemgetter(0))
    for word, token in enumerate(first_tokens(offsets, spans[low:high]), low):
        # The window may begin within a word, whose first token is in the window before.
        if token is None or (
            not starts and token == opening and offsets[token][0] > spans[word][0]
        ):
            continue
        yield word, token, min(inf if starts else token - opening, inf if ends else closing - token)
