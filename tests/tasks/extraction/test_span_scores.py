"""The counts and scores of entities are those of nervaluate."""

import random
from typing import Any

import pytest
from nervaluate import Evaluator

from manyheads import tasks
from manyheads.errors import InputError
from tests.messages import refuses

TYPES = ("person", "place", "group")
THEIRS = {"strict": "strict", "exact": "exact", "partial": "partial", "type": "ent_type"}


def drawn(draw: random.Random, texts: int) -> list[list[tuple[str, int, int]]]:
    """Entities that do not overlap within a text, some texts without any."""
    rows = []
    for _ in range(texts):
        row, start = [], 0
        while (start := start + draw.randint(0, 3)) < 12:
            end = start + draw.randint(1, 4)
            row.append((draw.choice(TYPES), start, end))
            start = end
        rows.append(row if draw.random() < 0.9 else [])
    return rows


def judged(expected: list[Any], result: list[Any]) -> dict[str, Any]:
    sides: list[Any] = [
        [
            [{"label": kind, "start": start, "end": end - 1} for kind, start, end in row]
            for row in side
        ]
        for side in (expected, result)
    ]
    return Evaluator(*sides, tags=list(TYPES), loader="dict").evaluate()


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_nervaluate(seed: int) -> None:
    draw = random.Random(seed)
    expected, result = drawn(draw, 40), drawn(draw, 40)
    pairs = zip(expected, result, strict=True)
    result = [right if draw.random() < 0.5 else wrong for right, wrong in pairs]
    scores, peer = tasks.score_entities(expected, result), judged(expected, result)
    rows: list[tuple[Any, Any]] = [(scores.overall, peer["overall"])]
    rows += [(scores.by_type[kind], peer["entities"][kind]) for kind in TYPES]
    for ours, judge in rows:
        for mode, name in THEIRS.items():
            one, other = ours[mode], judge[name]
            counts = ("correct", "incorrect", "partial", "missed", "spurious")
            assert [getattr(one, each) for each in counts] == [
                getattr(other, each) for each in counts
            ]
            for each in ("precision", "recall", "f1"):
                assert getattr(one, each) == pytest.approx(getattr(other, each), abs=1e-12)


def test_no_entity_on_either_side_scores_zero() -> None:
    scores = tasks.score_entities([[], []], [[], []])
    assert (scores.precision, scores.recall, scores.f1, scores.macro_f1) == (0, 0, 0, 0)
    assert "all" in str(scores)


def test_what_is_no_entity_is_refused() -> None:
    with refuses(InputError, "1 texts", "2 predicted", "one list per text"):
        tasks.score_entities([[]], [[], []])
    with refuses(InputError, "text 0", "no entity", "(type, start, end)"):
        tasks.score_entities([["person"]], [[]])
    with refuses(InputError, "text 0", "end > start"):
        tasks.score_entities([[("person", 3, 3)]], [[]])
