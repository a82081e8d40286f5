"""Texts as token ids, truncated to what the model can read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.models import build, decoder, encoder, seq2seq
from manyheads.parts.positions import Axial, Learned
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizers import surrogates_refused, truncating_copy

Ids = NDArray[np.int64]
# Strings, or the token ids of each text as a list, an array or a tensor.
Texts = str | Sequence[Any] | Ragged
TextReader = encoder.Encoder | decoder.Decoder | seq2seq.Seq2Seq

# Tokens per batch. On the CPU enough for efficient matrix products, and few enough for its caches.
BATCH_TOKENS = {"cpu": 1536, "cuda": 32768}
# Truncating copies of tokenizers, by model and length: copying one takes a while.
COPIES_PER_MODEL = 4
_COPIES: "WeakKeyDictionary[nn.Module, tuple[Any, dict[int | None, Any]]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How texts are read; None means as the model's folder says, or by device."""

    batch_tokens: int | None = None
    max_length: int | None = None
    progress: bool = True
    doing: str = "encoding"

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise InputError(f"batch_tokens must be at least 1, got {self.batch_tokens}")

    def tokens_per_batch(self, device: torch.device) -> int:
        return self.batch_tokens or BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]


def truncation_message(truncated: int, texts: int, max_length: int | None) -> str:
    """
    >>> truncation_message(2, 1000, 512)
    '2 of 1,000 texts were truncated to 512 tokens'
    """
    return f"{truncated:,} of {texts:,} texts were truncated to {max_length:,} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Reads texts as token ids, some at a time; without a tokenizer they are ids already."""

    texts: Sequence[Any]
    tokenizer: Any
    vocabulary: int
    max_length: int | None
    model: TextReader

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, indices: range) -> tuple[list[Ids], int]:
        """The ids of some texts, and how many of them were truncated."""
        texts = self.texts[indices.start : indices.stop]
        truncated = 0
        if self.tokenizer is None:
            ids = [_as_ids(text, index) for text, index in zip(texts, indices, strict=True)]
        else:
            with surrogates_refused(texts, first=indices.start):
                encoded = self.tokenizer.encode_batch_fast(texts)
            ids = [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]
            truncated = sum(bool(encoding.overflowing) for encoding in encoded)
        for text_ids, index in zip(ids, indices, strict=True):
            self._check(text_ids, index)
        if ids:
            lengths = [len(text_ids) for text_ids in ids]
            number = indices[lengths.index(max(lengths))]
            self.model.warn_if_longer(max(lengths), f"text {number}")
        return ids, truncated

    def _check(self, ids: Ids, index: int) -> None:
        if self.max_length is not None and len(ids) > self.max_length:
            raise InputError(
                f"text {index} has {len(ids)} token ids, and the model reads {self.max_length}",
                "truncate it, because token ids are used as they are",
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            worst = ids.min() if ids.min() < 0 else ids.max()
            raise InputError(
                f"text {index} has token id {worst}, outside vocabulary={self.vocabulary}",
                f"use ids of 0 to {self.vocabulary - 1}",
            )


def require_text_model(model: build.Model) -> TextReader:
    """The model, if it reads texts."""
    if isinstance(model, TextReader):
        return model
    raise InputError(
        f"{kind_of(model)} does not read texts",
        "give it images (--image at the command line), or use an Encoder, Decoder or Seq2Seq",
    )


def check_continues(model: build.Model) -> None:
    """Refuse a model that does not continue a text."""
    if not model.predicts_next_token or model.reads_pairs:
        raise InputError(f"{kind_of(model)} does not continue a text", "use a model that does")


def check_texts(texts: object) -> None:
    """Refuse what is not a sequence of texts or images."""
    single = isinstance(texts, Tensor | np.ndarray) and not texts.ndim
    if single or isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"texts must be strings or lists of token ids, got {kind_of(texts)}",
            "give a string, or a list with one item per text",
        )


def open_reader(model: TextReader, texts: Texts, max_length: int | None) -> Reader:
    """A reader of strings, or of token ids."""
    if isinstance(texts, Ragged):
        if texts.values.is_floating_point() or texts.values.dim() != 1:
            raise InputError("the Ragged holds no token ids", "give one integer per token")
        texts = texts.to("cpu").to_list()
    check_texts(texts)
    listed = [texts] if isinstance(texts, str) else list(texts)
    strings = [isinstance(text, str) for text in listed]
    if any(strings) and not all(strings):
        index = strings.index(False)
        raise InputError(
            f"text {index} is {kind_of(listed[index])}, and others are strings",
            "give only strings, or only token ids",
        )
    tokenizer = truncating_tokenizer(model, max_length) if any(strings) else None
    return Reader(listed, tokenizer, model.config.embedding.vocabulary, max_length, model)


