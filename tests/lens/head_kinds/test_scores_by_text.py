"""Scores of texts are means with errors, and a draw is some of the texts."""

import numpy as np
import pytest

from manyheads.lens.head_kinds.criteria import Threshold
from manyheads.lens.head_kinds.scores_by_text import ScoresByText, score_texts


def test_a_kind_is_a_mean_over_texts_that_holds_in_most_draws() -> None:
    values = np.array([[0.2, 0.0, np.nan], [0.4, 0.0, np.nan], [0.3, 0.9, np.nan]])
    measured = ScoresByText(values=values, draws=np.array([0, 1, 2]))
    kind = score_texts("retrieval", measured, Threshold(above=0.1), "{}".format, "texts")
    assert kind.scores[:2].tolist() == pytest.approx([0.3, 0.3])
    assert np.isnan(kind.scores[2])
    assert kind.errors[0] == pytest.approx(0.1 / 3**0.5)
    assert kind.held is not None
    assert kind.held.tolist() == [3, 1, 0]
    assert kind.refusal(0) == ""
    assert kind.refusal(1) == "it holds in 1 of 3 draws"
    assert kind.evidence(0) == "30%"


def test_chance_raises_the_threshold() -> None:
    measured = ScoresByText(values=np.full((2, 1), 0.5), draws=np.array([0, 1]), chance=0.25)
    threshold = Threshold(above=0.4, times_uniform=3.0)
    kind = score_texts("repetition", measured, threshold, "{}".format, "sequences")
    assert kind.thresholds.tolist() == [0.75]
    assert not kind.above.any()
