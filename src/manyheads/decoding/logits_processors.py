"""Changes to the logits before a token is chosen: suppressed and forced tokens, repetition."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
