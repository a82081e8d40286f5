"""Whether attention explains a model's answers: erasure, adversarial weights and gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import percent, plain_table, pluralise
from manyheads.lens.attribution.direct_logits import At
from manyheads.lens.faithful import erasure
from manyheads.lens.faithful.adversarial import MAX_DIVERGENCE, Adversary, find_adversary
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results import measure_names, tables
from manyheads.models import build, readout
from manyheads.progress import Progress
from manyheads.taps import Sublayer

KIND = "faithfulness"
Values = Float[np.ndarray, " *texts"]

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
        means = {name: mean_of(values)[0] for name, values in self.erased.items()}
        if np.isnan(means["attention"]):
            return "no erasure could be measured"
        if not any((values > 0).any() for values in self.flipped.values()):
            return "the answer never changes, whatever is erased"
        rival = min(erasure.ORDERS[1:3], key=means.__getitem__)
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
        values = {f"erased_by_{name}": texts for name, texts in self.erased.items()}
        values |= {f"flipped_by_{name}": texts for name, texts in self.flipped.items()}
        values |= {"gain": self._gains, "divergence": self.divergence}
        values |= {"moved": self.moved, "settled": self.settled}
        values |= {f"tau_{name}": texts for name, texts in self.agreement.items()}
        return {name: mean_of(texts) for name, texts in values.items()}

    def __str__(self) -> str:
        stopped = "" if self.complete else ", interrupted"
        return f"{self.verdict} ({pluralise(self.texts, 'text')}{stopped})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Faithfulness(tables.Tabular):
    """The results of each task, and the thresholds of the verdicts."""

    tasks: tuple[TaskVerdict, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TaskVerdict:
        for task in self.tasks:
            if task.name == name:
                return task
        names = ", ".join(task.name for task in self.tasks)
        raise InputError(f"there is no task {name!r}", f"use {names}")

    def rows(self) -> list[dict[str, Any]]:
        """One record per task and measure."""
        return [
            {"task": task.name, "measure": name, "value": value, "error": error}
            for task in self.tasks
            for name, (value, error) in task.measures().items()
        ]

    def table(self) -> Any:
        """A rich table: a row per measure, a column per task."""
        by_task = [task.measures() for task in self.tasks]
        rows = [
            [name.replace("_", " ")]
            + [measure_names.format_value(own[name][0], error=own[name][1]) for own in by_task]
            for name in by_task[0]
        ]
        return plain_table(["measure"], [task.name for task in self.tasks], rows, title=KIND)

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))

    __repr__ = __str__


def mean_of(values: Values) -> tuple[float, float]:
    """The mean over the texts with a value, and its standard error."""
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)


def enough(values: Values) -> bool:
    """Whether enough texts have a value for a verdict."""
    return int((~np.isnan(values)).sum()) >= THRESHOLDS["texts"]


@wrapping_models
def faithfulness(
    model: build.Model,
    texts: Inputs,
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
    options = {"steps": steps, "draws": draws, "within": within, "iterations": iterations}
    generator = torch.Generator().manual_seed(seed)
    tests = _Tests(scope, chosen, generator, progress, steps, draws, within, iterations)
    named = texts if isinstance(texts, Mapping) else {"these texts": texts}
    tasks = tuple(
        tests.run(name, texts_of_task, at[name] if isinstance(at, Mapping) else at)
        for name, texts_of_task in named.items()
    )
    return Faithfulness(tasks, {"layers": list(chosen), "thresholds": THRESHOLDS} | options)


def kendall(x: Float[np.ndarray, " k"], y: Float[np.ndarray, " k"]) -> float:
    """Kendall's tau-b, which accounts for ties; NaN if either ranking is constant.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.3333333333333333
    """
    agreement = untied_x = untied_y = 0.0
    for index in range(len(x) - 1):
        dx, dy = np.sign(x[index + 1 :] - x[index]), np.sign(y[index + 1 :] - y[index])
        agreement += float(dx @ dy)
        untied_x += float(np.abs(dx).sum())
        untied_y += float(np.abs(dy).sum())
    untied = float(np.sqrt(untied_x * untied_y))
    return agreement / untied if untied else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class _Tests:
    """The settings of all tests."""

    scope: HeadScope
    layers: Sequence[int]
    generator: torch.Generator
    progress: bool
    steps: int
    draws: int
    within: float
    iterations: int

    def run(self, name: str, texts: Inputs, at: At) -> TaskVerdict:
        model, tested, complete = self.scope.model, list[_TextTests](), True
        decisions = erasure.decisions_of(self.scope, self.layers, read_inputs(model, texts), at)
        bar = Progress("erasing", total=len(decisions), unit="texts", enabled=self.progress)
        with bar, build.eval_mode(model):
            try:
                for decide in decisions:
                    tested.append(self._test(decide()))
                    bar.advance()
            except KeyboardInterrupt:
                if not tested:
                    raise
                complete = False

        def by_order(measure: Callable[[erasure.Erasure], Any]) -> dict[str, np.ndarray]:
            """The mean over draws of each text."""
            return {
                order: np.array(
                    [np.mean([*map(measure, text.erasures[order])], axis=0) for text in tested]
                )
                for order in erasure.ORDERS
            }

        by_class = isinstance(model.config.readout, readout.ClassHead)
        curves = by_order(lambda erased: erased.curve.double().cpu().numpy())
        adversaries = [text.adversary for text in tested]
        return TaskVerdict(
            name=name,
            decides="classes" if by_class else "tokens",
            erased=by_order(lambda erased: erased.fraction),
            flipped=by_order(lambda erased: erased.flipped),
            curves={order: by_text.mean(0) for order, by_text in curves.items()},
            divergence=np.array([adversary.divergence for adversary in adversaries]),
            moved=np.array([adversary.moved for adversary in adversaries]),
            settled=np.array([float(adversary.settled) for adversary in adversaries]),
            agreement={
                name: np.array([text.agreement[name] for text in tested])
                for name in tested[0].agreement
            },
            complete=complete,
        )

    def _test(self, decision: erasure.Decision) -> "_TextTests":
        keys, ranks = decision.keys, erasure.rank_keys(decision)
        orders = {
            name: [scores.argsort(descending=True, stable=True)] for name, scores in ranks.items()
        }
        orders["random"] = [
            torch.randperm(len(keys), generator=self.generator).to(keys.device)
            for _ in range(self.draws)
        ]
        erasures = {
            name: [erasure.erase(decision, keys[order], self.steps) for order in draws]
            for name, draws in orders.items()
        }
        adversary = find_adversary(
            decision,
            within=self.within,
            iterations=self.iterations,
            seed=int(torch.randint(2**31, (), generator=self.generator)),
        )
        weights, gradient, product = (
            values.detach().double().cpu().numpy() for values in ranks.values()
        )
        agreement = {
            "gradient": kendall(weights, abs(gradient)),
            "gradient_times_attention": kendall(weights, product),
        }
        return _TextTests(erasures, adversary, agreement)


@dataclass(frozen=True, slots=True, eq=False)
class _TextTests:
    """The tests of one text: its erasures in each order, the adversary, and Kendall's tau."""

    erasures: dict[str, list[erasure.Erasure]]
    adversary: Adversary
    agreement: dict[str, float]
