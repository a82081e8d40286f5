"""Parts of a model in the order in which they go, and what it is without more and more of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from manyheads.lens.results import frame_of
from manyheads.surgery.wishes import What, shortfall

__all__ = ["ChosenParts", "Goes", "Point", "within"]

Each = TypeVar("Each")


@dataclass(frozen=True, slots=True)
class Goes(Generic[Each]):
    """A part that may go, the number by which it does, and whether the model is better without."""

    part: Each
    why: str
    score: float
    harmful: bool = False

    @property
    def place(self) -> tuple[bool, float]:
        """By which parts are sorted: harmful ones before all others."""
        return not self.harmful, self.score


@dataclass(frozen=True, slots=True)
class Point:
    """The metric when so many parts are gone, how far it changed, and that change's error."""

    taken: int
    value: float
    change: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenParts(Generic[Each]):
    """Parts in the order in which they go, and the metric without more and more of them.

    `count` of them may go by what was asked; where that is not `met` it is the most that come
    close.
    """

    by: str
    metric: str
    sign: float
    going: tuple[Goes[Each], ...]
    curve: tuple[Point, ...]
    baseline: float
    total: int
    count: int
    share: float | None
    budget: float | None
    met: bool
    # What they are called, many of them.
    unit: ClassVar[What]

    @property
    def order(self) -> tuple[Each, ...]:
        return tuple(each.part for each in self.going)

    @property
    def change(self) -> float:
        """Of the metric without those that may go."""
        return next((at.change for at in self.curve if at.taken == self.count), 0.0)

    @property
    def changes(self) -> list[tuple[int, float]]:
        return [(point.taken, point.change) for point in self.curve]

    @property
    def harmful(self) -> tuple[Each, ...]:
        """Those without which the model does better, by more than chance would have it."""
        return tuple(each.part for each in self.going if each.harmful)

    @property
    def harmful_names(self) -> tuple[str, ...]:
        return tuple(self.name(part) for part in self.harmful)

    def name(self, part: Each) -> str:
        """What one of them is called."""
        return str(part)

    def told(self, start: int, stop: int) -> str:
        """In words, what goes from one point of the curve to the next."""
        if stop - start == 1:
            return self.name(self.going[start].part)
        return f"{stop - start:,} {self.unit}"

    def why(self, start: int, stop: int) -> str:
        """Likewise, the measure that put it there."""
        return self.going[start].why if stop - start == 1 else f"by {self.by}"

    def rows(self) -> list[dict[str, Any]]:
        """One record a point of the curve."""
        before = [0, *(point.taken for point in self.curve)]
        return [
            {
                "taken": point.taken,
                "share": point.taken / self.total,
                "parts": point.taken - start,
                "what": self.told(start, point.taken),
                "why": self.why(start, point.taken),
                "harmful": sum(each.harmful for each in self.going[start : point.taken]),
                "value": point.value,
                "change": point.change,
                "change_error": point.error,
                "goes": point.taken <= self.count,
            }
            for start, point in zip(before, self.curve, strict=False)
        ]

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return frame_of(self.rows())

    @property
    def shortfall(self) -> str:
        """What was asked and could not be had, and the best that was reached."""
        return shortfall(self)

    def __str__(self) -> str:
        told = f"by {self.by}: {self.count:,} of {self.total:,} {self.unit} may go, "
        told += f"{self.metric} {self.baseline:.4f} {self.change:+.4f}"
        return told + ("" if self.met else ", which is not as asked")


def within(
    curve: Sequence[Point], sign: float, limit: int, *, share: float | None, budget: float | None
) -> tuple[int, bool]:
    """How many may go within a budget, and whether that is as many as was asked.

    A `share` asks for `limit` of them, a budget alone for one; with neither those go that cost
    nothing.
    """
    bound = budget if budget is not None or share is not None else 0.0
    fitting = [point.taken for point in curve if bound is None or sign * point.change <= bound]
    count = max(fitting, default=0)
    enough = limit if share is not None else 1 if budget is not None else 0
    return count, count >= enough
