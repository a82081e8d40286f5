"""What a study is: published claims, arms that are measured over seeds, and what follows.

A study lives in `studies/<name>/study.py` as `STUDY`, a subclass of `Study`. `studies.run` measures
its arms, one after another or in several processes, and writes beside it:

- `result.json`: settings, machine and the values of every arm and seed
- `plot.png`: what they show
- `README.md`: the claims, what was measured, and whether they hold here

The page is made from the result, so that its numbers are those of the file.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

from manyheads.atomic_write import atomic_write
from manyheads.errors import InputError
from manyheads.formatting import without_nan

Settings = Mapping[str, Any]
Values = dict[str, Any]
# A difference of means counts from so many standard errors on.
CLEAR = 2.0


class Verdict(StrEnum):
    """What became of a claim at a size that anyone can rerun."""

    HOLDS = "holds"
    WEAKLY = "weakly"
    NOT_HERE = "not at this size"
    CONTRADICTED = "contradicted"
    OPEN = "not measured"


@dataclass(frozen=True, slots=True)
class Claim:
    """What was published, with its figures, and where."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured of a claim, in a sentence with its numbers."""

    claim: Claim
    verdict: Verdict
    measured: str


@dataclass(frozen=True, slots=True)
class Arm:
    """One run: a variant of the model or the training, and its seed."""

    name: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    # It measures time, so that nothing runs beside it.
    alone: bool = False
    # "cpu" or "cuda" if it is measured on that device only.
    device: str = ""

    @property
    def key(self) -> str:
        return f"{self.name} #{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """The values of all arms that have ended."""

    study: str
    level: str
    settings: dict[str, Any]
    machine: str
    seconds: dict[str, float] = field(default_factory=dict)
    arms: dict[str, dict[str, Values]] = field(default_factory=dict)

    def add(self, arm: Arm, values: Values, seconds: float) -> None:
        self.arms.setdefault(arm.name, {})[str(arm.seed)] = values
        self.seconds[arm.key] = round(seconds, 1)

    def has(self, arm: Arm) -> bool:
        return str(arm.seed) in self.arms.get(arm.name, {})

    def runs(self, arm: str) -> list[Values]:
        """The values of an arm by seed; none if it was not measured."""
        return list(self.arms.get(arm, {}).values())

    def each(self, arm: str, *path: str) -> list[float]:
        """One value of every seed of an arm; what was not measured or is infinite is left out."""
        numbers = []
        for values in self.runs(arm):
            value: Any = values
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float) and math.isfinite(value):
                numbers.append(float(value))
        return numbers

    def mean(self, arm: str, *path: str) -> float:
        return mean_and_error(self.each(arm, *path))[0]

    def error(self, arm: str, *path: str) -> float:
        """The standard error over seeds; that of a single seed is unknown."""
        return mean_and_error(self.each(arm, *path))[1]

    def text(self, arm: str, *path: str, digits: int = 3) -> str:
        """A mean with its error, as in "1.923 ± 0.004"."""
        value, error = self.mean(arm, *path), self.error(arm, *path)
        if math.isnan(value):
            return "not measured"
        known = "" if math.isnan(error) else f" ± {error:.{digits}f}"
        return f"{value:.{digits}f}{known}"

    def spread(self, *path: str) -> float:
        """The standard deviation over seeds, pooled over the arms that have several."""
        groups = [self.each(arm, *path) for arm in self.arms]
        groups = [values for values in groups if len(values) > 1]
        freedom = sum(len(values) - 1 for values in groups)
        squares = sum((len(values) - 1) * stdev(values) ** 2 for values in groups)
        return math.sqrt(squares / freedom) if freedom else math.nan

    def difference(self, arm: str, other: str, *path: str) -> tuple[float, float]:
        """The mean of one arm minus that of another, and its error.

        An arm of a single seed takes the spread of the arms that have several (nan: none has).
        """
        errors = [self.error(name, *path) for name in (arm, other)]
        spread = self.spread(*path)
        squares = [(spread if math.isnan(error) else error) ** 2 for error in errors]
        return self.mean(arm, *path) - self.mean(other, *path), math.sqrt(sum(squares))

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as target:
            text = json.dumps(without_nan(asdict(self)), indent=1, allow_nan=False)
            target.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "Result":
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise InputError(
                f"{file} is not the result of a study", "delete it, or name another folder"
            ) from None


class Study(ABC):
    """One question put to several arms."""

    name: ClassVar[str]
    title: ClassVar[str]
    # One or two sentences: what is done, for readers of the page.
    question: ClassVar[str]
    # Settings of the full study, and what is smaller in the quick one and in its test.
    full: ClassVar[Settings]
    quick: ClassVar[Settings]
    test: ClassVar[Settings]
    # What was left out, or differs from the publication.
    limits: ClassVar[tuple[str, ...]] = ()

    def settings(self, level: str) -> dict[str, Any]:
        """Of "full", "quick" or "test", as a file has them: lists instead of tuples."""
        values = {**self.full, **({} if level == "full" else getattr(self, level))}
        return json.loads(json.dumps(values))

    @abstractmethod
    def arms(self, settings: Settings) -> Sequence[Arm]:
        """What is measured."""

    @abstractmethod
    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        """Measure one arm: numbers by name, nested dicts and lists of them."""

    @abstractmethod
    def findings(self, result: Result) -> Sequence[Finding]:
        """A finding for every claim; arms may be missing."""

    @abstractmethod
    def draw(self, result: Result, path: Path) -> None:
        """One picture."""

    @abstractmethod
    def table(self, result: Result) -> str:
        """The numbers as a table in Markdown."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown_table(["arm", "loss"], [["plain", "1.92"]]))
    | arm | loss |
    |---|---|
    | plain | 1.92 |
    """
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def arms_table(result: Result, arms: Iterable[str], measures: Mapping[str, tuple[str, int]]) -> str:
    """A row for each arm that was measured, a column for each (measure, digits)."""

    def cell(arm: str, measure: str, digits: int) -> str:
        values = set(result.each(arm, measure))
        if len(values) == 1 and not digits:
            return f"{values.pop():,.0f}"
        return result.text(arm, measure, digits=digits) if values else ""

    rows = [
        [arm, *(cell(arm, *measure) for measure in measures.values())]
        for arm in arms
        if result.runs(arm)
    ]
    return markdown_table(["arm", *measures], rows)


def compare(difference: float, error: float, *, least: float = 0.0) -> Verdict:
    """Whether a value is above another: by two errors holds, by less weakly, below contradicted.

    A difference within `least` of zero is not visible at this size. Turn the sign for "below".

    >>> compare(0.1, 0.02), compare(0.03, 0.02), compare(-0.1, 0.02), compare(0.001, 0.02)
    ... # doctest: +NORMALIZE_WHITESPACE
    (<Verdict.HOLDS: 'holds'>, <Verdict.WEAKLY: 'weakly'>, <Verdict.CONTRADICTED: 'contradicted'>,
     <Verdict.NOT_HERE: 'not at this size'>)
    """
    if math.isnan(difference):
        return Verdict.OPEN
    error = max(0.0 if math.isnan(error) else error, least / CLEAR)
    if difference > CLEAR * error:
        return Verdict.HOLDS
    if difference > error:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if difference < -CLEAR * error else Verdict.NOT_HERE


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, nan where there are too few values.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean(values) if values else math.nan, error


def weakest(*verdicts: Verdict) -> Verdict:
    """What holds of a claim of several parts: the least of their verdicts, or open.

    >>> weakest(Verdict.HOLDS, Verdict.NOT_HERE)
    <Verdict.NOT_HERE: 'not at this size'>
    """
    order = (Verdict.OPEN, Verdict.CONTRADICTED, Verdict.NOT_HERE, Verdict.WEAKLY, Verdict.HOLDS)
    return min(verdicts, key=order.index)
