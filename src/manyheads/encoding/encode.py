"""Encode texts as vectors, one per text."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.atomic_write import atomic_write, write_tensors
from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.encoding import text_reader
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.build import Model, eval_mode
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.parts.linear_layout import column_major_weights
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Watcher

# Texts that are sorted by length and encoded together, while the next ones are tokenized.
TEXTS_AT_ONCE = {"cpu": 16384, "cuda": 2048}
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")
# Files that vectors are saved to.
SUFFIXES = (".npy", ".safetensors", ".jsonl")

Device = torch.device | str
# From the hidden states of a batch to one vector per text.
Pooled = Callable[[Ragged], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(text_reader.ReadOptions):
    """How texts are encoded; None means as the model's folder says, or by device."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    device: Device = "cpu"

    def __post_init__(self) -> None:
        text_reader.ReadOptions.__post_init__(self)
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InputError(f"pooling must be {', '.join(POOLINGS)}, got {self.pooling!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The vectors, the number of tokens, and how many texts were truncated to `max_length`."""

    vectors: Float[Tensor, "b c"]
    tokens: int
    truncated: int
    max_length: int | None

    @property
    def truncation(self) -> str:
        """A sentence about how many texts were truncated."""
        return text_reader.truncation_message(self.truncated, len(self.vectors), self.max_length)


def encode(
    model: Model,
    texts: text_reader.Texts,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    device: Device = "cpu",
    progress: bool = True,
) -> Float[Tensor, "b c"]:
    """One vector per text, in the order of the texts; a single string is a list of one.

    `pooling` takes the mean of a text's tokens, the first ("cls") or the last. It and `normalize`
    are by default those of the model's folder, else "mean" and False. Dense modules of a folder of
    sentence-transformers are applied in between. Texts of more than
    `max_length` tokens are truncated, their special tokens kept, and a `TruncationWarning` counts
    them. Texts may also be token ids, in lists or a `Ragged`, which are used as they are. A text
    without any token gives zeros, and an encoder-decoder uses its encoder. The vectors are returned
    on `device`. Texts in another order, in other company or alone give the same vectors up to
    rounding, in float32 within 1e-5 of the largest number.

    >>> from manyheads.models.build import build
    >>> encode(build("tiny-encoder", seed=0), [[5, 6, 7], [8]]).shape
    torch.Size([2, 128])
    """
    options = Options(
        pooling=pooling,
        normalize=normalize,
        batch_tokens=batch_tokens,
        max_length=max_length,
        device=device,
        progress=progress,
    )
    encoded = encode_with_counts(model, texts, options)
    if encoded.truncated:
        warnings.warn(encoded.truncation, TruncationWarning, stacklevel=2)
    return encoded.vectors


def encode_with_counts(model: Model, texts: text_reader.Texts, options: Options) -> Encoded:
    """`encode` with counts and without a warning."""
    model = text_reader.require_text_model(model)
    sentence = model.sentence or SentenceConfig()
    pooled = partial(
        pool,
        pooling=options.pooling or sentence.pooling,
        normalize=sentence.normalize if options.normalize is None else options.normalize,
        project=sentence.project,
    )
    width = sentence.width(text_stack(model).config.width)
    return read_pooled(model, texts, options, pooled, width)


def read_pooled(
    model: Model, texts: text_reader.Texts, options: Options, pooled: Pooled, width: int
) -> Encoded:
    """A vector of `width` numbers per text, which `pooled` computes; zeros without tokens."""
    model = text_reader.require_text_model(model)
    stack, home, dtype = text_stack(model), home_of(model), vector_dtype(model)
    max_length = text_reader.resolve_max_length(model, options.max_length)
    reader = text_reader.open_reader(model, texts, max_length)
    batch_tokens = options.tokens_per_batch(home)
    vectors = [torch.zeros(0, width, dtype=dtype, device=options.device)]
    tokens = truncated = texts_read = 0
    with Progress(options.doing, unit="tokens", enabled=options.progress) as bar, eval_mode(model):
        for ids, truncated_now in read_ahead(reader):
            lengths = [len(text) for text in ids]
            tokens += sum(lengths)
            truncated += truncated_now
            texts_read += len(ids)
            bar.expect(tokens * len(reader) / texts_read)
            # Texts of all lengths are encoded on the model's device, without waiting for it.
            with column_major_weights(stack, sum(lengths)), torch.inference_mode():
                order = [index for index, length in enumerate(lengths) if not length]
                parts = [torch.zeros(len(order), width, dtype=dtype, device=home)]
                for indices in text_reader.batch_by_length(lengths, batch_tokens):
                    batch = text_reader.to_device_batch([ids[index] for index in indices], home)
                    parts.append(pooled(last_states(model, stack, batch)))
                    order += indices
                    bar.advance(batch.values.shape[0])
                restored = text_reader.to_device(torch.tensor(order).argsort(), home)
                vectors.append(torch.cat(parts)[restored].to(options.device, non_blocking=True))
    if home.type == "cuda":
        torch.cuda.synchronize(home)
    return Encoded(torch.cat(vectors), tokens, truncated, max_length)


def read_ahead(reader: text_reader.Reader) -> Iterator[tuple[list[text_reader.Ids], int]]:
    """Texts as ids, some at a time; the next are tokenized while the caller uses these."""
    step = TEXTS_AT_ONCE["cpu" if home_of(reader.model).type == "cpu" else "cuda"]
    starts = range(0, len(reader), step)
    parts = [range(start, min(start + step, len(reader))) for start in starts]
    if len(parts) < 2:
        yield from map(reader.read, parts)
        return
    with ThreadPoolExecutor(max_workers=1) as executor:
        pending = executor.submit(reader.read, parts[0])
        for part in [*parts[1:], None]:
            ready = pending.result()
            if part is not None:
                pending = executor.submit(reader.read, part)
            yield ready


def text_stack(model: text_reader.TextReader) -> Stack:
    """The layers that read texts: those of the encoder, if the model has one and a decoder."""
    return model.encoder if isinstance(model, Seq2Seq) else model.stack


def last_states(
    model: text_reader.TextReader, stack: Stack, batch: Ragged, watch: Watcher | None = None
) -> Ragged:
    """The hidden state of each token behind the last layer of the stack."""
    if not isinstance(model, WrappedModel):
        x = model.embedding.embed(batch, batch.lengths.positions)
        states: Ragged = stack(x, watch=watch)[0]
        return states
    facts = model.main_stack.facts
    if isinstance(model, Seq2Seq) or (model.readout is not None and facts.final_norm is None):
        # What enters the readout is not what the layers end with.
        raise InputError(
            f"the last states of a wrapped {type(model.inner).__name__} are not found",
            "wrap its base model, such as AutoModel gives",
        )
    hidden: Ragged = model.hidden(batch, watch=watch)[0]
    return hidden


def vector_dtype(model: text_reader.TextReader) -> torch.dtype:
    """The dtype of vectors: that of the model, but at least float32."""
    return torch.promote_types(_any_tensor(model).dtype, torch.float32)


def home_of(model: text_reader.TextReader) -> torch.device:
    """The device of the model."""
    return _any_tensor(model).device


def _any_tensor(model: text_reader.TextReader) -> Tensor:
    # Not the embedding: one of integers would be unpacked for it.
    return next(chain(model.parameters(), model.buffers()))


def store(vectors: Float[Tensor, "b c"], texts: Sequence[str], target: Path) -> None:
    """Save vectors: rows of .npy, the tensor "vectors" of .safetensors, or lines of .jsonl."""
    check_target(target)
    vectors = vectors.detach().cpu()
    with atomic_write(target) as temporary:
        if target.suffix == ".safetensors":
            write_tensors({"vectors": vectors.contiguous()}, temporary)
        elif target.suffix == ".npy":
            with temporary.open("wb") as file:
                np.save(file, vectors.numpy())
        else:
            with temporary.open("w", encoding="utf-8") as lines:
                for text, vector in zip(texts, vectors, strict=True):
                    row = {"text": text, "vector": vector.tolist()}
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def check_target(target: Path) -> None:
    """Refuse, before any work, a file that could not be written."""
    if target.suffix not in SUFFIXES:
        raise InputError(f"{target} has no known suffix", f"use {', '.join(SUFFIXES)}")
    check_file(target)


def check_file(target: Path) -> None:
    """The same, for a file with any suffix."""
    if target.is_dir():
        raise InputError(f"{target} is a folder", "name a file in it")
    if not target.absolute().parent.is_dir():
        raise InputError(f"there is no folder {target.parent}", "create it, or name another")


def pool(
    hidden: Ragged,
    pooling: Pooling,
    normalize: bool,
    project: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "b c"]:
    """One vector per sequence, at least in float32: the mean of its tokens, the first or last."""
    values, lengths = hidden.values, hidden.lengths
    wide = torch.promote_types(values.dtype, torch.float32)
    match pooling:
        case "mean":
            summed = torch.zeros(
                lengths.count, values.shape[1], dtype=wide, device=values.device
            ).index_add_(0, lengths.sequence_of_token, values.to(wide))
            vectors = summed / lengths.offsets.diff().unsqueeze(1)
        case "cls":
            vectors = values[lengths.offsets[:-1].long()].to(wide)
        case "last":
            vectors = values[lengths.offsets[1:].long() - 1].to(wide)
    vectors = vectors if project is None else project(vectors)
    return F.normalize(vectors, dim=-1) if normalize else vectors
