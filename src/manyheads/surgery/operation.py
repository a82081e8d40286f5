"""A whole operation: choose heads on a text, cut them, mend what is left, compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyheads.errors import InputError
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.surgery.choose import Chosen, choose
from manyheads.surgery.measuring import Exam, Variant
from manyheads.surgery.mending import mend
from manyheads.surgery.ordering import By
from manyheads.surgery.prune import Keep, prune
from manyheads.surgery.questions import Questions, questions
from manyheads.surgery.weighing import Weight, compare_weights
from manyheads.taps import Sublayer

__all__ = ["Operation", "Wish", "operate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How much should go, by which measure, and how long to mend."""

    share: float | None = None
    budget: float | None = None
    by: By = "ablation"
    iterative: bool = False
    keep: Keep = "zero"
    stack: StackName | None = None
    sublayer: Sublayer = Sublayer.ATTENTION
    mend_steps: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation:
    """What was chosen, the model that came of it, and both models side by side.

    `cut` is the metric after cutting and `mended` after mending, both measured anew on the texts
    that heads were chosen by. Where the wish could not be met nothing is cut.
    """

    chosen: Chosen
    model: Model | None
    before: Weight | None
    after: Weight | None
    cut: float | None
    mended: float | None

    def told(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        return {
            "by": self.chosen.by,
            "metric": self.chosen.metric,
            "baseline": self.chosen.curve.baseline,
            "heads": self.chosen.total,
            "removed": [str(head) for head in self.chosen.heads] if self.chosen.met else [],
            "harmful": [str(head) for head in self.chosen.harmful],
            "met": self.chosen.met,
            "curve": self.chosen.rows(),
            "cut": self.cut,
            "mended": self.mended,
            "before": None if self.before is None else self.before.told(),
            "after": None if self.after is None else self.after.told(),
        }


def operate(
    model: Model, texts: Sequence[Any], wish: Wish, *, more: Sequence[Any] = (), shown: bool = True
) -> Operation:
    """Choose by the texts, cut, and mend on `more` texts, or on the same where there are none."""
    if wish.mend_steps < 0:
        raise InputError(f"{wish.mend_steps} steps of mending", "use 0 or more")
    if wish.mend_steps and model.readout is None:
        raise InputError(
            "a model without a readout has nothing to be mended by", "leave mending out"
        )
    asked = questions(model, texts, seed=wish.seed)
    chosen = choose(
        model,
        asked.given,
        wish.by,
        share=wish.share,
        budget=wish.budget,
        iterative=wish.iterative,
        keep=wish.keep,
        metric=asked.metric,
        targets=asked.targets,
        stack=wish.stack,
        sublayer=wish.sublayer,
        seed=wish.seed,
        shown=shown,
    )
    if not chosen.met:
        return Operation(chosen=chosen, model=None, before=None, after=None, cut=None, mended=None)
    pruned = prune(model, chosen.heads, wish.keep, asked.given)
    cut = _measured(pruned, model, asked)
    mended = None
    if wish.mend_steps:
        pruned = mend(pruned, more or texts, wish.mend_steps, seed=wish.seed, shown=shown)
        mended = _measured(pruned, model, asked)
    before, after = compare_weights((model, pruned), asked.given)
    return Operation(
        chosen=chosen, model=pruned, before=before, after=after, cut=cut, mended=mended
    )


def _measured(pruned: Model, model: Model, asked: Questions) -> float:
    """The metric of what was really made, by the whole model's own measure."""
    exam = Exam(
        model=model, given=asked.given, metric=asked.metric, targets=asked.targets, shown=False
    )
    return exam.measure([Variant(pruned)]).of(0)[0]
