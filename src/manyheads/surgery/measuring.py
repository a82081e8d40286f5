"""The metric of changed models beside that of the whole one, text by text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.effects import ROOM_ON_CPU, ROOM_ON_CUDA, Effects
from manyheads.lens.given import Given, Targets, read, run, shares
from manyheads.lens.metrics import Metric, better, judge, weighed
from manyheads.lens.results import frame_of
from manyheads.lens.trunk import Change, Edits
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.models.seq2seq import Seq2Seq
from manyheads.progress import Progress
from manyheads.taps import Site, Tap

__all__ = ["ChosenParts", "Exam", "Point", "Variant", "check_wish", "within"]

Each = TypeVar("Each")


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
    order: tuple[Each, ...]
    curve: tuple[Point, ...]
    baseline: float
    total: int
    count: int
    met: bool
    # What they are called, many of them.
    unit: ClassVar[str] = "parts"

    @property
    def change(self) -> float:
        """Of the metric without those that may go."""
        return next((at.change for at in self.curve if at.taken == self.count), 0.0)

    @property
    def harmful(self) -> tuple[Each, ...]:
        """None that is known: what each does alone is not measured with its error."""
        return ()

    def told(self, start: int, stop: int) -> str:
        """In words, what goes from one point of the curve to the next."""
        return f"{stop - start:,} {self.unit}"

    def rows(self) -> list[dict[str, Any]]:
        """One record a point of the curve."""
        before = [0, *(point.taken for point in self.curve)]
        return [
            {
                "taken": point.taken,
                "share": point.taken / self.total,
                "what": self.told(start, point.taken),
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
        """What was reached of what was asked and could not be had."""
        return (
            f"what was asked cannot be had: {self.count:,} of {self.total:,} {self.unit} "
            f"({self.count / self.total:.0%}) come to {self.change:+.4g} of {self.metric}"
        )

    def __str__(self) -> str:
        told = f"by {self.by}: {self.count:,} of {self.total:,} {self.unit} may go, "
        told += f"{self.metric} {self.baseline:.4f} {self.change:+.4f}"
        return told + ("" if self.met else ", which is not as asked")


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A model to be compared: another one, or the same with other values at some sites."""

    model: Model
    changes: dict[Site, Change] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exam:
    """What models are asked: the same texts, by the same metric."""

    model: Model
    given: Given
    metric: Metric
    targets: Targets | None
    shown: bool

    @classmethod
    def of(
        cls, model: Model, texts: Any, metric: Metric, targets: Targets | None, shown: bool
    ) -> "Exam":
        given = read(model, texts)
        return cls(model=model, given=given, metric=metric, targets=targets, shown=shown)

    @property
    def sign(self) -> float:
        """What makes a change of the metric a harm."""
        return 1.0 if better(self.metric) == "lower" else -1.0

    @property
    def shares(self) -> list[range]:
        """Texts that run together."""
        room = ROOM_ON_CUDA if next(self.model.parameters()).is_cuda else ROOM_ON_CPU
        return list(shares(self.given.sizes(self.model), room))

    def measure(
        self, variants: Sequence[Variant | Callable[[], Variant]], label: str = "measuring"
    ) -> Effects:
        """The metric of every text under each variant, all judged as the whole model is.

        A variant that is made when its turn comes is gone after it: no two lie in memory.
        """
        count, parts = len(self.given), self.shares
        values = torch.full((count, len(variants) + 1), torch.nan, dtype=torch.float64)
        weights = torch.zeros(count, dtype=torch.float64)
        judges = []
        total = len(parts) * (len(variants) + 1)
        with Progress(label, total=total, unit="runs", shown=self.shown) as bar, torch.no_grad():
            for place, each in enumerate((Variant(self.model), *variants)):
                variant = each if isinstance(each, Variant) else each()
                for index, texts in enumerate(parts):
                    rows = slice(texts.start, texts.stop)
                    if not place:
                        asked = judge(self.model, self.given, texts, self.metric, self.targets)
                        weights[rows] = asked.weights.double().cpu()
                        judges.append(asked)
                    hidden = _hidden(variant, self.given.select(texts))
                    values[rows, place] = judges[index](hidden)[0].double().cpu()
                    bar.advance()
                del variant
        return Effects(
            sets=((),) * len(variants),
            baseline=values[:, 0],
            values=values[:, 1:],
            weights=weights,
            complete=True,
        )

    def worth(self, sites: Sequence[Site]) -> list[Float[Tensor, " k"]]:
        """The mean |value . gradient| of each channel at the sites, summed over a text's tokens."""
        sums: list[list[Tensor]] = [[] for _ in sites]
        weights = []
        parts = self.shares
        with Progress(
            "following gradients", total=len(parts), unit="runs", shown=self.shown
        ) as bar:
            for texts in parts:
                weights.append(self._add_worth(texts, sites, sums))
                bar.advance()
        weight = torch.cat(weights)
        return [weighed(torch.cat(found), weight)[0] for found in sums]

    def _add_worth(
        self, texts: range, sites: Sequence[Site], sums: Sequence[list[Tensor]]
    ) -> Float[Tensor, " b"]:
        """What some texts add to the worth at each site, and what they weigh."""
        judged = judge(self.model, self.given, texts, self.metric, self.targets)
        with resting(self.model), torch.enable_grad():
            seen = Edits(dict.fromkeys(sites, _tracked), [*sites, _last(self.model)])
            run(self.model, self.given.select(texts), seen)
            total = judged(seen[_last(self.model)]).sum()
            values = [seen[site].values for site in sites]
            gradients = torch.autograd.grad(total, values)
        for found, site, gradient in zip(sums, sites, gradients, strict=True):
            size = (seen[site].values.detach() * gradient).abs().double()
            owner = seen[site].lengths.sequence_of_token
            by_text = size.new_zeros(len(texts), size.shape[1]).index_add(0, owner, size)
            found.append(by_text.cpu())
        return judged.weights.double().cpu()


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


def check_wish(by: str, known: Sequence[str], share: float | None) -> None:
    if by not in known:
        raise InputError(f"by={by!r} is no order here", f"use {', '.join(known)}")
    if share is not None and not 0 <= share <= 1:
        raise InputError(f"share={share:g} of the parts", "use 0 to 1")


def _last(model: Model) -> Site:
    return Site(-1, Tap.FINAL, stack="decoder" if isinstance(model, Seq2Seq) else "main")


def _hidden(variant: Variant, given: Given) -> Any:
    last = _last(variant.model)
    seen = Edits(variant.changes, [last])
    with resting(variant.model):
        run(variant.model, given, seen)
    return seen[last]


def _tracked(values: Tensor) -> Tensor:
    return values if values.requires_grad else values.detach().requires_grad_()
