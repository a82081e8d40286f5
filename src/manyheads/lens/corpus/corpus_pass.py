"""One pass over a corpus of any size, for every head at once; it can be stopped and go on.

Texts are read in chunks, and longer ones in pieces of `max_length` tokens: passages. What has been
added up is written to a file from time to time, together with a hash of the texts read so far, so
that the same command goes on where it was stopped and notices a corpus that has changed.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.encoding import text_reader
from manyheads.errors import InputError
from manyheads.lens.corpus import pass_files
from manyheads.lens.corpus.corpus_watcher import CorpusSums, CorpusWatcher, ExampleSettings
from manyheads.lens.inputs.texts import (
    Inputs,
    PassSummary,
    announce_long_text,
    default_batch_tokens,
    read_inputs,
)
from manyheads.lens.measure.statistics import (
    Statistics,
    StatisticsTotals,
    check_heads,
    ids_by_stack,
    make_plan,
)
from manyheads.lens.measure.watcher import MeasurementPlan, StatisticsWatcher
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.parts.linear_layout import MIN_TOKENS, column_major_weights
from manyheads.progress import Progress
from manyheads.ragged import Ragged

# Texts that are read and cut into passages together, and their letters or tokens.
TEXTS_PER_CHUNK, CHUNK_LENGTH = 64, 65_536
SECONDS_BETWEEN_SAVES = 30.0
FIRST_TEXTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How a corpus is read. A pass that goes on must have the same."""

    max_length: int | None
    offsets: tuple[int, ...] = ()
    examples: ExampleSettings = ExampleSettings()


@dataclass(slots=True, eq=False)
class CorpusPass:
    """What has been added up so far."""

    totals: StatisticsTotals
    sums: CorpusSums
    # Texts of the corpus, and the passages that they were cut into.
    texts: int = 0
    passages: int = 0
    tokens: int = 0
    # Of the texts so far.
    digest: str = ""
    complete: bool = False
    # The first texts, for what is measured on a few.
    first: list[Any] = field(default_factory=list)
    # The token ids of the passages that examples show, for each stack.
    pool: dict[int, dict[str, Int[np.ndarray, " n"]]] = field(default_factory=dict)

    @classmethod
    def begin(cls, settings: PassSettings) -> "CorpusPass":
        return cls(StatisticsTotals(), CorpusSums(settings.examples))

    def statistics(self, model: build.Model, plan: MeasurementPlan) -> Statistics:
        summary = PassSummary(self.passages, self.tokens, self.complete)
        return self.totals.result(model, plan, summary)

    def forget_unused(self) -> None:
        """Keep only passages that some example shows."""
        books = [sums.book for sums in self.sums.blocks.values()]
        used = {text for book in books for examples in book.stored for text in examples}
        self.pool = {text: ids for text, ids in self.pool.items() if text in used}


