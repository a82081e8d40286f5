"""A whole operation: choose parts on a text, cut them, mend what is left, compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyheads.errors import InputError
from manyheads.lens.given import Targets
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.surgery.choose import Chosen, choose
from manyheads.surgery.closing import CLOSING, Closing
from manyheads.surgery.layers import ChosenLayers, choose_layers
from manyheads.surgery.measuring import Exam, Variant
from manyheads.surgery.mending import mend
from manyheads.surgery.neurons import ChosenNeurons, choose_neurons
from manyheads.surgery.prune import Keep, prune, prune_layers, prune_neurons
from manyheads.surgery.questions import Questions, questions
from manyheads.surgery.weighing import Weight, compare_weights
from manyheads.surgery.wishes import By, What
from manyheads.taps import Sublayer

__all__ = ["Operation", "Wish", "operate"]

AnyChosen = Chosen | ChosenNeurons | ChosenLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How much should go of what, by which measure, and how long to mend.

    `by` None is ablation, and of neurons, which are many, the gradient. What stands in for heads
    and which attention they are of is for heads alone.
    """

    what: What = "heads"
    share: float | None = None
    budget: float | None = None
    by: By | None = None
    iterative: bool = False
    keep: Keep = "zero"
    stack: StackName | None = None
    sublayer: Sublayer = Sublayer.ATTENTION
    closing: Closing = CLOSING
    mend_steps: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation:
    """What was chosen, the model that came of it, and both models side by side.

    `cut` is the metric after cutting and `mended` after mending, both measured anew on the texts
    that parts were chosen by. Where the wish could not be met nothing is cut.
    """

    chosen: AnyChosen
    model: Model | None
    before: Weight | None
    after: Weight | None
    cut: float | None
    mended: float | None

    def told(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        chosen = self.chosen
        return {
            "by": chosen.by,
            "metric": chosen.metric,
            "baseline": chosen.baseline,
            chosen.unit: chosen.total,
            "removed": _removed(chosen) if chosen.met else [],
            "harmful": list(chosen.harmful_names),
            "met": chosen.met,
            "curve": chosen.rows(),
            "cut": self.cut,
            "mended": self.mended,
            "before": None if self.before is None else self.before.told(),
            "after": None if self.after is None else self.after.told(),
        }


def operate(
    model: Model,
    texts: Sequence[Any],
    wish: Wish,
    *,
    more: Sequence[Any] = (),
    targets: Targets | None = None,
    more_targets: Targets | None = None,
    shown: bool = True,
) -> Operation:
    """Choose by the texts, cut, and mend on `more` texts, or on the same where there are none.

    The `targets` are for a model that texts alone do not ask: one of classes.
    """
    if wish.mend_steps < 0:
        raise InputError(f"{wish.mend_steps} steps of mending", "use 0 or more")
    if wish.mend_steps and model.readout is None:
        raise InputError(
            "a model without a readout has nothing to be mended by", "leave mending out"
        )
    asked = questions(model, texts, targets=targets, seed=wish.seed)
    chosen = _choose(model, asked, wish, shown)
    if not chosen.met:
        return Operation(chosen=chosen, model=None, before=None, after=None, cut=None, mended=None)
    pruned = _prune(model, chosen, wish, asked)
    cut = _measured(pruned, model, asked)
    mended = None
    if wish.mend_steps:
        pruned = mend(
            pruned,
            more or texts,
            wish.mend_steps,
            targets=more_targets if more else targets,
            seed=wish.seed,
            shown=shown,
        )
        mended = _measured(pruned, model, asked)
    before, after = compare_weights((model, pruned), asked.given)
    return Operation(
        chosen=chosen, model=pruned, before=before, after=after, cut=cut, mended=mended
    )


def _choose(model: Model, asked: Questions, wish: Wish, shown: bool) -> AnyChosen:
    common: dict[str, Any] = {
        "share": wish.share,
        "budget": wish.budget,
        "iterative": wish.iterative,
        "metric": asked.metric,
        "targets": asked.targets,
        "stack": wish.stack,
        "closing": wish.closing,
        "seed": wish.seed,
        "shown": shown,
    }
    by = wish.by or ("gradient" if wish.what == "neurons" else "ablation")
    if wish.what == "heads":
        return choose(model, asked.given, by, keep=wish.keep, sublayer=wish.sublayer, **common)
    if wish.keep != "zero" or wish.sublayer is not Sublayer.ATTENTION:
        raise InputError(f"{wish.what} leave no mean behind and are of no attention", "take heads")
    if wish.what == "layers":
        return choose_layers(model, asked.given, by, **common)
    return choose_neurons(model, asked.given, by, **common)


def _prune(model: Model, chosen: AnyChosen, wish: Wish, asked: Questions) -> Model:
    match chosen:
        case Chosen():
            return prune(model, chosen.heads, wish.keep, asked.given)
        case ChosenNeurons():
            return prune_neurons(model, chosen.neurons, stack=wish.stack)
        case ChosenLayers():
            return prune_layers(model, chosen.layers, stack=wish.stack)


def _removed(chosen: AnyChosen) -> Any:
    match chosen:
        case Chosen():
            return [str(head) for head in chosen.heads]
        case ChosenNeurons():
            return {str(layer): sorted(each) for layer, each in sorted(chosen.neurons.items())}
        case ChosenLayers():
            return sorted(chosen.layers)


def _measured(pruned: Model, model: Model, asked: Questions) -> float:
    """The metric of what was really made, by the whole model's own measure."""
    exam = Exam(
        model=model, given=asked.given, metric=asked.metric, targets=asked.targets, shown=False
    )
    return exam.measure([Variant(pruned)]).of(0)[0]
