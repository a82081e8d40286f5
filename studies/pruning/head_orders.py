"""In which order heads are removed, how many can go, and which do harm."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from manyheads import lens
from manyheads.models.build import Model
from manyheads.surgery.finetune import loop
from manyheads.surgery.rebuild import full_plan, rebuild
from manyheads.train import regularizers
from manyheads.train.optim import optimizers, schedules
from studies.pruning.tasks import Sample, Task, objective_of
from studies.study import Settings, Values

# Orders by name; random ones are the control.
ORDERS = ("gradient", "L0 gates", "Shapley", "alone", "random")
# A head matters if its removal alone changes the metric by so many standard errors (p < 0.01).
ERRORS = 2.58


def order_heads(task: Task, settings: Settings, seed: int) -> dict[str, list[list[str]]]:
    """Heads from the first to the last that is removed, by order; several of the random ones."""
    model, sample = task.model, task.chosen
    options = sample.options(sample.loss)
    importance = lens.importance(model, sample.texts, **options)["importance"]
    worth = lens.shapley(
        model, sample.texts, permutations=settings["permutations"], seed=seed, **options
    )
    alone = lens.ablate(model, sample.texts, **options)["change"]
    heads = [str(address) for address, _ in alone.ranked(smallest=True)]
    draws = [random.Random(draw).sample(heads, len(heads)) for draw in range(settings["draws"])]
    return {
        "gradient": [[str(address) for address, _ in importance.ranked(smallest=True)]],
        "L0 gates": [order_by_gates(model, task.learned, settings, seed)],
        # The head that helps most comes first there.
        "Shapley": [[str(address) for address, _ in reversed(worth.ranked())]],
        "alone": [heads],
        "random": draws,
    }


def order_by_gates(model: Model, sample: Sample, settings: Settings, seed: int) -> list[str]:
    """The most closed gate first; gates are trained with all weights frozen (arXiv 1905.09418)."""
    copy = rebuild(model, full_plan(model))
    copy.requires_grad_(False)
    gated = regularizers.Regularized(
        objective=objective_of(copy, sample),
        regularizers=(regularizers.L0Gates(weight=settings["gate_cost"]),),
    )
    gated.attach(copy)
    config = loop.RecoveryConfig(
        optimizer=optimizers.AdamW(lr=settings["gate_lr"], decay=0.0),
        schedule=schedules.Stable(),
        batch_tokens=sample.batch_tokens or settings["batch_tokens"],
    )
    steps = settings["gate_steps"]
    loop.finetune(copy, sample.texts, gated, config, steps=steps, seed=seed, progress=False)
    gates = getattr(copy, regularizers.GATES)
    logits = {
        f"L{gated.site.layer}H{head}": value
        for gated, values in zip(gates.sites, gates.gate_probability, strict=True)
        for head, value in enumerate(values.tolist())
    }
    return sorted(logits, key=lambda head: logits[head])


def measure_orders(
    task: Task, orders: Mapping[str, Sequence[Sequence[str]]], bound: float
) -> Values:
    """The score after every removal, and the share that is free, by order."""
    sample, values = task.scored, {}
    options: Any = sample.options(sample.score)
    for name, draws in orders.items():
        curves, shares = [], []
        for order in draws:
            removal = lens.ablate_in_order(task.model, sample.texts, list(order), **options)
            curve = [removal.baseline, *(step.value for step in removal.steps)]
            curves.append(curve)
            shares.append(free_share(curve, bound))
        count = len(draws)
        values[name] = {
            "free": sum(shares) / count,
            "curve": [round(sum(points) / count, 4) for points in zip(*curves, strict=True)],
        }
    return values


def free_share(curve: Sequence[float], bound: float) -> float:
    """How many of all heads can go before the score falls by a share of `bound` or more.

    `curve` is the score without 0, 1, ... heads. A model that has learned nothing has no share.

    >>> free_share([0.80, 0.80, 0.79, 0.70, 0.80], 0.02)
    0.5
    """
    if not curve[0]:
        return math.nan
    fell = [index for index, score in enumerate(curve) if score < (1 - bound) * curve[0]]
    return (min(fell, default=len(curve)) - 1) / (len(curve) - 1)


def measure_heads(task: Task) -> Values:
    """How many heads matter alone, and how many do harm, on one half of the texts and on both.

    Heads matter by their effect on the score, as published; harm is measured by the loss, which
    is more sensitive. Without the heads that do harm the score should rise on the other texts.
    """
    chosen, scored = task.chosen, task.scored
    by_score = lens.ablate(task.model, scored.texts, **scored.options(scored.score))["change"]
    matter = abs(by_score.means) > ERRORS * by_score.errors
    harmful = [
        {
            str(address)
            for address, _ in lens.ablate(
                task.model, sample.texts, **sample.options(sample.loss)
            ).harmful(ERRORS)
        }
        for sample in (chosen, scored)
    ]
    better = (by_score.means > ERRORS * by_score.errors).sum()
    gain = 0.0
    if harmful[0]:
        options: Any = scored.options(scored.score)
        gain = lens.ablate_together(task.model, scored.texts, sorted(harmful[0]), **options).change
    return {
        "matter": float(matter.mean()),
        "better_alone": int(better),
        "harmful": len(harmful[0]),
        "harmful_on_both": len(harmful[0] & harmful[1]),
        # Of the score on the texts that they were not chosen by, without all of them.
        "gain": gain,
    }
