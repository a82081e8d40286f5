"""The metric of changed models beside that of the whole one, text by text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.effects import ROOM_ON_CPU, ROOM_ON_CUDA, Effects
from manyheads.lens.given import Given, Targets, climb, read, run, shares
from manyheads.lens.metrics import Metric, better, judge, weighed
from manyheads.lens.trunk import Change, Edits
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.models.seq2seq import Seq2Seq
from manyheads.progress import Progress
from manyheads.taps import Site, Tap

__all__ = ["Exam", "Variant", "Worth"]

# Of each token and part at a site, value . gradient.
Said = Callable[[Edits, Site, Tensor], Float[Tensor, "n k"]]


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """What gradients say of parts: their importance, and how the metric would change without each.

    `size` is the mean of |value . gradient|, summed over the tokens of a text; `predicted` keeps
    the sign, as if the model were linear, and `error` is its standard error over texts.
    """

    size: Float[Tensor, " k"]
    predicted: Float[Tensor, " k"]
    error: Float[Tensor, " k"]


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
        """The metric of every text under each variant, each read off by its own readout.

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
                    # Held by no name: a model stays no longer than its turn.
                    found = replace(judges[index], model=variant.model)(hidden)[0]
                    values[rows, place] = found.double().cpu()
                    bar.advance()
                del variant
        return Effects(
            sets=((),) * len(variants),
            baseline=values[:, 0],
            values=values[:, 1:],
            weights=weights,
            complete=True,
        )

    def worth(
        self,
        sites: Sequence[Site],
        said: Said,
        *,
        keep: Sequence[Site] = (),
        changes: Mapping[Site, Change] | None = None,
    ) -> list[Worth]:
        """What the parts at each site are worth, by the gradient of the metric there.

        `said` tells the product of value and gradient of each part at a site; what it has to see
        beside that is in `keep`. Changes are made before.
        """
        sums: list[list[Tensor]] = [[] for _ in sites]
        weights, parts = [], self.shares
        made = {site: _tracked_after((changes or {}).get(site)) for site in sites}
        with Progress(
            "following gradients", total=len(parts), unit="runs", shown=self.shown
        ) as bar:
            for texts in parts:
                seen = Edits(made, [*sites, *keep, _last(self.model)])
                weights.append(self._add_worth(texts, sites, said, seen, sums))
                bar.advance()
        weight = torch.cat(weights)
        found = [(torch.cat(each), weight) for each in sums]
        return [_worth(*each) for each in found]

    def _add_worth(
        self,
        texts: range,
        sites: Sequence[Site],
        said: Said,
        seen: Edits,
        sums: Sequence[list[Tensor]],
    ) -> Float[Tensor, " b"]:
        """What some texts add to the worth at each site, and what they weigh."""
        judged = judge(self.model, self.given, texts, self.metric, self.targets)
        with resting(self.model), torch.enable_grad():
            run(self.model, self.given.select(texts), seen)
            total = judged(seen[_last(self.model)]).sum()
            gradients = torch.autograd.grad(total, [seen[site].values for site in sites])
        for found, site, gradient in zip(sums, sites, gradients, strict=True):
            along = said(seen, site, gradient).detach().double()
            both = torch.stack((along.abs(), -along), dim=-1)
            owner = seen[site].lengths.sequence_of_token
            summed = both.new_zeros(len(texts), *both.shape[1:]).index_add(0, owner, both)
            found.append(summed.cpu())
        return judged.weights.double().cpu()

    def look(
        self, sites: Sequence[Site], label: str, changes: Mapping[Site, Change] | None = None
    ) -> Iterator[Edits]:
        """What is seen at the sites, some texts after others."""
        parts = self.shares
        with Progress(label, total=len(parts), unit="runs", shown=self.shown) as bar:
            for texts in parts:
                seen = Edits(changes or {}, sites)
                with resting(self.model), torch.no_grad():
                    climb(self.model, self.given.select(texts), seen)
                yield seen
                bar.advance()


def _last(model: Model) -> Site:
    return Site(-1, Tap.FINAL, stack="decoder" if isinstance(model, Seq2Seq) else "main")


def _hidden(variant: Variant, given: Given) -> Any:
    last = _last(variant.model)
    seen = Edits(variant.changes, [last])
    with resting(variant.model):
        run(variant.model, given, seen)
    return seen[last]


def _tracked_after(change: Change | None) -> Change:
    def track(values: Tensor) -> Tensor:
        values = values if change is None else change(values)
        return values if values.requires_grad else values.detach().requires_grad_()

    return track


def _worth(summed: Float[Tensor, "b k 2"], weights: Float[Tensor, " b"]) -> Worth:
    means, errors = weighed(summed, weights)
    return Worth(means[:, 0], means[:, 1], errors[:, 1])
