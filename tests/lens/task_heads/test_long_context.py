"""Texts have the length that is requested and hide their statements where they say; planted heads
retrieve them.
"""

from pathlib import Path
from typing import Any

import pytest

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.task_heads.long_context import (
    LongContextRecall,
    RecallTexts,
    long_context_recall,
)
from manyheads.models.build import build
from manyheads.taps import Head
from tests.lens.head_kinds.test_text_tests import PLACES, reader
from tests.messages import refuses
from tests.models.zoo import ENCODERS, small

BASE = PLACES // 2


@pytest.fixture(scope="module")
def planted() -> Any:
    return reader()


@pytest.fixture(scope="module")
def result(planted: Any) -> LongContextRecall:
    return long_context_recall(
        planted, [1, 2, 16], base=BASE, tasks=["needle"], samples=2, progress=False
    )


@pytest.mark.parametrize(("keys", "tokens"), [(1, 80), (8, 200)])
def test_texts_have_their_length_and_ask_for_what_they_hide(
    planted: Any, keys: int, tokens: int
) -> None:
    needles = RecallTexts(planted, seed=3).texts(tokens, keys, 3)
    places = []
    for needle in needles:
        assert len(needle.ids) == tokens
        assert needle.copies[-1][0] == tokens - 2
        for before, target in needle.copies:
            assert needle.ids[before + 1] == needle.ids[target]
        places.append(needle.copies[0][1])
    assert places == sorted(places)
    assert places[0] < tokens / 2 < places[-1] + 20


def test_planted_heads_recall_at_every_length(result: LongContextRecall) -> None:
    assert set(result.heads) == {Head(1, 0), Head(1, 1)}
    assert [(score.times, score.tokens) for score in result.scores] == [(1, BASE), (2, PLACES)]
    for score in result.scores:
        assert score.copied > 0.8
        assert len(score.by_depth) == 2
        assert result[f"needle {score.times:g}x"].of("L1H0") > 0.8


def test_without_its_heads_a_model_recalls_nothing(result: LongContextRecall) -> None:
    for score in result.scores:
        assert score.without is not None
        assert score.without_random is not None
        assert score.without < 0.3


def test_lengths_beyond_learned_positions_are_named(result: LongContextRecall) -> None:
    assert result.metadata["skipped"] == ["16x"]


def test_recall_is_shown_and_saved(result: LongContextRecall, tmp_path: Path) -> None:
    result.save(tmp_path / "recall.json")
    again = lens.load(tmp_path / "recall.json")
    assert again.scores == result.scores
    assert "needle 1x (80 tokens): " in str(again)
    assert again.recall_table().row_count == 2


def test_without_ablation_texts_are_read_once(planted: Any) -> None:
    result = long_context_recall(
        planted, [1], base=PLACES, tasks=["multi-key"], samples=2, ablate=False, progress=False
    )
    [score] = result.scores
    assert score.task == "multi-key"
    assert score.without is None


def test_wrong_uses_are_refused(planted: Any) -> None:
    for options, expected in (
        ({"base": 20}, "20 tokens are too few...base of at least"),
        ({"base": 999}, "999 tokens are longer than the model's positions"),
        ({"samples": 1}, "samples must be at least 2, got 1"),
        ({"times": [0]}, "times must be above 0"),
        ({"tasks": ["maze"]}, "needle, multi-key, got ['maze']"),
    ):
        with refuses(InputError, expected):
            long_context_recall(planted, **{"base": BASE, "progress": False, **options})
    with refuses(InputError, "does not continue a text"):
        long_context_recall(small(ENCODERS["bert"]))
    with refuses(InputError, "no tokenizer"):
        long_context_recall(build("gpt2", layers=1, width=32, heads=2, vocabulary=50))