def read_corpus(
    model: build.Model,
    texts: Inputs,
    settings: PassSettings,
    *,
    state: Path | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> tuple[CorpusPass, Statistics]:
    """Read all texts; with `state`, go on from that file and write it now and then.

    Ctrl-C ends the pass and keeps what has been read.
    """
    check_heads(model)
    plan = make_plan(model, offsets=settings.offsets)
    done = CorpusPass.begin(settings)
    if state is not None and state.is_file():
        done = pass_files.restore_pass(state, model, settings)
    reader = _ChunkReader(model, plan, done, settings, batch_tokens)
    total = len(texts) if isinstance(texts, Sized) and not isinstance(texts, str) else None
    with ExitStack() as context:
        bar = context.enter_context(
            Progress("reading the corpus", total=total, unit="texts", enabled=progress)
        )
        context.enter_context(build.eval_mode(model))
        context.enter_context(column_major_weights(model, MIN_TOKENS))
        chunks = _chunks(texts, done, state)
        bar.advance(done.texts)
        saved = time.monotonic()
        try:
            for chunk, digest in chunks:
                reader.read(chunk, bar)
                done.texts, done.digest = done.texts + len(chunk), digest
                if state is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    pass_files.save_pass(done, state, model, settings)
                    saved = time.monotonic()
            done.complete = True
        except KeyboardInterrupt:
            if not done.passages:
                raise
    if not done.passages:
        raise InputError("there are no texts", "pass at least one")
    done.forget_unused()
    if state is not None and done.complete:
        pass_files.save_pass(done, state, model, settings)
    return done, done.statistics(model, plan)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkReader:
    """Runs chunks of texts through the model."""

    model: build.Model
    plan: MeasurementPlan
    done: CorpusPass
    settings: PassSettings
    batch_tokens: int | None

    def read(self, chunk: list[Any], bar: Progress) -> None:
        inputs = read_inputs(self.model, cut_texts(self.model, chunk, self.settings.max_length))
        sizes, first = inputs.sizes(self.model), self.done.passages
        announce_long_text(bar, sizes, first)
        limit = default_batch_tokens(self.model) if self.batch_tokens is None else self.batch_tokens
        for batch in text_reader.batch_by_length(sizes, 1 if inputs.examples else limit):
            self._run(inputs.select(batch), [first + text for text in batch])
            self.done.tokens += sum(sizes[text] for text in batch)
            bar.advance(len(chunk) * len(batch) / len(inputs))
        self.done.passages += len(inputs)
        self.done.forget_unused()

    def _run(self, inputs: ModelInputs, numbers: list[int]) -> None:
        ids = ids_by_stack(self.model, inputs)
        corpus = CorpusWatcher(self.done.sums, ids, numbers)
        measuring = StatisticsWatcher(self.plan, ids, numbers, sum_attention=corpus.sum_attention)
        with torch.inference_mode():
            self.model.run_hidden(inputs, measuring)
        self.done.totals.add(measuring)
        for place, number in enumerate(numbers):
            self.done.pool[number] = {
                stack: batch.to_list()[place].cpu().numpy() for stack, batch in ids.items()
            }


def cut_texts(model: build.Model, texts: list[Any], max_length: int | None) -> list[Any]:
    """The texts, long ones in passages; pairs and images stay as they are."""
    if model.reads_images or model.reads_pairs or max_length is None:
        return texts
    if all(isinstance(text, str) for text in texts):
        return text_reader.fit_texts(model, texts, max_length)
    if any(isinstance(text, str | Mapping) for text in texts):
        return texts
    return [
        text[start : start + max_length]
        for text in texts
        for start in range(0, len(text), max_length)
    ]


def _chunks(texts: Any, done: CorpusPass, state: Path | None) -> Iterator[tuple[list[Any], str]]:
    """Chunks of texts that were not read yet, each with the hash of all texts up to its end."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Ragged):
        texts = texts.to("cpu").to_list()
    if isinstance(texts, ModelInputs | Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"an atlas reads a corpus of texts, got a {type(texts).__name__}", "pass a list"
        )
    rest, digest = iter(texts), sha256()
    for number, text in enumerate(islice(rest, done.texts), 1):
        done.first += [text] if len(done.first) < FIRST_TEXTS else []
        digest.update(_bytes(text))
        if number == done.texts and digest.hexdigest() != done.digest:
            raise InputError(
                f"the texts differ from those that {state} was made of", "delete it to start anew"
            )
    while chunk := _take(rest):
        done.first += chunk[: FIRST_TEXTS - len(done.first)]
        for text in chunk:
            digest.update(_bytes(text))
        yield chunk, digest.hexdigest()


def _take(texts: Iterator[Any]) -> list[Any]:
    """The next texts, few of them where they are long."""
    chunk: list[Any] = []
    length = 0
    for text in islice(texts, TEXTS_PER_CHUNK):
        chunk.append(text)
        length += len(text) if isinstance(text, Sized) else 1
        if length >= CHUNK_LENGTH:
            break
    return chunk


def _bytes(text: Any) -> bytes:
    """What a text is recognized by."""
    if isinstance(text, str):
        return text.encode(errors="surrogatepass") + b"\0"
    if isinstance(text, Tensor):
        return text.cpu().contiguous().numpy().tobytes() + b"\0"
    return repr(text).encode() + b"\0"