def resolve_max_length(model: TextReader, max_length: int | None) -> int | None:
    """How many tokens of a text are read: `max_length`, or a limit of the folder or positions."""
    position = model.config.embedding.position
    bound = position.longest if isinstance(position, Learned | Axial) else None
    if max_length is not None:
        if max_length < 1:
            raise InputError(f"max_length must be at least 1, got {max_length}")
        if bound is not None and max_length > bound:
            raise InputError(
                f"max_length={max_length} exceeds the model's {bound} positions",
                f"use at most {bound}",
            )
        return max_length
    # Rotary and relative positions have no end, but a length the model was trained with.
    settings = model.sentence or model.late
    trained = (model.source_config or {}).get("max_position_embeddings")
    limits = ((settings.max_length if settings else None) or trained, bound)
    return min((limit for limit in limits if limit is not None), default=None)


def first_texts(tokenizer: Any, texts: list[Any], tokens: int) -> tuple[list[Any], list[Any]]:
    """The first texts up to a number of tokens, and the rest.

    A text may be split between both; the pairs of an encoder-decoder are not.
    """
    for index, text in enumerate(texts):
        parts = text if isinstance(text, tuple) else (text,)
        encodings = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
        count = sum(map(len, encodings))
        if count >= tokens:
            rest = texts[index + 1 :]
            if count == tokens or isinstance(text, tuple):
                return texts[: index + 1], rest
            end = encodings[0].offsets[tokens - 1][1]
            return [*texts[:index], text[:end]], [*filter(str.strip, [text[end:]]), *rest]
        tokens -= count
    return texts, []


def fit_texts(model: build.Model, texts: list[Any], max_length: int | None = None) -> list[Any]:
    """The texts, those in pieces that are longer than the model reads; pairs stay as they are.

    With `max_length` pieces have at most so many tokens.
    """
    limit = resolve_max_length(require_text_model(model), max_length)
    if limit is None or model.tokenizer is None:
        return texts
    size = max(1, limit - model.tokenizer.num_special_tokens_to_add(is_pair=False))
    pieces: list[Any] = []
    for text in texts:
        if not isinstance(text, str) or len(text.encode(errors="replace")) <= size:
            pieces.append(text)
            continue
        offsets = model.tokenizer.encode(text, add_special_tokens=False).offsets
        starts = [0, *(offsets[token][0] for token in range(size, len(offsets), size)), len(text)]
        pieces += filter(str.strip, (text[start:end] for start, end in pairwise(starts)))
    return pieces


def truncating_tokenizer(model: TextReader, max_length: int | None) -> Any:
    """The model's tokenizer with truncation to `max_length` tokens and without padding."""
    original = model.tokenizer
    if original is None:
        raise InputError(
            "this model has no tokenizer",
            "load it from a folder with tokenizer.json, set model.tokenizer, or give token ids",
        )
    cached = _COPIES.get(model)
    if cached is None or cached[0] is not original:
        cached = _COPIES[model] = original, {}
    copies = cached[1]
    if max_length not in copies:
        # Queries and documents have lengths of their own; nobody alternates between many.
        if len(copies) >= COPIES_PER_MODEL:
            del copies[next(iter(copies))]
        copies[max_length] = truncating_copy(original, max_length)
    return copies[max_length]


def _as_ids(text: Any, index: int) -> Ids:
    try:
        ids = np.asarray(text)
    except (TypeError, ValueError):
        ids = np.asarray(0.5)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"text {index} is neither a string nor a list of token ids", "give one")
    return ids.astype(np.int64)


def batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of texts in batches of at most `batch_tokens` tokens, longest texts first.

    A batch has at least one text; texts without tokens are left out.

    >>> list(batch_by_length([2, 5, 0, 3, 9], batch_tokens=8))
    [[4], [1, 3], [0]]
    """
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (tokens + lengths[index] > batch_tokens or not lengths[index]):
            yield batch
            batch, tokens = [], 0
        if not lengths[index]:
            return
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def to_device_batch(sequences: Sequence[Ids], device: torch.device) -> Ragged:
    """One ragged batch, copied to the device without waiting for it."""
    lengths = Lengths.of([len(ids) for ids in sequences])
    lengths = replace(
        lengths,
        offsets=to_device(lengths.offsets, device),
        positions=to_device(lengths.positions, device),
        sequence_of_token=to_device(lengths.sequence_of_token, device),
    )
    return Ragged(to_device(torch.from_numpy(np.concatenate(sequences)), device), lengths)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from pinned memory if it is a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
