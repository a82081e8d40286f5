"""What becomes of the scores before a token is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Penalty", "Rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Tokens that never come, and those that must come first or last."""

    new_tokens: int
    never: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None

    def forces_at(self, step: int) -> int | None:
        """The only token that may come at this step, if there is one."""
        if self.last is not None and step == self.new_tokens - 1:
            return self.last
        return self.first if step == 0 else None

    def apply(self, scores: Float[Tensor, "b v"], step: int) -> Float[Tensor, "b v"]:
        forced = self.forces_at(step)
        if forced is not None:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, forced] = 0.0
            return scores
        if not self.never:
            return scores
        never = torch.tensor(self.never, device=scores.device)
        return scores.index_fill(1, never, -torch.inf)


class Penalty:
    """Tokens that were read or written become less likely (arXiv 1909.05858)."""

    def __init__(self, factor: float, seen: Bool[Tensor, "b v"]) -> None:
        self.factor = factor
        self.seen = seen

    @classmethod
    def of(
        cls, factor: float, texts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
    ) -> "Penalty":
        seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool, device=device)
        for row, text in zip(seen, texts, strict=True):
            row[torch.tensor(text, device=device)] = True
        return cls(factor, seen)

    def apply(self, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        lowered = torch.where(scores < 0, scores * self.factor, scores / self.factor)
        return torch.where(self.seen, lowered, scores)

    def add(self, ids: Int[Tensor, " b"]) -> None:
        self.seen.scatter_(1, ids.unsqueeze(1), True)

    def select(self, sequences: list[int]) -> None:
        self.seen = self.seen[torch.tensor(sequences, device=self.seen.device, dtype=torch.long)]
