"""Texts to token ids, cut where the model's positions end."""

from collections.abc import Iterator, Sequence
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
from manyheads.parts.positions import Learned
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizers import truncating_copy

Ids = NDArray[np.int64]
# Strings, or the token ids of each text as a list, an array or a tensor.
Texts = str | Sequence[Any] | Ragged
TextReader = Encoder | Decoder | Seq2Seq

# Tokenizers that neither pad nor cut elsewhere, by model: one takes a while to copy.
_COPIES: "WeakKeyDictionary[nn.Module, tuple[Any, int | None, Any]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Hands out texts as token ids, some at a time; without a tokenizer they are ids already."""

    texts: Sequence[Any]
    tokenizer: Any
    vocabulary: int
    longest: int | None

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, places: range) -> tuple[list[Ids], int]:
        """The ids of some texts, and how many of them were cut."""
        texts = self.texts[places.start : places.stop]
        if self.tokenizer is None:
            ids, cut = [_as_ids(text, place) for text, place in zip(texts, places, strict=True)], 0
        else:
            found = _tokenise(self.tokenizer, texts, places)
            ids = [np.array(one.ids, dtype=np.int64) for one in found]
            cut = sum(bool(one.overflowing) for one in found)
        for each, place in zip(ids, places, strict=True):
            self._check(each, place)
        return ids, cut

    def _check(self, ids: Ids, place: int) -> None:
        if self.longest is not None and len(ids) > self.longest:
            raise InputError(
                f"text {place} has {len(ids)} token ids, more than {self.longest}",
                "cut them, ids are read as they are",
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise InputError(
                f"text {place} has token id {wrong}, outside vocabulary={self.vocabulary}",
                f"use ids of 0 to {self.vocabulary - 1}",
            )


def require_text_model(model: Model) -> TextReader:
    """The model itself, unless it reads something else."""
    if isinstance(model, TextReader):
        return model
    raise InputError(
        f"a {type(model).__name__} reads no texts",
        "show it images, with --image of manyheads report, classify, ablate, prune or compare, or "
        "in Python, where lens and surgery take them; or use an Encoder, a Decoder or a Seq2Seq",
    )


def open_reader(model: TextReader, texts: Texts, longest: int | None) -> Reader:
    """A reader of strings, or of ids that somebody else made."""
    vocabulary = model.config.embedding.vocabulary
    if isinstance(texts, Ragged):
        if texts.values.is_floating_point() or texts.values.dim() != 1:
            raise InputError("this Ragged holds no token ids", "give one integer a token")
        return Reader(texts.to("cpu").to_list(), None, vocabulary, longest)
    listed = [texts] if isinstance(texts, str) else list(texts)
    strings = [isinstance(text, str) for text in listed]
    if not any(strings) and listed:
        return Reader(listed, None, vocabulary, longest)
    if not all(strings):
        place = strings.index(False)
        raise InputError(
            f"text {place} is a {type(listed[place]).__name__} among strings", "give strings alone"
        )
    return Reader(
        listed, truncating_tokenizer(model, longest) if listed else None, vocabulary, longest
    )


def resolve_max_length(model: TextReader, asked: int | None) -> int | None:
    """How many tokens of a text are read: as asked, as the folder says, as positions allow."""
    position = model.config.embedding.position
    bound = position.longest if isinstance(position, Learned) else None
    if asked is not None:
        if asked < 1:
            raise InputError(f"longest={asked} leaves nothing to read", "use 1 or more")
        if bound is not None and asked > bound:
            raise InputError(
                f"longest={asked} exceeds the model's {bound} positions", f"use at most {bound}"
            )
        return asked
    # Models that turn or weigh by distance have no last position, but one they were trained to.
    said = model.sentence.longest if model.sentence else None
    trained = (model.source_config or {}).get("max_position_embeddings")
    return min((each for each in (said or trained, bound) if each is not None), default=None)


def truncating_tokenizer(model: TextReader, longest: int | None) -> Any:
    """The model's tokenizer, which cuts texts there, without the padding its file may ask for."""
    original = model.tokenizer
    if original is None:
        raise InputError(
            "this model has no tokenizer",
            "load it from a folder with tokenizer.json, set model.tokenizer, or give token ids",
        )
    known = _COPIES.get(model)
    if known is not None and known[0] is original and known[1] == longest:
        return known[2]
    copy = truncating_copy(original, longest)
    _COPIES[model] = original, longest, copy
    return copy


def _tokenise(tokenizer: Any, texts: Sequence[str], places: range) -> Sequence[Any]:
    try:
        return tokenizer.encode_batch_fast(texts)
    except TypeError:
        for text, place in zip(texts, places, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"text {place} holds half a character at {error.start}, a lone surrogate",
                    "decode it anew, for example with errors='replace'",
                ) from None
        raise


def _as_ids(text: Any, place: int) -> Ids:
    try:
        ids = np.asarray(text)
    except (TypeError, ValueError):
        ids = np.asarray(0.5)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"text {place} is no string and no list of token ids", "give one of both")
    return ids.astype(np.int64)


def batch_by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of texts, longest first, as many a batch as `most` tokens hold, but at least one.

    Texts without a token are left out.

    >>> list(batch_by_length([2, 5, 0, 3, 9], most=8))
    [[4], [1, 3], [0]]
    """
    batch: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (tokens + lengths[place] > most or not lengths[place]):
            yield batch
            batch, tokens = [], 0
        if not lengths[place]:
            return
        batch.append(place)
        tokens += lengths[place]
    if batch:
        yield batch


def to_device_batch(sequences: Sequence[Ids], device: torch.device) -> Ragged:
    """One ragged batch, copied so that the device need not be waited for."""
    lengths = Lengths.of([len(each) for each in sequences])
    lengths = replace(
        lengths,
        offsets=to_device(lengths.offsets, device),
        positions=to_device(lengths.positions, device),
        sequence_of_token=to_device(lengths.sequence_of_token, device),
    )
    return Ragged(to_device(torch.from_numpy(np.concatenate(sequences)), device), lengths)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from memory that it can read by itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
