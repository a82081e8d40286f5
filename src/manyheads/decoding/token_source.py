"""Where the tokens of a batch come from: chosen step by step by the host, or by the device."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decoding.request import GenerationRequest
from manyheads.decoding.sampling import Sample, draw, most_likely, token_logprobs
from manyheads.decoding.steps.cached import Steps, async_tolist
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps
from manyheads.decoding.steps.token_choice import (
    RING,
    ChoiceState,
    TokenChoice,
    why_not_recorded,
)

# Steps that the device takes between two reports to the host. It works on the next ones meanwhile,
# so up to twice as many are in vain when the last text ends.
BLOCK = 4


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A token for every running text, with its log-probability if they are wanted."""

    ids: list[int]
    logprobs: list[float] | None


@runtime_checkable
class TokenSource(Protocol):
    """Tokens for a batch of texts, of which some end before others."""

    def next(self) -> StepTokens:
        """The next token of every running text."""

    def keep(self, rows: list[int]) -> None:
        """Continue with these of the running texts, in this order."""

    def close(self) -> None:
        """There are no more tokens: another batch may take the steps."""


def source_for(request: GenerationRequest, *, immediate: bool = False) -> TokenSource:
    """The fastest source for a request; if `immediate`, every token is reported at once."""
    steps, config = request.steps(), request.config
    if isinstance(steps, CudaGraphSteps) and (
        why_not_recorded(config.sampling, request.constraints, request.device) is None
    ):
        return DeviceTokens(request, steps, block=1 if immediate else BLOCK)
    return HostTokens(request, steps)


class HostTokens:
    """The host chooses every token from the logits of a step."""

    def __init__(self, request: GenerationRequest, steps: Steps) -> None:
        self.request, self.steps = request, steps
        self.penalty = request.repetition_penalty()
        self.randoms = [request.random(index) for index in range(len(request.prompts))]
        self.step = 0
        self._ids: Int[Tensor, " b"] | None = None
        self._next_logits: Float[Tensor, "b v"] | None = None

    @torch.inference_mode()
    def next(self) -> StepTokens:
        logits = self._logits()
        self._ids = ids = self._choose(logits)
        tokens = async_tolist(ids)
        config = self.request.config
        pending = async_tolist(token_logprobs(logits, ids)) if config.logprobs else None
        self.step += 1
        # The GPU begins the next step while the CPU reads the tokens of this one. Where a text
        # turns out to have ended, its part of the next step is discarded.
        if self.request.device.type == "cuda" and self.step < config.max_new_tokens:
            self._next_logits = self.steps.next(ids)
        if self.penalty is not None:
            self.penalty.add(ids)
        logprobs = None if pending is None else pending()
        return StepTokens(tokens(), logprobs)

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        self.randoms = [self.randoms[row] for row in rows]
        if not rows:
            return
        assert self._ids is not None
        index = torch.tensor(rows, device=self._ids.device, dtype=torch.long)
        if self._next_logits is not None:
            self._next_logits = self._next_logits[index]
        self.steps.select(rows)
        self._ids = self._ids[index]
        if self.penalty is not None:
            self.penalty.select(rows)

    def close(self) -> None:
        if isinstance(self.steps, CudaGraphSteps):
            self.steps.user = None

    def _logits(self) -> Float[Tensor, "b v"]:
        if self._next_logits is not None:
            return self._next_logits
        if self._ids is None:
            return self.steps.start(self.request.batch())
        return self.steps.next(self._ids)

    def _choose(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        logits = logits if self.penalty is None else self.penalty.apply(logits)
        logits = self.request.constraints.apply(logits, self.step)
        sampling = self.request.config.sampling
        if not isinstance(sampling, Sample):
            return most_likely(logits)
        uniform = torch.tensor([random.random() for random in self.randoms])
        return draw(sampling.filter_logits(logits), uniform.to(logits.device))


@dataclass(slots=True)
class _TokenBlock:
    """Tokens of some steps on their way to the host, and the row of each text in them."""

    ids: Callable[[], list[Any]]
    logprobs: Callable[[], list[Any]] | None
    rows: dict[int, int]


class DeviceTokens:
    """The device chooses every token and goes on; the host reads the tokens in blocks of steps.

    A text that has ended is computed and ignored until a smaller program can serve those left.
    """

    def __init__(self, request: GenerationRequest, steps: CudaGraphSteps, *, block: int) -> None:
        self.request, self.steps, self.block = request, steps, block
        self.choice = TokenChoice(
            sampled=isinstance(request.config.sampling, Sample),
            penalty=request.config.repetition_penalty,
            suppressed=request.constraints.suppressed,
            logprobs=request.config.logprobs,
        )
        # The running texts, and the row in which each text is computed.
        self.texts = list(range(len(request.prompts)))
        self.rows = {text: text for text in self.texts}
        self.randoms: list[Random] = []
        self.launched = 0
        self.chooser: ChoiceState | None = None
        self._blocks: deque[_TokenBlock] = deque()
        self._steps: deque[tuple[list[int], list[float] | None, dict[int, int]]] = deque()

    @torch.inference_mode()
    def next(self) -> StepTokens:
        if not self._steps:
            while len(self._blocks) < 2 and self.launched < self.request.config.max_new_tokens:
                self._launch()
            block = self._blocks.popleft()
            ids = block.ids()
            logprobs = [None] * len(ids) if block.logprobs is None else block.logprobs()
            self._steps.extend((*pair, block.rows) for pair in zip(ids, logprobs, strict=True))
        step_ids, step_logprobs, rows = self._steps.popleft()
        places = [rows[text] for text in self.texts]
        return StepTokens(
            [step_ids[row] for row in places],
            None if step_logprobs is None else [step_logprobs[row] for row in places],
        )

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        if not rows or not self.steps.fewer_rows(len(rows)):
            return
        self.steps.select([self.rows[text] for text in self.texts])
        self.rows = {text: row for row, text in enumerate(self.texts)}

    def close(self) -> None:
        self.steps.user = None

    def _launch(self) -> None:
        """Let the device choose the tokens up to the next multiple of the block."""
        first, longest = self.launched, self.request.config.max_new_tokens
        last = min(longest, 1 if not first else (first // self.block + 1) * self.block)
        if not first:
            logits = self.steps.start(self.request.batch())
            texts, method = self.request.prompts, self.request.config.sampling
            uniforms = self._uniforms() if self.choice.sampled else None
            self.chooser = self.steps.begin_choosing(logits, self.choice, method, texts, uniforms)
        assert self.chooser is not None
        for step in range(max(first, 1), last):
            if self.choice.sampled and step % (RING // 2) == 0:
                self.chooser.write_uniforms(step, self._uniforms())
            self.steps.advance()
        self.launched = last
        ring = slice(first % RING, (last - 1) % RING + 1)
        self._blocks.append(
            _TokenBlock(
                async_tolist(self.chooser.tokens[ring]),
                async_tolist(self.chooser.logprobs[ring]) if self.choice.logprobs else None,
                self.rows,
            )
        )

    def _uniforms(self) -> Float[Tensor, "b count"]:
        """Random numbers for half a ring, by row; the host draws them from each text's own."""
        if not self.randoms:
            self.randoms = [self.request.random(text) for text in self.texts]
        order = sorted(self.rows, key=self.rows.__getitem__)
        numbers = [_uniforms_of(self.randoms[text], RING // 2) for text in order]
        result = torch.tensor(numbers)
        return result.pin_memory() if self.request.device.type == "cuda" else result


def _uniforms_of(random: Random, count: int) -> Sequence[float]:
    return [random.random() for _ in range(count)]
