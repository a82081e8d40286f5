"""The result of a selection: units in the order of their removal, and the cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, ClassVar, Generic, Literal, TypeVar

from manyheads.formatting import listed, plain_table, standard_error
from manyheads.lens.results.tables import to_frame

UnitName = Literal["heads", "neurons", "layers"]
Order = Literal["ablation", "gradient", "redundancy", "l0", "random"]
Each = TypeVar("Each")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Each]):
    """A unit that can be removed, the score that orders it, and whether it is harmful."""

    unit: Each
    reason: str
    score: float
    harmful: bool = False

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Harmful units come before all others."""
        return not self.harmful, self.score


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The metric with `removed` units removed, its change, and the error of that change."""

    removed: int
    value: float
    change: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Selection(Generic[Each]):
    """Units in the order of their removal, and the metric without more and more of them.

    `count` of them are selected; if the request could not be `met`, as many as fit. `complete` is
    False after Ctrl-C.
    """

    by: Order
    metric: str
    sign: float
    candidates: tuple[Candidate[Each], ...]
    curve: tuple[CurvePoint, ...]
    baseline: float
    total: int
    count: int
    fraction: float | None
    budget: float | None
    met: bool
    complete: bool = True
    unit: ClassVar[UnitName]

    @property
    def order(self) -> tuple[Each, ...]:
        return tuple(candidate.unit for candidate in self.candidates)

    @property
    def change(self) -> float:
        """The change of the metric without the selected units."""
        return next((point.change for point in self.curve if point.removed == self.count), 0.0)

    @property
    def harmful(self) -> tuple[Each, ...]:
        """Units without which the metric improves significantly."""
        return tuple(candidate.unit for candidate in self.candidates if candidate.harmful)

    @property
    def harmful_names(self) -> tuple[str, ...]:
        return tuple(self.name(unit) for unit in self.harmful)

    @property
    def removed(self) -> Any:
        """The selected units as JSON has them."""
        return [self.name(unit) for unit in self.order[: self.count]]

    def name(self, unit: Each) -> str:
        return str(unit)

    def rows(self) -> list[dict[str, Any]]:
        """One record per point of the curve; `units` are those removed since the point before."""
        before = [0, *(point.removed for point in self.curve)]
        return [
            {
                "removed": point.removed,
                "fraction": point.removed / self.total,
                "units": point.removed - start,
                "name": self._names(start, point.removed),
                "reason": self.candidates[start].reason
                if point.removed - start == 1
                else f"by {self.by}",
                "harmful": sum(
                    candidate.harmful for candidate in self.candidates[start : point.removed]
                ),
                "value": point.value,
                "change": point.change,
                "change_error": point.error,
                "selected": point.removed <= self.count,
            }
            for start, point in zip(before, self.curve, strict=False)
        ]

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return to_frame(self.rows())

    def table(self) -> Any:
        """A rich table of the curve; of a request that is met, up to the selected point."""
        rows = [["0", "none", "the full model", f"{self.baseline:.4f}", "", ""]]
        for row in self.rows():
            if (self.met and not row["selected"]) or isnan(row["value"]):
                continue
            value, change = f"{row['value']:.4f}", f"{row['change']:+.4f}"
            error = standard_error(row["change_error"])
            reason = row["reason"] + describe_harm(row["harmful"], row["units"])
            rows.append([f"{row['removed']:,}", row["name"], reason, value, change, error])
        unit = self.unit.removesuffix("s")
        return plain_table(["", unit, "reason"], [self.metric, "change", "±"], rows)

    @property
    def shortfall(self) -> str:
        """The request that could not be met, and the best result."""
        request = [] if self.fraction is None else [f"{self.fraction:.0%} of the {self.unit}"]
        if self.budget is not None:
            request.append(f"a change of at most {self.budget:g} in {self.metric}")
        best = min(self.curve, key=lambda point: self.sign * point.change, default=None)
        least = "" if best is None else f", at best {best.change:+.4g} without {best.removed:,}"
        if self.by == "redundancy" and len(self.candidates) < self.total - 1:
            least += f"; only {len(self.candidates):,} are redundant"
        return (
            f"{' with '.join(request)} cannot be reached: removing {self.count:,} of "
            f"{self.total:,} {self.unit} ({self.count / self.total:.0%}) changes it by "
            f"{self.change:+.4g}{least}"
        )

    def __str__(self) -> str:
        lines = [
            f"by {self.by}: {self.count:,} of {self.total:,} {self.unit} can be removed, "
            f"{self.metric} {self.baseline:.4f} {self.change:+.4f}"
        ]
        if not self.met:
            lines.append(f"not as requested: {self.shortfall}")
        if self.harmful:
            lines.append(f"better without: {listed(self.harmful_names)}")
        return "\n".join(lines)

    __repr__ = __str__

    def _names(self, start: int, stop: int) -> str:
        if stop - start == 1:
            return self.name(self.candidates[start].unit)
        return f"{stop - start:,} {self.unit}"


def describe_harm(harmful: int, units: int) -> str:
    """
    >>> describe_harm(0, 1), describe_harm(1, 1), describe_harm(2, 9)
    ('', ', harmful', ', 2 of them harmful')
    """
    if not harmful:
        return ""
    return ", harmful" if units == 1 else f", {harmful} of them harmful"


def count_within(
    curve: Sequence[CurvePoint],
    sign: float,
    limit: int,
    *,
    fraction: float | None,
    budget: float | None,
) -> tuple[int, bool]:
    """How many units can be removed within a budget, and whether that meets the request.

    A `fraction` requests `limit` of them, a budget alone at least one; with neither, those are
    selected that cost nothing.
    """
    bound = budget if budget is not None or fraction is not None else 0.0
    fitting = [point.removed for point in curve if bound is None or sign * point.change <= bound]
    count = max(fitting, default=0)
    enough = limit if fraction is not None else 1 if budget is not None else 0
    return count, count >= enough
