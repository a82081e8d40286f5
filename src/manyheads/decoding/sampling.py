"""How the next token is chosen from the logits: constraints, penalties, sampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.annotations import Above, PositiveInt, Probability, Share
from manyheads.argument_checks import check_fields
from manyheads.errors import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """Tokens that are never generated, and those that are forced at the first or last step."""

    max_new_tokens: int
    suppressed: tuple[int, ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None

    def forced_at(self, step: int) -> int | None:
        """The only token allowed at this step, if there is one."""
        if self.forced_last is not None and step == self.max_new_tokens - 1:
            return self.forced_last
        return self.forced_first if step == 0 else None

    def apply(self, logits: Float[Tensor, "b v"], step: int) -> Float[Tensor, "b v"]:
        forced = self.forced_at(step)
        if forced is not None:
            logits = torch.full_like(logits, -torch.inf)
            logits[:, forced] = 0.0
            return logits
        if not self.suppressed:
            return logits
        suppressed = torch.tensor(self.suppressed, device=logits.device)
        return logits.index_fill(1, suppressed, -torch.inf)


class RepetitionPenalty:
    """Tokens that occur in the prompt or the new text become less likely (arXiv 1909.05858)."""

    def __init__(self, penalty: float, seen: Bool[Tensor, "b v"]) -> None:
        self.penalty = penalty
        self.seen = seen

    @classmethod
    def of(
        cls, penalty: float, texts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
    ) -> "RepetitionPenalty":
        """A penalty for the tokens of these texts, one text per sequence of the batch."""
        seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool, device=device)
        for row, text in zip(seen, texts, strict=True):
            row[torch.tensor(text, device=device)] = True
        return cls(penalty, seen)

    def apply(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        lowered = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(self.seen, lowered, logits)

    def add(self, ids: Int[Tensor, " b"]) -> None:
        """Count one new token per sequence as seen."""
        self.seen.scatter_(1, ids.unsqueeze(1), True)

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences, in this order."""
        self.seen = self.seen[torch.tensor(sequences, device=self.seen.device, dtype=torch.long)]


# Tokens as likely as the last of the `top_k` are kept too, up to this many.
MOST_TIES = 256

Temperature = Annotated[float, Above(0, "use Greedy() for the most likely token")]


@dataclass(frozen=True, slots=True)
class Greedy:
    """The most likely token at every step."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A token drawn at random by its probability.

    The logits are divided by `temperature`. Of all tokens the `top_k` most likely are kept, of
    these the smallest set whose probability reaches `top_p` (arXiv 1904.09751), and of these the
    tokens at least `min_p` times as likely as the most likely one (arXiv 2407.01082).

    >>> sample = Sample(temperature=0.7, top_p=0.9)
    >>> sample.filter_logits(torch.tensor([[0.0, 2.0, 1.0]])).isinf().tolist()
    [[True, False, False]]
    """

    temperature: Temperature = 1.0
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    min_p: Probability | None = None

    def filter_logits(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """The logits to draw from, minus infinity for the tokens that are filtered out."""
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            lowest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, tokens = self._sorted_candidates(logits)
            weights = ordered.softmax(dim=-1)
            # A token stays if those before it do not suffice; the first one always does.
            out = weights.cumsum(dim=-1) - weights >= self.top_p
            out[:, 0] = False
            all_out = torch.ones_like(logits, dtype=torch.bool)
            logits = logits.masked_fill(all_out.scatter(1, tokens, out), -torch.inf)
        if self.min_p is not None:
            probabilities = logits.softmax(dim=-1)
            lowest = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(probabilities < lowest, -torch.inf)
        return logits

    def _sorted_candidates(
        self, logits: Float[Tensor, "b v"]
    ) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
        """All tokens that may be left, the most likely first; of equal ones the first."""
        vocabulary = logits.shape[-1]
        if self.top_k is None or self.top_k + MOST_TIES >= vocabulary:
            ordered = logits.sort(dim=-1, descending=True, stable=True)
            return ordered.values, ordered.indices
        tokens = logits.topk(self.top_k + MOST_TIES).indices.sort(dim=-1).values
        ordered = logits.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
        return ordered.values, tokens.gather(1, ordered.indices)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """The most likely text among `num_beams` that are extended side by side.

    The score of a finished text is its log-probability divided by its length to the power of
    `length_penalty`: above 0 favors long texts, below 0 short ones. `early_stopping` is that of
    transformers: False stops when the running beams are unlikely to win, True as soon as
    `num_beams` texts are finished, and "never" when no running beam can win. One beam is `Greedy`.
    """

    num_beams: PositiveInt = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        check_number("length_penalty", self.length_penalty, "finite", math.isfinite)


Sampling = Greedy | Sample | BeamSearch


def draw(logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The token at which the cumulative probability passes a uniform number from 0 to 1.

    One number per sequence decides, so the token depends neither on the rest of the batch nor on
    the device.
    """
    cumulative = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    # From the right: a token of probability zero adds nothing and is never the first to pass.
    ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return ids.clamp(max=logits.shape[1] - 1)


def most_likely(logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
    """The first of the most likely tokens."""
    # In parts where the rows are too few for a GPU; argmax takes three times as long.
    parts = math.gcd(logits.shape[1], 512) if logits.is_cuda and len(logits) < 64 else 1
    if parts == 1:
        return logits.max(dim=-1).indices
    highest, places = logits.unflatten(1, (parts, -1)).max(dim=-1)
    part = highest.max(dim=-1).indices[:, None]
    return (part * (logits.shape[1] // parts) + places.gather(1, part)).squeeze(1)


def token_logprobs(logits: Float[Tensor, "b v"], ids: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The log-probability of each token under the model's own distribution."""
    logits = logits.float()
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
