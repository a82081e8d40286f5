"""The choice of the next token as a part of a recorded step: the host only reads the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decoding import sampling

# Steps whose tokens and random numbers the device holds; the host reads and draws in time.
RING = 64


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What a recorded choice of tokens computes; temperature and the like are numbers it reads."""

    sampled: bool = False
    penalty: float = 1.0
    suppressed: tuple[int, ...] = ()
    logprobs: bool = False


def why_not_recorded(
    method: sampling.Sampling, constraints: sampling.TokenConstraints, device: torch.device
) -> str | None:
    """Why the choice of tokens cannot be a part of a recorded step; None if it can."""
    if isinstance(method, sampling.BeamSearch):
        return "a beam search compares texts on the host"
    if constraints.forced_first is not None or constraints.forced_last is not None:
        return "the first or the last token is forced"
    if device.type == "cuda" and find_spec("triton") is None:
        return "the kernels that choose need triton"
    return None


class ChoiceState:
    """What choosing tokens reads and writes on the device, with room for some sequences.

    `steps` counts the tokens chosen for each row. Those of step s are in row s % RING of `tokens`
    and of `logprobs`; the random numbers of a sequence are in its row of `uniforms`.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.steps = torch.zeros_like(self.ids)
        self.tokens = self.ids.new_zeros(RING, rows)
        self.uniforms = torch.zeros(rows, RING, device=device)
        self.logprobs = torch.zeros(RING, rows, device=device)
        self.settings = torch.zeros(4, device=device)
        self.vocabulary = vocabulary
        self.seen = torch.zeros(0, dtype=torch.bool, device=device)
        self.suppressed: dict[tuple[int, ...], Int[Tensor, " k"]] = {}
        self.choice = TokenChoice()

    def begin(
        self, choice: TokenChoice, method: sampling.Sampling, texts: Sequence[Sequence[int]]
    ) -> None:
        """Prepare the first token after these texts."""
        self.choice = choice
        self.steps.zero_()
        device = self.ids.device
        if isinstance(method, sampling.Sample):
            top_k = min(method.top_k or self.vocabulary, self.vocabulary)
            top_p = 1.0 if method.top_p is None else method.top_p
            settings = (method.temperature, top_p, method.min_p or 0.0, top_k)
            self.settings.copy_(torch.tensor(settings), non_blocking=True)
        if choice.penalty != 1.0:
            if not self.seen.numel():
                self.seen = self.seen.new_zeros(len(self.ids), self.vocabulary)
            penalty = sampling.RepetitionPenalty.of(choice.penalty, texts, self.vocabulary, device)
            self.seen[: len(texts)] = penalty.seen
        if choice.suppressed and choice.suppressed not in self.suppressed:
            index = torch.tensor(choice.suppressed, device=device)
            self.suppressed[choice.suppressed] = index

    def write_uniforms(self, first: int, numbers: Float[Tensor, "b count"]) -> None:
        """The random numbers of the steps from `first` on; a multiple of their count."""
        start = first % RING
        place = self.uniforms[: len(numbers), start : start + numbers.shape[1]]
        place.copy_(numbers, non_blocking=True)

    def by_row(self) -> list[Tensor]:
        """What must follow a sequence to another row."""
        tensors = [self.ids, self.steps, self.uniforms]
        return [*tensors, self.seen] if self.seen.numel() else tensors

    def choose(self, logits: Float[Tensor, "b v"]) -> None:
        """Choose a token for each of the first rows; a CUDA graph can record it."""
        choice, rows, own = self.choice, len(logits), logits
        ids, steps = self.ids[:rows], self.steps[:rows]
        penalty = None
        if choice.penalty != 1.0:
            penalty = sampling.RepetitionPenalty(choice.penalty, self.seen[:rows])
            logits = penalty.apply(logits)
        if choice.suppressed:
            logits = logits.index_fill(1, self.suppressed[choice.suppressed], -torch.inf)
        if logits.is_cuda:
            self._choose_by_triton(logits, ids, steps)
        else:
            self._choose_plainly(logits, ids, steps)
        if penalty is not None:
            penalty.add(ids)
        if choice.logprobs:
            row = torch.arange(rows, device=ids.device)
            self.logprobs[(steps - 1) % RING, row] = sampling.token_logprobs(own, ids)

    def _choose_by_triton(
        self, logits: Float[Tensor, "b v"], ids: Int[Tensor, " b"], steps: Int[Tensor, " b"]
    ) -> None:
        from manyheads.decoding.steps import triton_sampling

        logits = logits.contiguous()
        if self.choice.sampled:
            triton_sampling.choose_by_chance(
                logits, self.settings, self.uniforms, ids, steps, self.tokens
            )
        else:
            triton_sampling.choose_most_likely(logits, ids, steps, self.tokens)

    def _choose_plainly(
        self, logits: Float[Tensor, "b v"], ids: Int[Tensor, " b"], steps: Int[Tensor, " b"]
    ) -> None:
        row = torch.arange(len(ids), device=ids.device)
        if self.choice.sampled:
            temperature, top_p, min_p, top_k = self.settings.tolist()
            sample = sampling.Sample(
                temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p
            )
            uniform = self.uniforms[row, steps % RING]
            ids.copy_(sampling.draw(sample.filter_logits(logits), uniform))
        else:
            ids.copy_(sampling.most_likely(logits))
        self.tokens[steps % RING, row] = ids
        steps += 1
