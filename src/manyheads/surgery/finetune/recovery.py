"""Recovery: a short fine-tuning after pruning, so that what is left makes up for what is gone."""

from dataclasses import dataclass
from typing import Any, TypeVar

from manyheads.errors import InputError
from manyheads.lens.inputs.texts import Targets, read
from manyheads.models.build import Model
from manyheads.surgery.cut.layer_plan import whole
from manyheads.surgery.cut.rebuild import rebuild
from manyheads.surgery.finetune.loop import finetune, objective_for
from manyheads.surgery.finetune.trainable import copy_trainable
from manyheads.train.objectives import Objective
from manyheads.train.optim.optimisers import AdamW, OptimiserConfig
from manyheads.train.optim.schedules import Cosine, Schedule

AnyModel = TypeVar("AnyModel", bound=Model)
SMALL_STEPS = AdamW(rate=5e-5, decay=0.01)
DECAY = Cosine()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How a model is trained after pruning: small steps that decay to zero."""

    optimiser: OptimiserConfig = SMALL_STEPS
    schedule: Schedule = DECAY
    batch_tokens: int = 2048


DEFAULT = RecoveryConfig()


def recover(
    model: AnyModel,
    texts: Any,
    steps: int = 100,
    *,
    targets: Targets | None = None,
    objective: Objective | None = None,
    config: RecoveryConfig = DEFAULT,
    seed: int = 0,
    progress: bool = True,
) -> AnyModel:
    """A new model, trained for `steps` steps on the texts; the given one is not changed.

    All parameters are trained, or those that `freeze` and `freeze_except` left trainable. The
    objective follows from the model: the next token, masked tokens, or the `targets`, as in
    `lens.ablate`; or it is any `objective` of training.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> recovered = recover(model, [[1, 2, 3, 4], [5, 6, 7]], steps=2)
    >>> recovered.config == model.config
    True
    """
    if not any(each.requires_grad for each in model.parameters()):
        raise InputError(
            "no parameter of this model is trainable", "call surgery.unfreeze_all(model)"
        )
    recovered = rebuild(model, whole(model))
    copy_trainable(recovered, model)
    given = read(recovered, texts)
    chosen = objective or objective_for(recovered, given, targets)
    finetune(
        recovered,
        given,
        chosen,
        optimiser=config.optimiser,
        schedule=config.schedule,
        steps=steps,
        batch_tokens=config.batch_tokens,
        seed=seed,
        progress=progress,
        label="recovering",
    )
    return recovered
