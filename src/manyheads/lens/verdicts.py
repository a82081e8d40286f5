"""What was found out about the faithfulness of attention, and what it comes to in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.adversarial import FARTHEST
from manyheads.lens.erasure import ORDERS
from manyheads.lens.results import Tabular, told

__all__ = ["GROUPS", "THRESHOLDS", "Faithfulness", "TaskVerdict", "mean_of"]

KIND = "faithfulness"
Values = Float[np.ndarray, " *texts"]
GROUPS = ("shares", "flipped", "curves", "agreement")

# What the verdict rests on. A gain must also be twice its standard error.
THRESHOLDS = {
    # Attention's order must change the answer this share of keys sooner than a random one.
    "sooner": 0.1,
    # Other weights are far from the model's own at this share of the largest divergence, ln 2.
    "far": 0.5,
    # Rankings agree from this Kendall's tau on.
    "agrees": 0.5,
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class TaskVerdict:
    """What was found on one set of texts; arrays have one value per text.

    `shares` are the shares of keys gone when the answer changed, by order of erasure, `flipped`
    whether it ever did; `curves` the mean probability of the answer on the way. `divergence` is how
    far other weights can be from the model's own with the same answer, in nats. `agreement` is
    Kendall's tau of attention with the gradient's size, and with gradient times attention.
    """

    name: str
    decides: str
    shares: Mapping[str, Values]
    flipped: Mapping[str, Values]
    curves: Mapping[str, Float[np.ndarray, " steps"]]
    divergence: Values
    moved: Values
    agreement: Mapping[str, Values]
    complete: bool = True

    @property
    def texts(self) -> int:
        return len(self.divergence)

    @property
    def gain(self) -> tuple[float, float]:
        """How much sooner attention's order changes the answer than a random one, and its error."""
        return mean_of(self.shares["random"] - self.shares["attention"])

    @property
    def sooner(self) -> bool:
        """Whether attention's order beats a random one."""
        gain, error = self.gain
        return gain >= THRESHOLDS["sooner"] and not gain <= 2 * error

    @property
    def unique(self) -> bool:
        """Whether no far pattern gives the same answer."""
        return mean_of(self.divergence)[0] < THRESHOLDS["far"] * FARTHEST

    @property
    def verdict(self) -> str:
        """One sentence for and against, in plain language."""
        says = ["does not explain", "explains only in part", "explains"][self.sooner + self.unique]
        evidence = "; ".join((self._erasure(), self._far(), self._agrees()))
        return f"Attention {says} the {self.decides} of {self.name}: {evidence}."

    def _erasure(self) -> str:
        if not any(each.any() for each in self.flipped.values()):
            return "the answer stays whatever is erased"
        means = {name: mean_of(each)[0] for name, each in self.shares.items()}
        rival = min(ORDERS[1:3], key=means.__getitem__)
        return (
            f"the answer changes when {means['attention']:.0%} of the keys are erased by "
            f"attention, {means['random']:.0%} at random, "
            f"{means[rival]:.0%} by {rival.replace('_', ' ')}"
        )

    def _far(self) -> str:
        share = mean_of(self.divergence)[0] / FARTHEST
        found = "no far pattern was found" if self.unique else "far patterns give the same answer"
        return f"{found} ({share:.0%} of the largest divergence)"

    def _agrees(self) -> str:
        tau = mean_of(self.agreement["gradient"])[0]
        if np.isnan(tau):
            return "its agreement with gradients is not known"
        word = "agrees" if tau >= THRESHOLDS["agrees"] else "does not agree"
        return f"it {word} with gradients (tau {tau:.2f})"

    def measures(self) -> dict[str, tuple[float, float]]:
        """Means over texts and their standard errors, by name."""
        found = {f"erased_by_{name}": mean_of(each) for name, each in self.shares.items()}
        found |= {f"flipped_by_{name}": mean_of(each) for name, each in self.flipped.items()}
        found |= {"gain": self.gain, "divergence": mean_of(self.divergence)}
        found["moved"] = mean_of(self.moved)
        return found | {f"tau_{name}": mean_of(each) for name, each in self.agreement.items()}

    def __str__(self) -> str:
        return f"{self.verdict} ({self.texts} texts)"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Faithfulness(Tabular):
    """A report: what was found for each task, and the thresholds of the verdicts."""

    tasks: tuple[TaskVerdict, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TaskVerdict:
        for task in self.tasks:
            if task.name == name:
                return task
        known = ", ".join(task.name for task in self.tasks)
        raise InputError(f"there is no task {name!r}", f"use {known}")

    def rows(self) -> list[dict[str, Any]]:
        """One record per task and measure."""
        return [
            {"task": task.name, "measure": name, "value": value, "error": error}
            for task in self.tasks
            for name, (value, error) in task.measures().items()
        ]

    def table(self) -> Any:
        """A rich table: a row per measure, a column per task."""
        from rich.table import Table

        table = Table("measure", box=None, pad_edge=False, title=KIND, title_justify="left")
        for task in self.tasks:
            table.add_column(task.name, justify="right")
        for name in self.tasks[0].measures():
            values = [told(*task.measures()[name]) for task in self.tasks]
            table.add_row(name.replace("_", " "), *values)
        return table

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))

    __repr__ = __str__


def mean_of(values: Values) -> tuple[float, float]:
    """Over the texts that have a value, and its standard error."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else float("nan")
    return float(known.mean()), float(error)
