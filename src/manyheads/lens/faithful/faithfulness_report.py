"""Whether attention explains a model's answers: erasure, adversarial weights and gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.formatting import percent, pluralise
from manyheads.lens.faithful.adversarial import MAX_DIVERGENCE, find_adversary
from manyheads.lens.faithful.erasure import (
    ORDERS,
    At,
    Decision,
    Erasure,
    decisions_of,
    erase,
    rank_keys,
)
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.texts import read_inputs
from manyheads.lens.measure.measures import format_value
from manyheads.lens.results.tables import Tabular
from manyheads.models.build import Model, eval_mode
from manyheads.models.readout import ClassHead
from manyheads.progress import Progress
from manyheads.taps import Sublayer

KIND = "faithfulness"
Values = Float[np.ndarray, " *texts"]
GROUPS = ("erased", "flipped", "curves", "agreement")

# The thresholds of the verdict. A difference must also exceed twice its standard error.
THRESHOLDS = {
    # Fewer texts than this say nothing.
    "texts": 8,
    # Erasure by attention must change the answer this fraction of keys earlier than at random.
    "sooner": 0.1,
    # Adversarial weights are far at this fraction of the largest divergence, ln 2.
    "far": 0.5,
    # Rankings agree at this Kendall's tau.
    "agrees": 0.5,
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class TaskVerdict:
    """The results on one set of texts; arrays have one value per text.

    `erased` is the fraction of keys erased when the answer changed, by order of erasure, `flipped`
    whether it changed at all; `curves` is the mean probability of the answer along the way.
    `divergence` is how far adversarial weights are from the model's own, in nats, and `settled`
    whether their search came to an end. `agreement` is Kendall's tau of attention with the
    gradient's size, and with gradient times attention. A value that a text does not have is NaN.
    """

    name: str
    decides: str
    erased: Mapping[str, Values]
    flipped: Mapping[str, Values]
    curves: Mapping[str, Float[np.ndarray, " steps"]]
    divergence: Values
    moved: Values
    settled: Values
    agreement: Mapping[str, Values]
    complete: bool = True

    @property
    def texts(self) -> int:
        return len(self.divergence)

    @property
    def gain(self) -> tuple[float, float]:
        """How much earlier erasure by attention changes the answer than at random; its error."""
        return mean_of(self._gains)

    @property
    def better_than_random(self) -> bool:
        """Whether erasure by attention beats random erasure by more than chance."""
        gain, error = self.gain
        return enough(self._gains) and gain > 2 * error

    @property
    def sooner(self) -> bool | None:
        """Whether erasure by attention beats random erasure clearly; None: cannot tell."""
        gain, error = self.gain
        if self.better_than_random:
            return gain >= THRESHOLDS["sooner"]
        conclusive = enough(self._gains) and gain + 2 * error < THRESHOLDS["sooner"]
        return False if conclusive else None

    @property
    def unique(self) -> bool | None:
        """Whether no distant pattern gives the same answer; None: cannot tell.

        A search that was cut short counts as if the most distant pattern had been missed.
        """
        far = THRESHOLDS["far"] * MAX_DIVERGENCE
        if not enough(self.divergence):
            return None
        if mean_of(self.divergence)[0] >= far:
            return False
        searched = ~np.isnan(self.divergence)
        bound = np.where(searched & ~(self.settled > 0), MAX_DIVERGENCE, self.divergence)
        mean, error = mean_of(bound)
        return True if mean + 2 * error < far else None

    @property
    def verdict(self) -> str:
        """One sentence for and against, in plain language."""
        evidence = "; ".join((self._erasure(), self._far(), self._agrees()))
        if self.texts < THRESHOLDS["texts"]:
            few = f"only {pluralise(self.texts, 'text')}, and a verdict needs {THRESHOLDS['texts']}"
            evidence = f"{few}; {evidence}"
        conclusion = self._conclusion().format(f"the {self.decides} of {self.name}")
        return f"{conclusion}: {evidence}."

    def _conclusion(self) -> str:
        if self.sooner is None:
            return "Cannot tell whether attention explains {}"
        if not self.better_than_random:
            return "Attention does not explain {}"
        if self.unique is None:
            says = "at least in part" if self.sooner else "at best in part"
        elif self.sooner == self.unique:
            return "Attention explains {}" if self.sooner else "Attention does not explain {}"
        else:
            says = "only in part"
        return f"Attention explains {{}} {says}"

    @property
    def _gains(self) -> Values:
        return self.erased["random"] - self.erased["attention"]

    def _erasure(self) -> str:
        means = {name: mean_of(each)[0] for name, each in self.erased.items()}
        if np.isnan(means["attention"]):
            return "no erasure could be measured"
        if not any((each > 0).any() for each in self.flipped.values()):
            return "the answer never changes, whatever is erased"
        rival = min(ORDERS[1:3], key=means.__getitem__)
        return (
            f"the answer changes when {percent(means['attention'])} of the keys are erased by "
            f"attention, {percent(means['random'])} at random, "
            f"{percent(means[rival])} by {rival.replace('_', ' ')}"
        )

    def _far(self) -> str:
        fraction = mean_of(self.divergence)[0] / MAX_DIVERGENCE
        if np.isnan(fraction):
            return "no other pattern could be searched for"
        short = int((~np.isnan(self.divergence) & ~(self.settled > 0)).sum())
        if fraction >= THRESHOLDS["far"]:
            result = "distant patterns give the same answer"
        elif short:
            result = f"the search for distant patterns was cut short in {pluralise(short, 'text')}"
        else:
            result = "no distant pattern was found"
        return f"{result} ({percent(fraction)} of the largest divergence)"

    def _agrees(self) -> str:
        tau = mean_of(self.agreement["gradient"])[0]
        if np.isnan(tau):
            return "its agreement with gradients is undefined"
        word = "agrees" if tau >= THRESHOLDS["agrees"] else "does not agree"
        return f"it {word} with gradients (tau {tau:.2f})"

    def measures(self) -> dict[str, tuple[float, float]]:
        """Means over texts and their standard errors, by name."""
        means = {f"erased_by_{name}": mean_of(each) for name, each in self.erased.items()}
        means |= {f"flipped_by_{name}": mean_of(each) for name, each in self.flipped.items()}
        means |= {"gain": self.gain, "divergence": mean_of(self.divergence)}
        means |= {"moved": mean_of(self.moved), "settled": mean_of(self.settled)}
        return means | {f"tau_{name}": mean_of(each) for name, each in self.agreement.items()}

    def __str__(self) -> str:
        stopped = "" if self.complete else ", interrupted"
        return f"{self.verdict} ({pluralise(self.texts, 'text')}{stopped})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Faithfulness(Tabular):
    """The results of each task, and the thresholds of the verdicts."""

    tasks: tuple[TaskVerdict, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

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
            measured = [task.measures()[name] for task in self.tasks]
            values = [format_value(mean, error=error) for mean, error in measured]
            table.add_row(name.replace("_", " "), *values)
        return table

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))

    __repr__ = __str__


def mean_of(values: Values) -> tuple[float, float]:
    """The mean over the texts with a value, and its standard error."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else float("nan")
    return float(known.mean()), float(error)


