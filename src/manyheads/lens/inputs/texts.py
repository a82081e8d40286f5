"""The inputs of a model (texts, pairs of texts or images), their targets and their batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.encoding import text_reader
from manyheads.errors import InputError, TruncationWarning
from manyheads.lens.results.files import Metadata
from manyheads.models import build, non_finite_weights
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import ClassHead
from manyheads.progress import Progress
from manyheads.ragged import Ragged

if TYPE_CHECKING:
    # Texts as strings or token ids, (source, target) pairs of them for an encoder-decoder, images
    # as tensors, or what a processor of `transformers` returns; read only once from an iterator.
    Inputs = str | Ragged | ModelInputs | Mapping[str, Any] | Iterable[Any]
else:
    # `read_inputs` says what is wrong with each.
    Inputs = Any
# For each text the answers by position; one class each where whole texts or images are classified.
Targets = Sequence[Mapping[int, int]] | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class PackedTargets:
    """The `answers` at some `rows` of the packed batch, each with the number of its text.

    Where whole texts are classified, a row is a text.
    """

    rows: Int[Tensor, " m"]
    answers: Int[Tensor, " m"]
    texts: Int[Tensor, " m"]


def read_inputs(model: build.Model, texts: Inputs, max_length: int | None = None) -> ModelInputs:
    """Tokenize strings, or take ids; (source, target) pairs for a `Seq2Seq`, images for a `Vision`.

    A single string is one text, and an iterator is read to its end. With `max_length` only the
    first tokens of each text are read.
    """
    non_finite_weights.check_finite(model)
    device = next(model.parameters()).device
    if isinstance(texts, ModelInputs):
        return texts if max_length is None else _first_tokens(texts, max_length)
    batch: Any = texts
    if isinstance(texts, str | Iterator):
        batch = [texts] if isinstance(texts, str) else list(texts)
    if isinstance(model, WrappedModel) and (examples := model.read_examples(batch)):
        inputs = ModelInputs(examples=examples, ids=model.ids_of_examples(examples))
        return inputs if max_length is None else _first_tokens(inputs, max_length)
    if not isinstance(batch, Ragged):
        text_reader.check_texts(batch)
    if model.reads_images:
        if not all(isinstance(image, Tensor) for image in batch):
            raise InputError(
                "a Vision model reads images, not texts", "pass (channels, y, x) tensors"
            )
        images = tuple(image.to(device) for image in batch)
        if not images:
            raise InputError("there are no images", "pass at least one")
        inputs = ModelInputs(images=images)
        return inputs if max_length is None else _first_tokens(inputs, max_length)
    reader = text_reader.require_text_model(model)
    if not reader.reads_pairs:
        return ModelInputs(ids=_ids(reader, batch, max_length).to(device))
    sources, targets = _pairs(batch)
    return ModelInputs(
        source=_ids(reader, sources, max_length).to(device),
        ids=_ids(reader, targets, max_length, starts=True).to(device),
    )


def _first_tokens(inputs: ModelInputs, count: int) -> ModelInputs:
    """The first tokens of each text."""
    if inputs.ids is None or inputs.examples:
        raise InputError("max_length is for texts, and these inputs are not", "leave it out")
    if count < 1:
        raise InputError(f"max_length must be at least 1, got {count}", "use 1 or more")
    cut = [
        None if part is None else Ragged.from_list([row[:count] for row in part.to_list()])
        for part in (inputs.ids, inputs.source)
    ]
    return ModelInputs(ids=cut[0], source=cut[1])


def pack_targets(model: build.Model, inputs: ModelInputs, targets: Targets | None) -> PackedTargets:
    """The targets in the packed batch; by default each next token, if the model predicts it."""
    by_text = isinstance(model.config.readout, ClassHead)
    if targets is None:
        if by_text:
            raise InputError("a classifier needs targets", "pass one class per text")
        return _next_token_targets(model, inputs)
    if not by_text and (model.reads_images or model.readout is None):
        raise InputError(
            f"this {type(model).__name__} has no token logits", "use a model with a language head"
        )
    if len(targets) != len(inputs):
        raise InputError(
            f"there are {len(targets)} targets for {len(inputs)} texts", "pass one per text"
        )
    return (_class_targets if by_text else _token_targets)(inputs, targets)


def check_targets(inputs: ModelInputs, targets: Targets | None) -> None:
    """Raise where no text has a target."""
    if targets is None and inputs.ids is not None and inputs.ids.lengths.longest < 2:
        raise InputError("no text has a second token to predict", "pass longer texts")
    if targets is not None and not any(isinstance(target, int) or target for target in targets):
        raise InputError("no text has a target", "pass {position: token id} for at least one")


def batch_ranges(sizes: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Ranges of consecutive texts with at most `batch_tokens` tokens, or of a single text.

    >>> list(batch_ranges([3, 4, 9, 1, 1], batch_tokens=8))
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    start, tokens = 0, 0
    for text, size in enumerate(sizes):
        if text > start and tokens + size > batch_tokens:
            yield range(start, text)
            start, tokens = text, 0
        tokens += size
    if start < len(sizes):
        yield range(start, len(sizes))


def _ids(
    model: text_reader.TextReader,
    texts: text_reader.Texts,
    max_length: int | None,
    *,
    starts: bool = False,
) -> Ragged:
    limit = text_reader.resolve_max_length(model, max_length)
    if max_length is not None and not isinstance(texts, str):
        # Token ids are not cut by the reader, which takes them as they are.
        listed: Any = texts.to_list() if isinstance(texts, Ragged) else texts
        texts = [text if isinstance(text, str) else text[:max_length] for text in listed]
    reader = text_reader.open_reader(model, texts, limit)
    if not len(reader):
        raise InputError("there are no texts", "pass at least one")
    ids, cut = reader.read(range(len(reader)))
    if cut and max_length is None:
        warnings.warn(
            f"{cut} of {len(reader)} texts were longer than {reader.max_length} tokens, "
            "and were cut",
            TruncationWarning,
            stacklevel=2,
        )
    rows = [torch.from_numpy(row) for row in ids]
    if starts and reader.tokenizer is not None:
        key, settings = "decoder_start_token_id", (model.generation, model.source_config or {})
        start = next((table[key] for table in settings if isinstance(table.get(key), int)), None)
        if start is None:
            raise InputError(
                f"this model has no {key}",
                "pass token ids, each target beginning with its start token",
            )
        rows = [torch.cat((torch.tensor([start]), row)) for row in rows]
    for text, row in enumerate(rows):
        if not len(row):
            raise InputError(f"text {text} is empty", "remove it")
    return Ragged.from_list(rows)


def _pairs(texts: Any) -> tuple[Any, Any]:
    if isinstance(texts, tuple) and len(texts) == 2 and isinstance(texts[0], Ragged):
        return texts
    for text, pair in enumerate(texts):
        if isinstance(pair, str) or len(pair) != 2 or isinstance(pair[0], int):
            raise InputError(
                f"text {text} is not a pair", "pass a (source, target) pair for each text"
            )
    sources, targets = zip(*texts, strict=True)
    return sources, targets


def _next_token_targets(model: build.Model, inputs: ModelInputs) -> PackedTargets:
    if not model.predicts_next_token:
        raise InputError(
            f"this {type(model).__name__} does not predict the next token",
            "pass targets: for each text the token ids by position",
        )
    assert inputs.ids is not None
    lengths = inputs.ids.lengths
    ends = lengths.offsets[1:].long() - 1
    has_next = torch.ones(lengths.total, dtype=torch.bool, device=inputs.ids.device)
    has_next[ends] = False
    rows = has_next.nonzero().squeeze(1)
    return PackedTargets(rows, inputs.ids.values[rows + 1], lengths.sequence_of_token[rows])


def _token_targets(inputs: ModelInputs, targets: Targets) -> PackedTargets:
    assert inputs.ids is not None
    packed: list[tuple[int, int, int]] = []
    lengths = inputs.ids.lengths
    for text, answers in enumerate(targets):
        if not isinstance(answers, Mapping):
            raise InputError(f"targets of text {text} are {answers!r}", "pass {position: token id}")
        for position, answer in answers.items():
            if not 0 <= position < lengths.each[text]:
                raise InputError(
                    f"text {text} has no position {position}", f"use 0 to {lengths.each[text] - 1}"
                )
            packed.append((lengths.starts[text] + position, answer, text))
    numbers = torch.tensor(packed, dtype=torch.long, device=inputs.ids.device)
    return PackedTargets(*numbers.reshape(-1, 3).unbind(1))


def _class_targets(inputs: ModelInputs, targets: Targets) -> PackedTargets:
    device = inputs.images[0].device if inputs.ids is None else inputs.ids.device
    rows = torch.arange(len(inputs), device=device)
    for target in targets:
        if isinstance(target, Mapping):
            raise InputError(f"target {target!r} is not a class", "pass one class per text")
    return PackedTargets(rows, torch.tensor(targets, device=device), rows)


BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
# On a CPU a batch of a large model has fewer, so that progress shows and Ctrl-C loses little:
# tokens times parameters stay below this, about a second or two of a core.
CPU_WORK = 2 * 10**10
MIN_BATCH_TOKENS = 64
# Texts that are tokenized and sorted by length together.
TEXTS_PER_CHUNK = 1024
# A text of more tokens than this is announced before it runs.
LONG_TEXT = 8192


@dataclass(frozen=True, slots=True)
class PassSummary:
    """How many texts and tokens (or patches) were read, and whether those were all."""

    texts: int
    tokens: int
    complete: bool

    @property
    def metadata(self) -> Metadata:
        return {"texts": self.texts, "tokens": self.tokens, "complete": self.complete}


def default_batch_tokens(model: build.Model) -> int:
    """The batch size, in tokens, for the device of the model."""
    device = next(model.parameters()).device
    if device.type != "cpu":
        return BATCH_TOKENS["cuda"]
    size = sum(parameter.numel() for parameter in model.parameters())
    return max(MIN_BATCH_TOKENS, min(CPU_WORK // max(size, 1), BATCH_TOKENS["cpu"]))


def large_batch_tokens(model: build.Model) -> int:
    """A larger batch for short texts, whose many small products would cost more than the rest."""
    return min(BATCH_TOKENS["cpu"], 8 * default_batch_tokens(model))


@dataclass(frozen=True, slots=True, eq=False)
class NumberedBatch:
    """The inputs of a batch, the numbers of its texts, and its tokens or patches."""

    inputs: ModelInputs
    numbers: list[int]
    tokens: int


def read_batches(
    model: build.Model,
    texts: Inputs,
    bar: Progress,
    max_length: int | None = None,
    batch_tokens: int | None = None,
) -> Iterator[NumberedBatch]:
    """Batches of texts of similar length; `bar` announces very long texts."""
    limit = default_batch_tokens(model) if batch_tokens is None else batch_tokens
    if limit < 1:
        raise InputError(f"batch_tokens must be at least 1, got {limit}", "use 1 or more")
    _check_texts(texts)
    first = 0
    for chunk in _chunks(texts):
        inputs = read_inputs(model, chunk, max_length)
        sizes = inputs.sizes(model)
        announce_long_text(bar, sizes, first)
        for batch in text_reader.batch_by_length(sizes, 1 if inputs.examples else limit):
            tokens = sum(sizes[text] for text in batch)
            yield NumberedBatch(inputs.select(batch), [first + text for text in batch], tokens)
        first += len(inputs)


def _check_texts(texts: Inputs) -> None:
    if not isinstance(texts, ModelInputs | Ragged | Mapping):
        text_reader.check_texts(texts)


def for_each_batch(
    model: build.Model,
    texts: Inputs,
    visit: Callable[[ModelInputs, list[int]], None],
    *,
    label: str,
    unit: str = "texts",
    max_length: int | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> PassSummary:
    """Call `visit` with each batch and the numbers of its texts.

    Ctrl-C ends the loop early and keeps all finished batches; the first batch raises it again.
    """
    _check_texts(texts)
    total = len(texts) if isinstance(texts, Sized) and not isinstance(texts, str) else None
    done = tokens = 0
    with Progress(label, total=total, unit=unit, enabled=progress) as bar, build.eval_mode(model):
        try:
            for batch in read_batches(model, texts, bar, max_length, batch_tokens):
                visit(batch.inputs, batch.numbers)
                done += len(batch.numbers)
                tokens += batch.tokens
                bar.advance(len(batch.numbers))
        except KeyboardInterrupt:
            if not done:
                raise
            return PassSummary(done, tokens, complete=False)
    if done == 0:
        raise InputError("there are no texts", "pass at least one")
    return PassSummary(done, tokens, complete=True)


def announce_long_text(bar: Progress, sizes: Sequence[int], first: int = 0) -> None:
    """Say that a single text is so long that it takes a while."""
    longest = max(sizes, default=0)
    if longest > LONG_TEXT:
        bar.announce(f"text {first + sizes.index(longest)} has {longest:,} tokens")


def _chunks(texts: Any) -> Iterator[Any]:
    """Texts in chunks; a batch that is a single object is one chunk."""
    if isinstance(texts, str):
        yield [texts]
    elif isinstance(texts, ModelInputs | Ragged | Tensor) or (
        isinstance(texts, tuple) and texts and isinstance(texts[0], Ragged)
    ):
        yield texts
    else:
        rest = iter(texts)
        while chunk := list(islice(rest, TEXTS_PER_CHUNK)):
            yield chunk
