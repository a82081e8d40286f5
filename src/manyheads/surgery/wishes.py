"""What can be asked of a choice, whatever goes: by which measure, how many, at what cost."""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

from manyheads.errors import InputError
from manyheads.lens.metrics import Metric, Similarity

__all__ = ["By", "What", "check_gradient", "check_wish", "shortfall"]

What = Literal["heads", "neurons", "layers"]
By = Literal["ablation", "gradient", "redundancy", "l0", "random"]


def check_wish(
    what: What, by: str, *, share: float | None, budget: float | None, iterative: bool
) -> None:
    """Refuse what cannot be, before anything is measured."""
    if by not in get_args(By):
        known = ", ".join(get_args(By))
        raise InputError(f"by={by!r} is no order of {what}", f"use {known}")
    if share is not None and not 0 <= share <= 1:
        raise InputError(f"share={share:g} of the {what}", "use 0 to 1")
    if budget is not None and budget != budget:
        raise InputError("budget is no number", "use 0 or more")
    anew = ("ablation", "gradient") if what == "heads" else ("ablation", "gradient", "redundancy")
    if iterative and by not in anew:
        one = what.removesuffix("s")
        raise InputError(f"by={by!r} does not change with each {one}", "leave iterative out")


def check_gradient(metric: Metric) -> None:
    """Refuse a gradient of what stands at its best."""
    if isinstance(metric, Similarity):
        raise InputError(
            "a model is most like itself, where the gradient of likeness is nothing",
            'use by="ablation" or by="redundancy"',
        )


@runtime_checkable
class Answered(Protocol):
    """What was chosen, of any kind."""

    @property
    def unit(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def sign(self) -> float: ...
    @property
    def share(self) -> float | None: ...
    @property
    def budget(self) -> float | None: ...
    @property
    def order(self) -> Sequence[object]: ...
    @property
    def total(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def change(self) -> float: ...
    @property
    def changes(self) -> Sequence[tuple[int, float]]:
        """Of the metric, when so many are gone."""


def shortfall(chosen: Answered) -> str:
    """What was asked and could not be had, and the best that was reached."""
    asked = [] if chosen.share is None else [f"{chosen.share:.0%} of the {chosen.unit}"]
    if chosen.budget is not None:
        asked.append(f"at most {chosen.budget:g} of {chosen.metric}")
    best = min(chosen.changes, key=lambda each: chosen.sign * each[1], default=None)
    least = "" if best is None else f", at best {best[1]:+.4g} without {best[0]:,}"
    if chosen.by == "redundancy" and len(chosen.order) < chosen.total - 1:
        least += f"; {len(chosen.order):,} do what another does"
    return (
        f"{' for '.join(asked)} cannot be had: {chosen.count:,} of {chosen.total:,} {chosen.unit} "
        f"({chosen.count / chosen.total:.0%}) come to {chosen.change:+.4g}{least}"
    )