def enough(values: Values) -> bool:
    """Whether enough texts have a value for a verdict."""
    return int((~np.isnan(values)).sum()) >= THRESHOLDS["texts"]


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
    """Whether the attention of the deciding queries explains the model's answers.

    The answer is the most likely class of a text or image, or the most likely token at the position
    `at`; the queries that it is read from decide. Their weights in `layers`, or in all, are tested:

    - erasure (arXiv 1906.03731): keys are removed one after another until the answer changes, by
      attention, gradient, gradient times attention, and at random (`draws` times), with `steps`
      evaluations per text
    - adversarial weights (arXiv 1902.10186): as far from the model's own as `iterations` of search
      find, while the answer's probabilities move by at most `within`
    - agreement (arXiv 1902.10186): Kendall's tau over keys of attention with gradients

    `texts` are texts, pairs or images, or a dict of several such tasks by name: at least eight of
    each, or the verdict is that one cannot tell. A search for adversarial weights that runs out of
    iterations does not count in favor of attention. Patterns are formed for one text at a time.
    Ctrl-C keeps the results so far.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> report = faithfulness(model, [[5, 6, 7, 8], [9, 5, 6]], iterations=2, progress=False)
    >>> report.tasks[0].texts
    2
    """
    for name, number in (("steps", steps), ("draws", draws)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, got {number}", "use 1 or more")
    scope = head_scope(model, stack, sublayer, mixers=False)
    chosen = scope.layers if layers is None else tuple(layers)
    if not chosen or not set(chosen) <= set(scope.layers):
        raise InputError(f"layers {chosen} do not all have heads", f"use layers of {scope.layers}")
    tests = _Tests(steps, draws, within, iterations, torch.Generator().manual_seed(seed))
    named = texts if isinstance(texts, Mapping) else {"these texts": texts}
    tasks = []
    for name, some in named.items():
        position = at[name] if isinstance(at, Mapping) else at
        tasks.append(tests.run(name, scope, chosen, some, position, progress))
    options = {"steps": steps, "draws": draws, "within": within, "iterations": iterations}
    metadata = {"layers": list(chosen), "thresholds": THRESHOLDS} | options
    return Faithfulness(tuple(tasks), metadata)


def kendall(one: Float[np.ndarray, " k"], other: Float[np.ndarray, " k"]) -> float:
    """Kendall's tau-b, which accounts for ties; NaN if either ranking is constant.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.3333333333333333
    """
    same = first = second = 0.0
    for index in range(len(one) - 1):
        by_one = np.sign(one[index + 1 :] - one[index])
        by_other = np.sign(other[index + 1 :] - other[index])
        same += float(by_one @ by_other)
        first += float(np.abs(by_one).sum())
        second += float(np.abs(by_other).sum())
    return same / float(np.sqrt(first * second)) if first and second else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class _Tests:
    """The settings of all tests."""

    steps: int
    draws: int
    within: float
    iterations: int
    generator: torch.Generator

    def run(
        self, name: str, scope: HeadScope, layers: Sequence[int], texts: Any, at: At, progress: bool
    ) -> TaskVerdict:
        inputs = read_inputs(scope.model, texts)
        measured: list[dict[str, Any]] = []
        complete = True
        decisions = decisions_of(scope, layers, inputs, at)
        with (
            Progress("erasing", total=len(decisions), unit="texts", enabled=progress) as bar,
            eval_mode(scope.model),
        ):
            try:
                for decision in decisions:
                    measured.append(self._test(decision.run()))
                    bar.advance()
            except KeyboardInterrupt:
                if not measured:
                    raise
                complete = False
        return _task(name, _decides(scope), measured, complete)

    def _test(self, decision: Decision) -> dict[str, Any]:
        ranks = rank_keys(decision)
        values: dict[str, Any] = {}
        for name, scores in ranks.items():
            order = decision.keys[scores.argsort(descending=True, stable=True)]
            values |= _mean_erasure(name, [erase(decision, order, self.steps)])
        chances = []
        for _ in range(self.draws):
            order = torch.randperm(len(decision.keys), generator=self.generator)
            mixed = decision.keys[order.to(decision.keys.device)]
            chances.append(erase(decision, mixed, self.steps))
        values |= _mean_erasure("random", chances)
        adversary = find_adversary(
            decision,
            within=self.within,
            iterations=self.iterations,
            seed=int(torch.randint(2**31, (), generator=self.generator)),
        )
        weights = _array(ranks["attention"])
        values |= {"divergence": adversary.divergence, "moved": adversary.moved}
        values["settled"] = float(adversary.settled)
        values["agreement/gradient"] = kendall(weights, abs(_array(ranks["gradient"])))
        product = _array(ranks["gradient_times_attention"])
        return values | {"agreement/gradient_times_attention": kendall(weights, product)}


def _mean_erasure(name: str, each: Sequence[Erasure]) -> dict[str, Any]:
    return {
        f"erased/{name}": np.mean([one.fraction for one in each]),
        f"flipped/{name}": np.mean([float(one.flipped) for one in each]),
        f"curves/{name}": np.mean([_array(one.curve) for one in each], axis=0),
    }


def _task(
    name: str, decides: str, measured: Sequence[Mapping[str, Any]], complete: bool
) -> TaskVerdict:
    columns = {
        column: np.array([one[column] for one in measured], dtype=np.float64)
        for column in measured[0]
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
        settled=columns["settled"],
        complete=complete,
        **groups,
    )


def _decides(scope: HeadScope) -> str:
    return "classes" if isinstance(scope.model.config.readout, ClassHead) else "tokens"


def _array(values: Tensor) -> Any:
    return values.detach().double().cpu().numpy()
