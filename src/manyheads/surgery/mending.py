"""Mend: a short fine-tune after cutting, so that what is left takes over from what went."""

from dataclasses import dataclass
from typing import Any, TypeVar

from manyheads.errors import InputError
from manyheads.lens.given import Targets, read
from manyheads.models.build import Model
from manyheads.surgery.keeping import whole
from manyheads.surgery.rebuilding import rebuild
from manyheads.surgery.trainable import learn_as
from manyheads.surgery.tuning import objective_for, tune
from manyheads.train.objectives import Objective
from manyheads.train.optim.optimisers import AdamW, OptimiserConfig
from manyheads.train.optim.schedules import Cosine, Schedule

__all__ = ["Mending", "mend"]

AnyModel = TypeVar("AnyModel", bound=Model)
GENTLE = AdamW(rate=5e-5, decay=0.01)
FALLING = Cosine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """How a model is trained after cutting: small steps that fall to nothing."""

    optimiser: OptimiserConfig = GENTLE
    schedule: Schedule = FALLING
    batch_tokens: int = 2048


PLAIN = Mending()


def mend(
    model: AnyModel,
    texts: Any,
    steps: int = 100,
    *,
    targets: Targets | None = None,
    objective: Objective | None = None,
    how: Mending = PLAIN,
    seed: int = 0,
    shown: bool = True,
) -> AnyModel:
    """A new model, trained for so many steps on the texts; this one is not touched.

    All learns, or what `learn_only` and its like left to learn. What is asked follows from the
    model: the next word, a masked word, or the `targets`, as in `lens.ablate`; or it is any
    `objective` of training.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> mended = mend(model, [[1, 2, 3, 4], [5, 6, 7]], steps=2)
    >>> mended.config == model.config
    True
    """
    if not any(each.requires_grad for each in model.parameters()):
        raise InputError("nothing of this model may learn", "let it, with surgery.learn_all(model)")
    mended = rebuild(model, whole(model))
    learn_as(mended, model)
    given = read(mended, texts)
    asked = objective or objective_for(mended, given, targets)
    tune(
        mended,
        given,
        asked,
        optimiser=how.optimiser,
        schedule=how.schedule,
        steps=steps,
        room=how.batch_tokens,
        seed=seed,
        shown=shown,
        label="mending",
    )
    return mended
