"""Does attention explain here? Erasure, adversarial weights and gradients, in one report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.faithful.adversarial import FARTHEST, find_adversary
from manyheads.lens.faithful.erasure import ORDERS, Erased, erase, rank_keys
from manyheads.lens.faithful.reweighting import At, Decision, decisions_of
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.inputs.texts import read
from manyheads.lens.results.by_head import Tabular, told
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.readout import ClassHead
from manyheads.progress import Progress
from manyheads.taps import Sublayer

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


def faithfulness(
    model: Model,
    texts: Any,
    *,
    at: At | Mapping[str, At] = "last",
    layers: Sequence[int] | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    steps: int = 20,
    draws: int = 3,
    within: float = 0.01,
    iterations: int = 100,
    seed: int = 0,
    progress: bool = True,
) -> Faithfulness:
    """Whether what the deciding queries look at tells why the model answers as it does.

    The answer is the likeliest class of a text or image, or the likeliest token at the position
    `at`. The queries it is read off decide, and what they look at in `layers`, or in all, is tried:

    - erasure (arXiv 1906.03731): keys lose their weights one after another, the rest shares them,
      until the answer changes: by attention, gradient, gradient times attention, and at random
      (`draws` times); `steps` is how often a text is looked at on the way
    - adversarial weights (arXiv 1902.10186): as far from the model's own as `iterations` of search
      find, while no more than `within` of the answer's probability moves
    - agreement (arXiv 1902.10186): Kendall's tau over keys of attention with gradients

    `texts` are texts, pairs or images, or several tasks of them by name. The patterns are formed,
    one text at a time. Ctrl-C keeps what was measured.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> report = faithfulness(model, [[5, 6, 7, 8], [9, 5, 6]], iterations=2, progress=False)
    >>> report.tasks[0].texts
    2
    """
    for name, number in (("steps", steps), ("draws", draws)):
        if number < 1:
            raise InputError(f"{name}={number} erases nothing", "use 1 or more")
    part = part_of(model, stack, sublayer)
    chosen = part.layers if layers is None else tuple(layers)
    if not chosen or not set(chosen) <= set(part.layers):
        raise InputError(f"layers {chosen} do not all have heads", f"use some of {part.layers}")
    trial = _Trial(steps, draws, within, iterations, torch.Generator().manual_seed(seed))
    named = texts if isinstance(texts, Mapping) else {"these texts": texts}
    tasks = []
    for name, some in named.items():
        place = at[name] if isinstance(at, Mapping) else at
        tasks.append(trial.run(name, part, chosen, some, place, progress))
    options = {"steps": steps, "draws": draws, "within": within, "iterations": iterations}
    facts = {"layers": list(chosen), "thresholds": THRESHOLDS} | options
    return Faithfulness(tuple(tasks), facts)


def kendall(one: Float[np.ndarray, " k"], other: Float[np.ndarray, " k"]) -> float:
    """Kendall's tau-b: the pairs in the same order less those in the other, ties accounted for.

    NaN where one of both ranks nothing.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.3333333333333333
    """
    same = first = second = 0.0
    for place in range(len(one) - 1):
        by_one = np.sign(one[place + 1 :] - one[place])
        by_other = np.sign(other[place + 1 :] - other[place])
        same += float(by_one @ by_other)
        first += float(np.abs(by_one).sum())
        second += float(np.abs(by_other).sum())
    return same / float(np.sqrt(first * second)) if first and second else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """How hard is tried."""

    steps: int
    draws: int
    within: float
    iterations: int
    generator: torch.Generator

    def run(
        self, name: str, part: Part, layers: Sequence[int], texts: Any, at: At, progress: bool
    ) -> TaskVerdict:
        given = read(part.model, texts)
        found: list[dict[str, Any]] = []
        complete = True
        openings = decisions_of(part, layers, given, at)
        with (
            Progress("erasing", total=len(openings), unit="texts", enabled=progress) as bar,
            resting(part.model),
        ):
            try:
                for opening in openings:
                    found.append(self._try(opening.open()))
                    bar.advance()
            except KeyboardInterrupt:
                if not found:
                    raise
                complete = False
        return _task(name, _decides(part), found, complete)

    def _try(self, decision: Decision) -> dict[str, Any]:
        ranks = rank_keys(decision)
        values: dict[str, Any] = {}
        for name, scores in ranks.items():
            order = decision.keys[scores.argsort(descending=True, stable=True)]
            values |= _erased(name, [erase(decision, order, self.steps)])
        chances = []
        for _ in range(self.draws):
            order = torch.randperm(len(decision.keys), generator=self.generator)
            mixed = decision.keys[order.to(decision.keys.device)]
            chances.append(erase(decision, mixed, self.steps))
        values |= _erased("random", chances)
        adversary = find_adversary(
            decision,
            within=self.within,
            iterations=self.iterations,
            seed=int(torch.randint(2**31, (), generator=self.generator)),
        )
        looked = _array(ranks["attention"])
        values |= {"divergence": adversary.divergence, "moved": adversary.moved}
        values["agreement/gradient"] = kendall(looked, abs(_array(ranks["gradient"])))
        product = _array(ranks["gradient_times_attention"])
        return values | {"agreement/gradient_times_attention": kendall(looked, product)}


def _erased(name: str, each: Sequence[Erased]) -> dict[str, Any]:
    return {
        f"shares/{name}": np.mean([one.share for one in each]),
        f"flipped/{name}": np.mean([float(one.flipped) for one in each]),
        f"curves/{name}": np.mean([_array(one.curve) for one in each], axis=0),
    }


def _task(
    name: str, decides: str, found: Sequence[Mapping[str, Any]], complete: bool
) -> TaskVerdict:
    columns = {
        column: np.array([one[column] for one in found], dtype=np.float64) for column in found[0]
    }
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for column, values in columns.items():
        group, slash, order = column.partition("/")
        if slash:
            groups[group][order] = values
    groups["curves"] = {order: curve.mean(0) for order, curve in groups["curves"].items()}
    return TaskVerdict(
        name=name,
        decides=decides,
        divergence=columns["divergence"],
        moved=columns["moved"],
        complete=complete,
        **groups,
    )


def _decides(part: Part) -> str:
    return "classes" if isinstance(part.model.config.readout, ClassHead) else "tokens"


def _array(values: Tensor) -> Any:
    return values.detach().double().cpu().numpy()
