"""Precision, recall and F1 of entities, by how strictly a match is judged.

The four modes of SemEval 2013 (task 9.1): "strict" needs the same span and type, "exact" the same
span, "partial" counts an overlap as half, "type" needs an overlap and the same type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from manyheads.argument_checks import checked
from manyheads.errors import InputError

Mode = Literal["strict", "exact", "partial", "type"]
MODES: tuple[Mode, ...] = get_args(Mode)
# An overlap counts from this fraction of the expected entity on.
MIN_OVERLAP = 0.01
# What is saved of the scores of a type or a class.
SCORES = ("precision", "recall", "f1", "expected", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanScore:
    """Counts of entities, and the scores that follow from them."""

    correct: int = 0
    incorrect: int = 0
    partial: int = 0
    missed: int = 0
    spurious: int = 0

    @property
    def expected(self) -> int:
        return self.correct + self.incorrect + self.partial + self.missed

    @property
    def predicted(self) -> int:
        return self.correct + self.incorrect + self.partial + self.spurious

    @property
    def precision(self) -> float:
        """The fraction of the entities found that are right."""
        return (self.correct + self.partial / 2) / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The fraction of the expected entities that were found."""
        return (self.correct + self.partial / 2) / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    def __add__(self, more: "SpanScore") -> "SpanScore":
        names = [count.name for count in fields(self)]
        return SpanScore(**{name: getattr(self, name) + getattr(more, name) for name in names})


@dataclass(frozen=True, slots=True)
class EntityScores:
    """The scores of all entities by mode, and by type and mode; `f1` is the strict one of all."""

    overall: dict[Mode, SpanScore]
    by_type: dict[str, dict[Mode, SpanScore]] = field(default_factory=dict)

    @property
    def precision(self) -> float:
        return self.overall["strict"].precision

    @property
    def recall(self) -> float:
        return self.overall["strict"].recall

    @property
    def f1(self) -> float:
        return self.overall["strict"].f1

    @property
    def macro_f1(self) -> float:
        """The mean of the strict F1 of the types."""
        f1 = [scores["strict"].f1 for scores in self.by_type.values()]
        return sum(f1) / len(f1) if f1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, by type and mode."""
        return {
            name: {
                mode: {key: getattr(score, key) for key in SCORES} for mode, score in modes.items()
            }
            for name, modes in {"all": self.overall, **self.by_type}.items()
        }

    def __str__(self) -> str:
        strict = {name: scores["strict"] for name, scores in sorted(self.by_type.items())}
        others = ", ".join(f"{mode} {self.overall[mode].f1:.4f}" for mode in MODES[1:])
        lines = score_lines({**strict, "all": self.overall["strict"]})
        return "\n".join([*lines, f"F1 of all by other rules: {others}"])


def score_lines(scores: Mapping[str, Any]) -> list[str]:
    """A table of scores by name, with a line above it that names the columns."""
    width = max(map(len, scores))
    return [f"{'':{width}}  precision  recall      F1  expected  predicted"] + [
        f"{name:{width}}  {score.precision:9.4f}  {score.recall:6.4f}  {score.f1:6.4f}  "
        f"{score.expected:8,}  {score.predicted:9,}"
        for name, score in scores.items()
    ]


class _Span(NamedTuple):
    type: str
    start: int
    end: int


@checked
def score_entities(
    expected: Sequence[Sequence[Any]], predicted: Sequence[Sequence[Any]]
) -> EntityScores:
    """How many of the expected entities were found, and how many of those found are right.

    Each text has a list of `Entity`, or of tuples (type, start, end) with `end` exclusive.

    >>> scores = score_entities([[("person", 0, 4), ("place", 9, 13)]], [[("person", 0, 4)]])
    >>> scores.precision, scores.recall
    (1.0, 0.5)
    """
    if len(expected) != len(predicted):
        raise InputError(
            f"{len(expected)} texts have expected entities and {len(predicted)} predicted ones",
            "give one list per text in both",
        )
    pairs = [
        (_spans(right, index), _spans(actual, index))
        for index, (right, actual) in enumerate(zip(expected, predicted, strict=True))
    ]
    types = sorted({span.type for both in pairs for side in both for span in side})
    overall = {mode: _total(pairs, mode) for mode in MODES}
    by_type = {}
    for kind in types:
        own = [tuple([s for s in side if s.type == kind] for side in both) for both in pairs]
        by_type[kind] = {mode: _total(own, mode) for mode in MODES}
    return EntityScores(overall, by_type)


def _spans(entities: Sequence[Any], index: int) -> list[_Span]:
    spans = []
    for entity in entities:
        try:
            kind = entity.type if hasattr(entity, "type") else entity[0]
            start, end = (entity.start, entity.end) if hasattr(entity, "start") else entity[1:3]
            span = _Span(str(kind), int(start), int(end))
        except (TypeError, ValueError, IndexError):
            raise InputError(
                f"text {index}: {entity!r:.100} is no entity",
                "give an Entity or (type, start, end)",
            ) from None
        if not 0 <= span.start < span.end:
            raise InputError(f"text {index}: {entity!r:.100} has no characters", "give end > start")
        spans.append(span)
    return spans


def _total(pairs: Sequence[Any], mode: Mode) -> SpanScore:
    matched = (_matched(right, actual, mode) for right, actual in pairs if right or actual)
    return sum(matched, SpanScore())


def _matched(expected: list[_Span], predicted: list[_Span], mode: Mode) -> SpanScore:
    """Match each entity found, in order, with one that is expected and not matched yet."""
    unmatched = dict(enumerate(expected))
    correct = near = 0
    for span in predicted:
        overlapping = [number for number in unmatched if _overlaps(span, unmatched[number])]
        right = [
            number
            for number in overlapping
            if (mode == "type" or span[1:] == unmatched[number][1:])
            and (mode in ("exact", "partial") or span.type == unmatched[number].type)
        ]
        if right:
            correct += 1
            # Of several only "type" allows more than one: the one with the nearest ends.
            del unmatched[min(right, key=lambda number: _distance(span, unmatched[number]))]
        elif overlapping:
            near += 1
            del unmatched[overlapping[0]]
    counts = {"partial" if mode == "partial" else "incorrect": near}
    spurious = len(predicted) - correct - near
    return SpanScore(correct=correct, missed=len(unmatched), spurious=spurious, **counts)


def _overlaps(predicted: _Span, expected: _Span) -> bool:
    shared = min(predicted.end, expected.end) - max(predicted.start, expected.start)
    return shared / (expected.end - expected.start) >= MIN_OVERLAP


def _distance(predicted: _Span, expected: _Span) -> int:
    return abs(predicted.start - expected.start) + abs(predicted.end - expected.end)
