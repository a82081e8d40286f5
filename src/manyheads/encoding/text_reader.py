"""Texts as token ids, truncated to what the model can read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.models.seq2seq import Seq2Seq
from manyheads.parts.positions import Axial, Learned
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizers import surrogates_refused, truncating_copy

Ids = NDArray[np.int64]
# Strings, or the token ids of each text as a list, an array or a tensor.
Texts = str | Sequence[Any] | Ragged
TextReader = Encoder | Decoder | Seq2Seq

# Truncating copies of tokenizers, by model and length: copying one takes a while.
COPIES_PER_MODEL = 4
_COPIES: "WeakKeyDictionary[nn.Module, tuple[Any, dict[int | None, Any]]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Reads texts as token ids, some at a time; without a tokenizer they are ids already."""

    texts: Sequence[Any]
    tokenizer: Any
    vocabulary: int
    longest: int | None
    model: TextReader

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, indices: range) -> tuple[list[Ids], int]:
        """The ids of some texts, and how many of them were truncated."""
        texts = self.texts[indices.start : indices.stop]
        if self.tokenizer is None:
            ids, cut = [_as_ids(text, index) for text, index in zip(texts, indices, strict=True)], 0
        else:
            encoded = _tokenize(self.tokenizer, texts, indices)
            ids = [np.array(one.ids, dtype=np.int64) for one in encoded]
            cut = sum(bool(one.overflowing) for one in encoded)
        for each, index in zip(ids, indices, strict=True):
            self._check(each, index)
        if ids:
            length, index = max(
                (len(each), -index) for each, index in zip(ids, indices, strict=True)
            )
            self.model.warn_if_longer(length, f"text {-index}")
        return ids, cut

    def _check(self, ids: Ids, index: int) -> None:
        if self.longest is not None and len(ids) > self.longest:
            raise InputError(
                f"text {index} has {len(ids)} token ids, and the model reads {self.longest}",
                "truncate it, because token ids are used as they are",
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            worst = ids.min() if ids.min() < 0 else ids.max()
            raise InputError(
                f"text {index} has token id {worst}, outside vocabulary={self.vocabulary}",
                f"use ids of 0 to {self.vocabulary - 1}",
            )


def require_text_model(model: Model) -> TextReader:
    """The model, if it reads texts."""
    if isinstance(model, TextReader):
        return model
    raise InputError(
        f"a {type(model).__name__} does not read texts",
        "give it images (--image at the command line), or use an Encoder, Decoder or Seq2Seq",
    )


def check_texts(texts: object) -> None:
    """Refuse what is not a sequence of texts or images."""
    single = isinstance(texts, Tensor | np.ndarray) and not texts.ndim
    if single or isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"texts must be strings or lists of token ids, got a {type(texts).__name__}",
            "give a string, or a list with one item per text",
        )


def open_reader(model: TextReader, texts: Texts, longest: int | None) -> Reader:
    """A reader of strings, or of token ids."""
    vocabulary = model.config.embedding.vocabulary
    if isinstance(texts, Ragged):
        if texts.values.is_floating_point() or texts.values.dim() != 1:
            raise InputError("the Ragged holds no token ids", "give one integer per token")
        return Reader(texts.to("cpu").to_list(), None, vocabulary, longest, model)
    check_texts(texts)
    listed = [texts] if isinstance(texts, str) else list(texts)
    strings = [isinstance(text, str) for text in listed]
    if not any(strings) and listed:
        return Reader(listed, None, vocabulary, longest, model)
    if not all(strings):
        index = strings.index(False)
        raise InputError(
            f"text {index} is a {type(listed[index]).__name__}, and others are strings",
            "give only strings, or only token ids",
        )
    return Reader(
        listed, truncating_tokenizer(model, longest) if listed else None, vocabulary, longest, model
    )


def resolve_max_length(model: TextReader, longest: int | None) -> int | None:
    """How many tokens of a text are read: `longest`, or as the model's folder or positions say."""
    position = model.config.embedding.position
    bound = position.longest if isinstance(position, Learned | Axial) else None
    if longest is not None:
        if longest < 1:
            raise InputError(f"longest must be at least 1, got {longest}")
        if bound is not None and longest > bound:
            raise InputError(
                f"longest={longest} exceeds the model's {bound} positions", f"use at most {bound}"
            )
        return longest
    # Rotary and relative positions have no end, but a length the model was trained with.
    settings = model.sentence or model.late
    sentence = settings.longest if settings else None
    trained = (model.source_config or {}).get("max_position_embeddings")
    return min((each for each in (sentence or trained, bound) if each is not None), default=None)


def truncating_tokenizer(model: TextReader, longest: int | None) -> Any:
    """The model's tokenizer with truncation to `longest` tokens and without padding."""
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
    if longest not in copies:
        # Queries and documents have lengths of their own; nobody alternates between many.
        if len(copies) >= COPIES_PER_MODEL:
            del copies[next(iter(copies))]
        copies[longest] = truncating_copy(original, longest)
    return copies[longest]


def _tokenize(tokenizer: Any, texts: Sequence[str], indices: range) -> Sequence[Any]:
    with surrogates_refused(texts, first=indices.start):
        return tokenizer.encode_batch_fast(texts)


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
    lengths = Lengths.of([len(each) for each in sequences])
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
