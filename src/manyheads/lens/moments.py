"""Where in texts a number is largest, with the tokens around, kept while texts stream by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.ragged import Ragged

__all__ = ["Moment", "Moved", "Order"]

Order = Literal["largest", "smallest", "absolute"]


@dataclass(frozen=True, slots=True)
class Moment:
    """A token of a text, the value there, and the tokens around it; `text` reads them out.

    Of an image there is a position and no token.
    """

    number: int
    position: int
    value: float
    token: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    text: tuple[str, str, str] | None = None

    def told(self, before: str, token: str, after: str) -> "Moment":
        return replace(self, text=(before, token, after))

    def __str__(self) -> str:
        where = f"{self.value:+.3g} at {self.position} of text {self.number}"
        if self.text is not None:
            before, token, after = (part.replace("\n", "\\n") for part in self.text)
            return f"{where}: {before}[{token}]{after}"
        if self.token is None:
            return where
        before, after = (" ".join(map(str, side)) for side in (self.before, self.after))
        return f"{where}: {before} [{self.token}] {after}"


class Moved:
    """The `top_k` moments of one number per token, its mean, deviation and share above 0."""

    def __init__(self, top_k: int, order: Order, context: int) -> None:
        if context < 0:
            raise InputError(f"context={context} is before the token itself", "use 0 or more")
        self.moments: list[Moment] = []
        self._top_k, self._order, self._context = top_k, order, context
        self._count, self._sum, self._squares, self._above = 0, 0.0, 0.0, 0

    def take(self, values: Ragged, ids: Ragged | None, numbers: Sequence[int]) -> None:
        """The values of a batch of texts, with the numbers the texts have."""
        column: Float[Tensor, " n"] = values.values
        if not len(column):
            return
        doubled = column.double()
        self._count += len(column)
        self._sum += float(doubled.sum())
        self._squares += float(doubled.square().sum())
        self._above += int((column > 0).sum())
        best = self._rank(column).topk(min(self._top_k, len(column))).indices
        owner, position = values.lengths.sequence_of_token, values.lengths.positions
        found = [
            self._moment(
                int(owner[place]), int(position[place]), float(column[place]), ids, numbers
            )
            for place in best.tolist()
        ]
        joined = [*self.moments, *found]
        order = self._rank(torch.tensor([each.value for each in joined], dtype=torch.float64))
        kept = order.argsort(descending=True, stable=True)[: self._top_k]
        self.moments = [joined[place] for place in kept.tolist()]

    def spread(self) -> tuple[float, float, float]:
        """Mean, standard deviation and share above 0 over all tokens."""
        count = max(1, self._count)
        mean = self._sum / count
        return mean, math.sqrt(max(0.0, self._squares / count - mean**2)), self._above / count

    def _rank(self, column: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        match self._order:
            case "largest":
                return column
            case "smallest":
                return -column
            case "absolute":
                return column.abs()

    def _moment(
        self,
        sequence: int,
        position: int,
        value: float,
        ids: Ragged | None,
        numbers: Sequence[int],
    ) -> Moment:
        if ids is None:
            return Moment(numbers[sequence], position, value)
        text = ids.of(sequence)
        before = text[max(0, position - self._context) : position].tolist()
        after = text[position + 1 : position + 1 + self._context].tolist()
        return Moment(
            numbers[sequence], position, value, int(text[position]), tuple(before), tuple(after)
        )
