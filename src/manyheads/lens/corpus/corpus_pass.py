"""One pass over a corpus of any size, for every head at once; it can be stopped and go on.

Texts are read in chunks, and longer ones in pieces of `max_length` tokens: passages. What has been
added up is written to a file from time to time and when it is interrupted, together with a hash of
the texts read so far, so that the same command goes on where it was stopped and notices a corpus
that has changed.
"""

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.encoding import text_reader
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.lens.corpus import pass_files
from manyheads.lens.corpus.corpus_watcher import CorpusWatcher
from manyheads.lens.corpus.pass_state import CorpusPass, PassSettings
from manyheads.lens.inputs.texts import (
    Inputs,
    announce_long_text,
    default_batch_tokens,
    read_inputs,
)
from manyheads.lens.measure.statistics import (
    Statistics,
    check_heads,
    ids_by_stack,
    make_plan,
)
from manyheads.lens.measure.watcher import MeasurementPlan, StatisticsWatcher
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.parts.linear_layout import MIN_TOKENS, column_major_weights
from manyheads.progress import InterruptHandler, MeasuredStream, Progress, interruptible
from manyheads.ragged import Ragged

# Texts that are read and cut into passages together, and their letters or tokens.
TEXTS_PER_CHUNK, CHUNK_LENGTH = 64, 65_536
SECONDS_BETWEEN_SAVES = 30.0
FIRST_TEXTS = 8
NOTICE = "interrupted: finishing this batch; press Ctrl-C again to stop at once"


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

    Ctrl-C ends the pass after the current batch and keeps what has been read.
    """
    check_heads(model)
    plan = make_plan(model, offsets=settings.offsets)
    done = CorpusPass.begin(settings)
    if state is not None and state.is_file():
        done = pass_files.restore_pass(state, model, settings)
    reader = _ChunkReader(model, plan, done, settings, batch_tokens)
    total = len(texts) if isinstance(texts, Sized) and not isinstance(texts, str) else None
    with ExitStack() as context:
        stop = context.enter_context(InterruptHandler(NOTICE, [signal.SIGINT]))
        bar = context.enter_context(
            Progress("reading the corpus", total=total, unit="texts", enabled=progress)
        )
        context.enter_context(build.eval_mode(model))
        context.enter_context(column_major_weights(model, MIN_TOKENS))
        chunks = _chunks(texts, done, state)
        bar.resume(done.texts)
        saved = time.monotonic()
        while not stop.requested:
            try:
                with interruptible("reading the texts"):
                    chunk = next(chunks, None)
            except KeyboardInterrupt:
                break
            if chunk is None:
                done.complete = True
                break
            if isinstance(texts, MeasuredStream) and (fraction := texts.fraction()):
                bar.expect((done.texts + len(chunk.texts)) / fraction)
            reader.read(chunk, bar, stop)
            if state is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                pass_files.save_pass(done, state, model, settings)
                saved = time.monotonic()
    if not done.passages_read:
        if not done.complete:
            raise KeyboardInterrupt
        raise InputError("there are no texts", "pass at least one")
    done.forget_unused()
    if state is not None:
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

    def read(self, chunk: "_Chunk", bar: Progress, stop: InterruptHandler) -> None:
        """Run the passages of a chunk that were not read yet, up to an interruption."""
        done, texts = self.done, chunk.texts
        inputs = read_inputs(self.model, cut_texts(self.model, texts, self.settings.max_length))
        sizes, first = inputs.sizes(self.model), done.passages
        announce_long_text(bar, sizes, first)
        limit = default_batch_tokens(self.model) if self.batch_tokens is None else self.batch_tokens
        unread = [place for place in range(len(inputs)) if first + place not in done.ahead]
        bar.resume(len(texts) * (1 - len(unread) / len(inputs)))
        lengths = [sizes[place] for place in unread]
        for batch in text_reader.batch_by_length(lengths, 1 if inputs.examples else limit):
            if stop.requested:
                done.ahead_digest = chunk.digest
                return
            places = [unread[index] for index in batch]
            self._run(inputs.select(places), [first + place for place in places])
            done.ahead.update(first + place for place in places)
            done.tokens += sum(sizes[place] for place in places)
            bar.advance(len(texts) * len(batch) / len(inputs))
        done.passages, done.ahead = first + len(inputs), set()
        done.texts, done.digest = done.texts + len(texts), chunk.digest
        done.forget_unused()

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


class _Chunk(NamedTuple):
    """Some texts, and the hash of all texts up to their end."""

    texts: list[Any]
    digest: str


def _chunks(texts: Any, done: CorpusPass, state: Path | None) -> Iterator[_Chunk]:
    """The chunks that were not read to their end."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Ragged):
        texts = texts.to("cpu").to_list()
    if isinstance(texts, ModelInputs | Mapping) or not isinstance(texts, Iterable):
        raise InputError(f"an atlas reads a corpus of texts, got {kind_of(texts)}", "pass a list")
    rest, digest = iter(texts), sha256()
    for text in islice(rest, done.texts):
        done.first += [text] if len(done.first) < FIRST_TEXTS else []
        digest.update(_bytes(text))
    _check_same(state, digest.hexdigest(), done.digest)
    while chunk := _take(rest):
        done.first += chunk[: FIRST_TEXTS - len(done.first)]
        for text in chunk:
            digest.update(_bytes(text))
        _check_same(state, digest.hexdigest(), done.ahead_digest if done.ahead else "")
        yield _Chunk(chunk, digest.hexdigest())


def _check_same(state: Path | None, digest: str, expected: str) -> None:
    if expected and digest != expected:
        raise InputError(
            f"the texts differ from those that {state} was made of", "delete it to start anew"
        )


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
