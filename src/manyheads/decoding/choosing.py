"""How the next token is chosen from the scores of all."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import ConfigError

__all__ = ["Beams", "Choosing", "Greedy", "Sample", "draw", "own_logprobs"]


@dataclass(frozen=True, slots=True)
class Greedy:
    """The likeliest token, every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A token drawn by its probability, from those that are left over.

    Scores are divided by `temperature`; then stay the `top_k` likeliest, of these the fewest that
    together reach the probability `top_p` (arXiv 1904.09751), and of these the ones that are at
    least `min_p` times as likely as the likeliest (arXiv 2407.01082).

    >>> Sample(temperature=0.7, top_p=0.9).narrow(torch.tensor([[0.0, 2.0, 1.0]])).isinf().tolist()
    [[True, False, False]]
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} cannot divide scores",
                "use a number above 0, or Greedy() for the likeliest token",
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token", "use 1 or more, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is no share", "use 0 < top_p <= 1, or None")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} is no share", "use 0 <= min_p <= 1, or None")

    def narrow(self, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """The scores to draw by, minus infinity for tokens that are out."""
        scores = scores.float() / self.temperature
        if self.top_k is not None:
            scores = _keep_top_k(scores, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        if self.min_p is not None:
            scores = _keep_min_p(scores, self.min_p)
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """The likeliest text among `width` that are written side by side.

    A finished text is judged by its log-probability over its length to the power `length_penalty`:
    above 0 favours long texts, below 0 short ones. `early_stopping` is that of transformers: False
    ends when the running beams are unlikely to win, True as soon as `width` texts are finished, and
    "never" when they cannot win. A width of 1 is `Greedy`.
    """

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width={self.width} is no beam", "use 1 or more")


Choosing = Greedy | Sample | Beams


def draw(scores: Float[Tensor, "b v"], chances: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The token at which the probabilities, summed in order, pass a chance between 0 and 1.

    One number a sequence decides, so what is drawn does not depend on the rest of the batch, nor on
    the device.
    """
    summed = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = chances.to(summed).unsqueeze(1) * summed[:, -1:]
    # From the right: a token of probability zero adds nothing and is never the first to pass.
    found = torch.searchsorted(summed, goal, right=True).squeeze(1)
    return found.clamp(max=scores.shape[1] - 1)


def own_logprobs(logits: Float[Tensor, "b v"], ids: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The log-probability of each token under the model's own distribution."""
    scores = logits.float()
    return scores.gather(1, ids.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=-1)


def _keep_top_k(scores: Float[Tensor, "b v"], count: int) -> Float[Tensor, "b v"]:
    lowest = scores.topk(min(count, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < lowest, -torch.inf)


def _keep_top_p(scores: Float[Tensor, "b v"], share: float) -> Float[Tensor, "b v"]:
    ordered, tokens = scores.sort(dim=-1)
    out = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - share
    out[:, -1] = False
    return scores.masked_fill(out.scatter(1, tokens, out), -torch.inf)


def _keep_min_p(scores: Float[Tensor, "b v"], share: float) -> Float[Tensor, "b v"]:
    chances = scores.softmax(dim=-1)
    return scores.masked_fill(chances < share * chances.amax(dim=-1, keepdim=True), -torch.inf)
