"""`generate` continues prompts, all in one batch; `stream` yields one text as it is generated."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack, overload

from manyheads.decoding import generation_config
from manyheads.decoding.beam_search import BeamSearchLoop
from manyheads.decoding.guard import Guard, GuardInput, GuardRun
from manyheads.decoding.request import GenerationRequest, Prompts, tokenizer_of
from manyheads.decoding.sampling import BeamSearch
from manyheads.decoding.stopping import StreamDecoder
from manyheads.decoding.token_source import source_for
from manyheads.errors import ConfigError
from manyheads.models.build import Model
from manyheads.progress import Progress


@overload
def generate(
    model: Model,
    prompts: str,
    config: generation_config.GenerationConfig | None = None,
    *,
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Unpack[generation_config.GenerationOptions],
) -> generation_config.Generation: ...
@overload
def generate(
    model: Model,
    prompts: Prompts,
    config: generation_config.GenerationConfig | None = None,
    *,
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Unpack[generation_config.GenerationOptions],
) -> list[generation_config.Generation]: ...


@generation_config.show_options
def generate(
    model: Model,
    prompts: str | Prompts,
    config: generation_config.GenerationConfig | None = None,
    *,
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Unpack[generation_config.GenerationOptions],
) -> generation_config.Generation | list[generation_config.Generation]:
    """Continue prompts, or answer them if the model is a `Seq2Seq`.

    A string gives one `Generation`. A list of strings, a list of lists or tensors of ids, a
    (batch, length) tensor or a `Ragged` gives a list, in order. Prompts of all lengths run together
    without padding, and a finished text leaves the batch.

    The options are the fields of `GenerationConfig`, which says what each of them means; they
    override those of `config`. Sampling parameters in the model's generation_config.json are not
    used. `on_progress` receives the number of tokens generated so far and the most there can be.
    On CUDA a step, with the choice of its tokens, is recorded once and replayed.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> [generation] = generate(model, [[5, 6, 7]], max_new_tokens=4)
    >>> len(generation.ids), generation.finish_reason
    (4, 'length')
    """
    config = generation_config.with_options(config, options)
    request = GenerationRequest(model, [prompts] if isinstance(prompts, str) else prompts, config)
    if config.guard is not None:
        tokenizer_of(request.model, "a guard")
    loop: BeamSearchLoop | SamplingLoop
    # With nothing to generate there is nothing to search.
    if config.uses_beams and config.max_new_tokens:
        assert isinstance(config.sampling, BeamSearch)
        loop = BeamSearchLoop(request, config.sampling)
    else:
        decode_each_step = bool(request.stop_strings) or config.guard is not None
        loop = SamplingLoop(request, decode_each_step=decode_each_step)
    total = len(request.prompts) * config.max_new_tokens
    started = time.perf_counter()
    with Progress("generating", total=total, unit="tokens", enabled=progress) as bar:
        for _ in loop.run():
            total = loop.tokens_done + loop.tokens_left
            bar.expect(total)
            bar.advance(loop.tokens_done - bar.done)
            if on_progress is not None:
                on_progress(loop.tokens_done, total)
    generations = loop.generations()
    if isinstance(config.guard, Guard) and isinstance(loop, BeamSearchLoop):
        generations = _guard_all(config.guard, generations, time.perf_counter() - started)
    return generations[0] if isinstance(prompts, str) else generations


@generation_config.show_options
def stream(
    model: Model,
    prompt: str | Sequence[int],
    config: generation_config.GenerationConfig | None = None,
    **options: Unpack[generation_config.GenerationOptions],
) -> Generator[str, None, generation_config.Generation]:
    """The text that `generate` would return, in pieces as it is generated.

    A piece holds complete characters and no part of a stop string; joined, the pieces are the text.
    The generator returns the whole `Generation`, as in `generation = yield from stream(...)`.
    """
    config = generation_config.with_options(config, options)
    if config.uses_beams:
        raise ConfigError(
            "BeamSearch cannot be streamed, because its text may change until the end",
            "use generate, or sampling=Greedy()",
        )
    request = GenerationRequest(model, [prompt], config)
    tokenizer_of(model, "stream")
    return _pieces(SamplingLoop(request, decode_each_step=True, immediate=True))


def _pieces(loop: "SamplingLoop") -> Generator[str, None, generation_config.Generation]:
    [sequence] = loop.sequences
    for _ in loop.run():
        yield from filter(None, loop.new_pieces(sequence))
    yield from filter(None, loop.new_pieces(sequence))
    return loop.generations()[0]


def _guard_all(
    guard: Guard, generations: list[generation_config.Generation], seconds: float
) -> list[generation_config.Generation]:
    """Whole texts, read by the guard in the end."""
    run = GuardRun(guard, len(generations))
    refused = run.check(
        GuardInput(index, [str(generation)], complete=True)
        for index, generation in enumerate(generations)
    )
    return [
        replace(
            generation,
            text=run.released(index),
            finish_reason="guard" if index in refused else generation.finish_reason,
            guard=run.report(index, seconds + run.seconds),
        )
        for index, generation in enumerate(generations)
    ]


@dataclass(slots=True)
class SequenceState:
    """One text as far as it is generated."""

    index: int
    decoder: StreamDecoder | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: generation_config.FinishReason | None = None
    # Pieces that a stream has yielded, or characters where a guard releases them.
    yielded: int = 0


class SamplingLoop:
    """One token per step for every running text; finished texts leave the batch.

    With `decode_each_step` the new tokens are decoded after every step, which streams and stop
    strings need. If `immediate`, every token is reported at once, not in blocks, for a stream.
    """

    def __init__(
        self, request: GenerationRequest, *, decode_each_step: bool, immediate: bool = False
    ) -> None:
        self.request = request
        self.decode_each_step = decode_each_step
        self.source = source_for(request, immediate=immediate)
        self.step = 0
        self.sequences = [self._sequence(index) for index in range(len(request.prompts))]
        self.running = list(self.sequences)
        guard = request.config.guard
        self.guard = GuardRun(guard, len(self.sequences)) if isinstance(guard, Guard) else None
        self.seconds = 0.0
        self._eos_token_ids = frozenset(request.eos_token_ids)

    def run(self) -> Iterator[None]:
        """Generate to the end, with a pause after every step."""
        try:
            while self.running and self.step < self.request.config.max_new_tokens:
                started = time.perf_counter()
                with self.request.on_device():
                    self._take_step()
                self.seconds += time.perf_counter() - started
                yield
        finally:
            self.source.close()
        started = time.perf_counter()
        for sequence in self.running:
            sequence.finish_reason = "length"
            self._finish(sequence)
        self._check_sentences()
        self.seconds += time.perf_counter() - started

    def new_pieces(self, sequence: SequenceState) -> list[str]:
        """What can be shown of a text and was not before; a guard holds back sentences."""
        before = sequence.yielded
        if self.guard is None:
            sequence.yielded = len(sequence.pieces)
            return sequence.pieces[before:]
        released = self.guard.released(sequence.index)
        sequence.yielded = len(released)
        return [released[before:]]

    @property
    def tokens_done(self) -> int:
        """Tokens generated so far."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def tokens_left(self) -> int:
        """The most that can follow."""
        return len(self.running) * (self.request.config.max_new_tokens - self.step)

    def _take_step(self) -> None:
        tokens = self.source.next()
        forced = self.request.constraints.forced_at(self.step) is not None
        still_running = []
        for row, (sequence, token) in enumerate(zip(self.running, tokens.ids, strict=True)):
            sequence.ids.append(token)
            if tokens.logprobs is not None:
                sequence.logprobs.append(tokens.logprobs[row])
            if self._goes_on(sequence, token, forced):
                still_running.append(row)
        self.step += 1
        self._check_sentences()
        still_running = [row for row in still_running if not self.running[row].finish_reason]
        if len(still_running) < len(self.running):
            self.running = [self.running[row] for row in still_running]
            self.source.keep(still_running)

    def _goes_on(self, sequence: SequenceState, token: int, forced: bool) -> bool:
        # A token forced by the length limit is not the model's decision to end.
        if token in self._eos_token_ids and not forced:
            sequence.finish_reason = "eos"
            self._finish(sequence)
        elif sequence.decoder is not None:
            sequence.pieces.append(sequence.decoder.push(token))
            if sequence.decoder.stopped:
                sequence.finish_reason = "stop string"
        return sequence.finish_reason is None

    def _check_sentences(self) -> None:
        """Let the guard, if there is one, read what is new, and end the texts that it refuses."""
        if self.guard is None:
            return
        refused = self.guard.check(
            GuardInput(sequence.index, sequence.pieces, complete=sequence.finish_reason is not None)
            for sequence in self.running
        )
        for sequence in self.running:
            if sequence.index in refused:
                sequence.finish_reason = "guard"

    def _finish(self, sequence: SequenceState) -> None:
        if sequence.decoder is not None:
            sequence.pieces.append(sequence.decoder.finish())
            if sequence.decoder.stopped:
                sequence.finish_reason = "stop string"

    def _sequence(self, index: int) -> SequenceState:
        request, decoder = self.request, None
        if self.decode_each_step:
            decoder = StreamDecoder(request.tokenizer, request.context(index), request.stop_strings)
        return SequenceState(index, decoder)

    def generations(self) -> list[generation_config.Generation]:
        results = []
        for sequence in self.sequences:
            assert sequence.finish_reason is not None
            guard, logprobs = self.guard, tuple(sequence.logprobs)
            result = generation_config.Generation(
                ids=tuple(sequence.ids),
                text=self._text(sequence),
                finish_reason=sequence.finish_reason,
                logprobs=logprobs if self.request.config.logprobs else None,
                guard=None if guard is None else guard.report(sequence.index, self.seconds),
            )
            results.append(result)
        return results

    def _text(self, sequence: SequenceState) -> str | None:
        if self.guard is not None:
            return self.guard.released(sequence.index)
        if sequence.decoder is not None:
            return "".join(sequence.pieces)
        ids = sequence.ids[:-1] if sequence.finish_reason == "eos" else sequence.ids
        return self.request.text(sequence.index, ids)
