"""Texts to vectors, one a text, in the order of the texts."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.atomic_write import atomic_write, write_tensors
from manyheads.encoding.text_reader import (
    Ids,
    Reader,
    TextReader,
    Texts,
    batch_by_length,
    open_reader,
    require_text_model,
    resolve_max_length,
    to_device,
    to_device_batch,
)
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.build import Model, eval_mode
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.parts.linear_layout import column_major_weights
from manyheads.progress import Progress
from manyheads.ragged import Ragged

# Tokens a batch. On the CPU enough to keep matrix products busy and little enough for its caches.
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
# Texts that are tokenised, sorted by length and encoded together, while the next are tokenised.
TEXTS_AT_ONCE = {"cpu": 16384, "cuda": 2048}


Device = torch.device | str
# What becomes of the hidden states of a batch: numbers of each text.
Pooled = Callable[[Ragged], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How texts are encoded; None leaves it to the model, or to its device."""

    pooling: Pooling | None = None
    normalise: bool | None = None
    batch_tokens: int | None = None
    longest: int | None = None
    device: Device = "cpu"
    progress: bool = True
    doing: str = "encoding"

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InputError(f"pooling={self.pooling!r} is unknown", f"use {', '.join(POOLINGS)}")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise InputError(f"batch_tokens={self.batch_tokens} holds no token", "use 1 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Vectors, and what they were made of: tokens in all, texts cut and where."""

    vectors: Float[Tensor, "b c"]
    tokens: int
    cut: int
    longest: int | None

    @property
    def told(self) -> str:
        """How many texts were cut, in words."""
        return f"{self.cut:,} of {len(self.vectors):,} texts were cut at {self.longest:,} tokens"


def encode(
    model: Model,
    texts: Texts,
    *,
    pooling: Pooling | None = None,
    normalise: bool | None = None,
    batch_tokens: int | None = None,
    longest: int | None = None,
    device: Device = "cpu",
    progress: bool = True,
) -> Float[Tensor, "b c"]:
    """One vector a text, in the order of the texts; a string alone is a list of one.

    `pooling` takes the mean of a text's tokens, the first ("cls") or the last. It and `normalise`
    follow the folder the model came from, or else are "mean" and False. Texts of more than
    `longest` tokens are truncated, their special tokens kept, and a `TruncationWarning` counts
    them. Texts may also be token ids, in lists or a `Ragged`, which are used as they are. A text
    without any token gives zeros, and an encoder-decoder uses its encoder. The vectors are returned
    on `device`.

    >>> from manyheads.models.build import build
    >>> encode(build("council", seed=0), [[5, 6, 7], [8]]).shape
    torch.Size([2, 128])
    """
    options = Options(
        pooling=pooling,
        normalise=normalise,
        batch_tokens=batch_tokens,
        longest=longest,
        device=device,
        progress=progress,
    )
    done = encode_counted(model, texts, options)
    if done.cut:
        warnings.warn(done.told, TruncationWarning, stacklevel=2)
    return done.vectors


def encode_counted(model: Model, texts: Texts, options: Options) -> Encoded:
    """The vectors of `encode` with the counts beside them, and no warning."""
    model = require_text_model(model)
    said = model.sentence or SentenceConfig()
    pooled = partial(
        pool,
        pooling=options.pooling or said.pooling,
        normalise=said.normalise if options.normalise is None else options.normalise,
    )
    return read_pooled(model, texts, options, pooled, _stack(model).config.width)


def read_pooled(
    model: Model, texts: Texts, options: Options, pooled: Pooled, width: int
) -> Encoded:
    """As many numbers a text as `width`, which `pooled` makes of its tokens; of none, zeros."""
    model = require_text_model(model)
    home = model.embedding.tokens.weight.device
    kind = "cpu" if home.type == "cpu" else "cuda"
    longest = resolve_max_length(model, options.longest)
    reader = open_reader(model, texts, longest)
    most = options.batch_tokens or BATCH_TOKENS[kind]
    work = partial(_encode_some, model, most=most, pooled=pooled, width=width)
    vectors = [torch.zeros(0, width, dtype=_wide(model), device=options.device)]
    tokens = cut = seen = 0
    with Progress(options.doing, unit="tokens", enabled=options.progress) as bar, eval_mode(model):
        for ids, cut_here in _ahead(reader, TEXTS_AT_ONCE[kind]):
            tokens, cut, seen = tokens + sum(map(len, ids)), cut + cut_here, seen + len(ids)
            bar.expect(tokens * len(reader) / seen)
            vectors.append(work(ids, bar=bar).to(options.device, non_blocking=True))
    if home.type == "cuda":
        torch.cuda.synchronize(home)
    return Encoded(torch.cat(vectors), tokens, cut, longest)


def _encode_some(
    model: TextReader,
    ids: list[Ids],
    *,
    most: int,
    pooled: Pooled,
    width: int,
    bar: Progress,
) -> Float[Tensor, "b c"]:
    """Texts of all lengths, on the model's device; nothing here waits for it."""
    stack, home = _stack(model), model.embedding.tokens.weight.device
    lengths = [len(each) for each in ids]
    with column_major_weights(stack, sum(lengths)), torch.inference_mode():
        without = [place for place, length in enumerate(lengths) if not length]
        found = [torch.zeros(len(without), width, dtype=_wide(model), device=home)]
        order = without
        for places in batch_by_length(lengths, most):
            batch = to_device_batch([ids[place] for place in places], home)
            read: Ragged = stack(model.embedding.embed(batch, batch.lengths.positions))[0]
            found.append(pooled(read))
            order = order + places
            bar.advance(batch.values.shape[0])
        back = torch.tensor(order).argsort()
        return torch.cat(found)[to_device(back, home)]


def _ahead(reader: Reader, step: int) -> Iterator[tuple[list[Ids], int]]:
    """Texts as ids, some at a time; the next are tokenised while the caller works on these."""
    starts = range(0, len(reader), step)
    parts = [range(start, min(start + step, len(reader))) for start in starts]
    if len(parts) < 2:
        yield from map(reader.read, parts)
        return
    with ThreadPoolExecutor(max_workers=1) as aside:
        waiting = aside.submit(reader.read, parts[0])
        for part in [*parts[1:], None]:
            now = waiting.result()
            if part is not None:
                waiting = aside.submit(reader.read, part)
            yield now


def _stack(model: TextReader) -> Stack:
    return model.encoder if isinstance(model, Seq2Seq) else model.stack


def _wide(model: TextReader) -> torch.dtype:
    return torch.promote_types(model.embedding.tokens.weight.dtype, torch.float32)


def store(vectors: Float[Tensor, "b c"], texts: Sequence[str], target: Path) -> None:
    """The rows of a .npy array, the tensor "vectors" of a .safetensors, a line a text of .jsonl."""
    check_target(target)
    write = partial(WRITERS[target.suffix], vectors.detach().cpu(), texts)
    with atomic_write(target) as beside:
        write(beside)


def check_target(target: Path) -> None:
    """Refuse, before any work is done, a place that could not be written to."""
    if target.suffix not in WRITERS:
        raise InputError(f"{target} does not end as a file of vectors", f"use {', '.join(WRITERS)}")
    check_file(target)


def check_file(target: Path) -> None:
    """The same of a file that may end anyhow."""
    if target.is_dir():
        raise InputError(f"{target} is a folder", "name a file in it")
    if not target.absolute().parent.is_dir():
        raise InputError(f"there is no folder {target.parent}", "make it, or name another")


def _write_npy(vectors: Tensor, texts: Sequence[str], file: Path) -> None:  # noqa: ARG001
    with file.open("wb") as opened:
        np.save(opened, vectors.numpy())


def _write_safetensors(vectors: Tensor, texts: Sequence[str], file: Path) -> None:  # noqa: ARG001
    write_tensors({"vectors": vectors.contiguous()}, file)


def _write_jsonl(vectors: Tensor, texts: Sequence[str], file: Path) -> None:
    with file.open("w", encoding="utf-8") as opened:
        for text, vector in zip(texts, vectors, strict=True):
            row = {"text": text, "vector": vector.tolist()}
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")


WRITERS: dict[str, Callable[[Tensor, Sequence[str], Path], None]] = {
    ".npy": _write_npy,
    ".safetensors": _write_safetensors,
    ".jsonl": _write_jsonl,
}


POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")


def pool(hidden: Ragged, pooling: Pooling, normalise: bool) -> Float[Tensor, "b c"]:
    """One vector a sequence, in float32 at least: the mean of its tokens, the first or the last."""
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
    return F.normalize(vectors, dim=-1) if normalise else vectors
