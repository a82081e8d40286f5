"""In which order neurons and layers go: the measures of heads, of parts of any kind."""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

from manyheads.lens.effects import Effects
from manyheads.lens.results import told_change
from manyheads.surgery.closing import Closing
from manyheads.surgery.measuring import Exam, Variant
from manyheads.surgery.parts import Goes
from manyheads.surgery.wishes import By, What, check_gradient

__all__ = ["Guess", "Parts", "pick"]

Each = TypeVar("Each", bound=Hashable)

# Parts that are taken away to see whether they do the harm that their gradients speak of.
MOST_SUSPECTS = 64


@dataclass(frozen=True, slots=True)
class Guess:
    """What a gradient says of a part: its importance, and the change of the metric without it."""

    size: float
    predicted: float
    error: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Parts(ABC, Generic[Each]):
    """All parts of some kind, and how each measure comes to its numbers for them.

    What is `gone` already is missing from the model that is measured.
    """

    exam: Exam
    closing: Closing
    seed: int
    what: ClassVar[What]
    # So many standard errors of a gain are a harm that a part did.
    errors: ClassVar[float] = 1.0

    @property
    @abstractmethod
    def every(self) -> Sequence[Each]: ...

    @abstractmethod
    def home(self, part: Each) -> Hashable:
        """Of those that share one, one has to stay."""

    @abstractmethod
    def without(self, gone: Sequence[Each]) -> Variant:
        """The model less some parts."""

    @abstractmethod
    def guess(self, gone: Sequence[Each]) -> Mapping[Each, Guess]:
        """What gradients say of all that are left."""

    @abstractmethod
    def redundant(self, gone: Sequence[Each]) -> list[Goes[Each]]:
        """Those of what is left that do nothing of their own."""

    @abstractmethod
    def openness(self) -> Mapping[Each, float]:
        """How open a trained gate of each is, of the whole model."""

    @property
    def most(self) -> int:
        """So many may go at all."""
        return len(self.every) - len({self.home(part) for part in self.every})


def pick(
    parts: Parts[Each], by: By, counts: Sequence[int], *, iterative: bool
) -> tuple[Goes[Each], ...]:
    """All that may go in the order of a measure; or so many by turns, measured anew after each."""
    if not iterative:
        return tuple(_spared(parts, _ranked(parts, by, ()), ()))
    found: list[Goes[Each]] = []
    for count in counts:
        gone = [each.part for each in found]
        found += _spared(parts, _ranked(parts, by, gone), gone)[: count - len(gone)]
    return tuple(found)


def _ranked(parts: Parts[Each], by: By, gone: Sequence[Each]) -> list[Goes[Each]]:
    taken = set(gone)
    left = [part for part in parts.every if part not in taken]
    if by == "ablation":
        return sorted(_ablated(parts, left, gone), key=lambda each: each.place)
    if by == "gradient":
        return _by_gradient(parts, gone)
    if by == "redundancy":
        return parts.redundant(gone)
    if by == "random":
        order = random.Random(parts.seed).sample(left, len(left))
        return [Goes(part, "by chance", float(place)) for place, part in enumerate(order)]
    gates = parts.openness()
    listed = [Goes(part, f"gate at {gates[part]:+.2f}", gates[part]) for part in left]
    return sorted(listed, key=lambda each: each.place)


def _ablated(parts: Parts[Each], chosen: Sequence[Each], gone: Sequence[Each]) -> list[Goes[Each]]:
    """Each taken away alone, from a model without those that are gone."""
    if not chosen:
        return []
    exam = parts.exam
    alone = [partial(parts.without, [*gone, part]) for part in chosen]
    label = f"ablating {parts.what}"
    if gone:
        effects = _rebased(exam.measure([partial(parts.without, gone), *alone], label))
    else:
        effects = exam.measure(alone, label)
    word, found = "then" if gone else "alone", []
    for place, part in enumerate(chosen):
        _, change, error = effects.of(place)
        harm = exam.sign * change
        why = f"{word} {told_change(change, error)}"
        # Of a single text no error is known, and nothing is beyond it.
        found.append(Goes(part, why, harm, harm < -parts.errors * error))
    return found


def _rebased(effects: Effects) -> Effects:
    """With the first variant in the place of the whole model."""
    return replace(
        effects,
        sets=effects.sets[1:],
        baseline=effects.values[:, 0],
        values=effects.values[:, 1:],
    )


def _by_gradient(parts: Parts[Each], gone: Sequence[Each]) -> list[Goes[Each]]:
    """The least |value . gradient| first, after parts that do harm, as of heads.

    Those of which the gradient says that they do harm are taken away to see whether they do, the
    worst `MOST_SUSPECTS` of them.
    """
    check_gradient(parts.exam.metric)
    sign, guesses = parts.exam.sign, parts.guess(gone)
    said = {part: sign * each.predicted for part, each in guesses.items()}
    suspects = [part for part in said if said[part] < -parts.errors * guesses[part].error]
    worst = sorted(suspects, key=lambda part: said[part])[:MOST_SUSPECTS]
    harms = {each.part: each for each in _ablated(parts, worst, gone) if each.harmful}
    listed = []
    for part, each in guesses.items():
        why = f"importance {each.size:.3g}, predicted {each.predicted:+.3g}"
        score = harms[part].score if part in harms else each.size
        listed.append(Goes(part, why, score, part in harms))
    return sorted(listed, key=lambda each: each.place)


def _spared(
    parts: Parts[Each], order: Sequence[Goes[Each]], gone: Sequence[Each]
) -> list[Goes[Each]]:
    """Less the last of each home."""
    taken = set(gone)
    left: dict[Hashable, int] = {}
    for part in parts.every:
        home = parts.home(part)
        left[home] = left.get(home, 0) + (part not in taken)
    found = []
    for each in order:
        home = parts.home(each.part)
        if left[home] > 1:
            left[home] -= 1
            found.append(each)
    return found
