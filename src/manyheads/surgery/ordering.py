"""In which order heads go, by each measure of what they are worth."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyheads.lens.ablation import ablate
from manyheads.lens.addresses import Address
from manyheads.lens.given import Given, Targets
from manyheads.lens.importance import importance
from manyheads.lens.metrics import Metric, Similarity, better
from manyheads.lens.results import told_change
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.surgery.closing import Closing, close_gates
from manyheads.surgery.parts import Goes
from manyheads.surgery.prune import Keep
from manyheads.surgery.wishes import By, check_gradient
from manyheads.taps import Site, Sublayer, Tap

__all__ = ["ORDERS", "HeadGoes", "Question"]


@dataclass(frozen=True, slots=True)
class HeadGoes(Goes[Address]):
    """A head that may go."""

    @property
    def head(self) -> Address:
        return self.part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Question:
    """Which heads of which attention, what they are measured by and on."""

    model: Model
    given: Given
    metric: Metric
    targets: Targets | None
    keep: Keep
    stack: StackName | None
    sublayer: Sublayer
    seed: int
    room: int | None
    shown: bool
    closing: Closing

    @property
    def sign(self) -> float:
        """What makes a change of the metric a harm."""
        return 1.0 if better(self.metric) == "lower" else -1.0

    @property
    def options(self) -> dict[str, Any]:
        """What every measure of the lens takes."""
        return {
            "metric": self.metric,
            "targets": self.targets,
            "stack": self.stack,
            "sublayer": self.sublayer,
            "room": self.room,
            "shown": self.shown,
        }


def by_ablation(asked: Question, heads: Sequence[Address]) -> list[HeadGoes]:
    """The least harm first, measured head by head."""
    del heads
    found = ablate(asked.model, asked.given, how=asked.keep, seed=asked.seed, **asked.options)
    harmful = {address for address, _ in found.harmful()}
    column = found["change"]
    rows = zip(found.addresses, column.means.tolist(), column.errors.tolist(), strict=True)
    listed = [
        HeadGoes(head, f"alone {told_change(change, error)}", asked.sign * change, head in harmful)
        for head, change, error in rows
        if change == change
    ]
    return sorted(listed, key=lambda each: each.place)


def by_gradient(asked: Question, heads: Sequence[Address]) -> list[HeadGoes]:
    """The least |output . gradient| first (arXiv 1905.10650), after heads that do harm.

    A gradient tells what a little less of a head would do. Without all of it a model may lose most
    where that is a gain, so those of which the gradient says that they do harm are taken away to
    see whether they do.
    """
    del heads
    check_gradient(asked.metric)
    found = importance(asked.model, asked.given, **asked.options)
    predicted, column = found["predicted"], found["importance"]
    said = (asked.sign * predicted.means < -predicted.errors).tolist()
    harms = _harms(asked, [head for head, harm in zip(found.addresses, said, strict=True) if harm])
    rows = zip(found.addresses, column.means.tolist(), predicted.means.tolist(), strict=True)
    listed = [
        HeadGoes(
            head,
            f"importance {size:.4f}, predicted {change:+.4f}",
            asked.sign * harms[head] if head in harms else size,
            head in harms,
        )
        for head, size, change in rows
    ]
    return sorted(listed, key=lambda each: each.place)


def _harms(asked: Question, suspects: Sequence[Address]) -> dict[Address, float]:
    """Those of the heads without which the model really does better, and by how much."""
    if not suspects:
        return {}
    heads = [address.head for address in suspects]
    found = ablate(asked.model, asked.given, heads, asked.keep, seed=asked.seed, **asked.options)
    return dict(found.harmful())


def by_redundancy(asked: Question, heads: Sequence[Address]) -> list[HeadGoes]:
    """Of each two heads that do the same the less important one, the most alike first."""
    from manyheads.lens.redundancy import redundancy

    found = redundancy(
        asked.model,
        asked.given,
        stack=asked.stack,
        sublayer=asked.sublayer,
        progress=asked.shown,
    )
    worth = {head: -place for place, head in enumerate(heads)}
    if asked.model.readout is not None and not isinstance(asked.metric, Similarity):
        measured = importance(asked.model, asked.given, **asked.options)
        ranked = [head for head, _ in measured["importance"].ranked()]
        worth = {head: -place for place, head in enumerate(ranked)}
    gone: dict[Address, HeadGoes] = {}
    for pair in found.doubles:
        if pair.one in gone or pair.other in gone:
            continue
        stays, goes = sorted((pair.one, pair.other), key=lambda head: -worth[head])
        alike = min(pair.patterns, pair.outputs)
        gone[goes] = HeadGoes(goes, f"double of {stays}, alike by {alike:.2f}", -alike)
    return list(gone.values())


def by_chance(asked: Question, heads: Sequence[Address]) -> list[HeadGoes]:
    """Any order, by the seed: what the others have to be better than."""
    order = random.Random(asked.seed).sample(list(heads), len(heads))
    return [HeadGoes(head, "by chance", float(place)) for place, head in enumerate(order)]


def by_gates(asked: Question, heads: Sequence[Address]) -> list[HeadGoes]:
    """The gates that closed furthest first, trained on the texts with all weights frozen."""
    gates = close_gates(
        asked.model,
        asked.given,
        asked.closing,
        targets=asked.targets,
        seed=asked.seed,
        shown=asked.shown,
    )
    listed = []
    for head in heads:
        site = Site(head.head.layer, Tap.HEAD_OUTPUT, head.sublayer, head.stack)
        openness = float(gates[site][head.head.head])
        listed.append(HeadGoes(head, f"gate at {openness:+.2f}", openness))
    return sorted(listed, key=lambda each: each.place)


ORDERS: dict[By, Callable[[Question, Sequence[Address]], list[HeadGoes]]] = {
    "ablation": by_ablation,
    "gradient": by_gradient,
    "redundancy": by_redundancy,
    "l0": by_gates,
    "random": by_chance,
}
