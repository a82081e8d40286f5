"""What the study of pruning measures: scores of texts, and how many heads are free."""

import math
from functools import partial

import pytest
import torch

from manyheads.ragged import Lengths, Ragged
from studies.pruning.head_orders import free_share, order_by_gates
from studies.pruning.study import STUDY
from studies.pruning.tasks import (
    TASKS,
    pair_accuracy,
    pair_loss,
    text_accuracy,
    token_accuracy,
    token_f1,
)


def ragged(rows: list[list[int]], classes: int = 3) -> Ragged:
    """Logits whose most likely classes are those of the rows."""
    flat = torch.tensor([value for row in rows for value in row])
    return Ragged(torch.eye(classes)[flat], Lengths.of([len(row) for row in rows]))


def test_a_share_ends_where_the_score_first_falls() -> None:
    assert free_share([0.5, 0.5, 0.5], 0.02) == 1
    assert free_share([0.5, 0.48, 0.5], 0.02) == 0
    assert math.isnan(free_share([0.0, 0.0], 0.02))


def test_scores_count_right_answers_of_the_texts_at_hand() -> None:
    labels = [torch.tensor([0, 1]), torch.tensor([1, 2, -1]), torch.tensor([0, 0])]
    logits = ragged([[1, 2, 1], [0, 1]])
    torch.testing.assert_close(
        token_accuracy(labels, logits, range(1, 3)), torch.tensor([1.0, 0.5])
    )
    whole = text_accuracy(torch.tensor([0, 1, 1]), torch.eye(2), range(1, 3))
    torch.testing.assert_close(whole, torch.tensor([0.0, 1.0]))


def test_f1_counts_what_is_missed_and_what_is_wrong() -> None:
    labels = [torch.tensor([1, 0, 2, -1])]
    measure = partial(token_f1, labels)
    assert float(measure(ragged([[1, 0, 2, 1]]), range(1))) == 1
    assert float(measure(ragged([[1, 0, 0, 0]]), range(1))) == pytest.approx(2 / 3)
    assert float(measure(ragged([[1, 1, 1, 0]]), range(1))) == pytest.approx(2 / 5)
    assert float(measure(ragged([[0, 0, 0, 0]]), range(1))) == 0


def test_halves_of_a_passage_are_nearest_to_each_other() -> None:
    halves = torch.eye(4).repeat_interleave(2, 0)
    hidden = Ragged(halves, Lengths.of([1] * 8))
    assert pair_accuracy(hidden, range(8)).tolist() == [1.0] * 8
    assert float(pair_loss(hidden, range(8)).max()) < 1e-4
    swapped = Ragged(halves[[0, 2, 1, 3, 4, 5, 6, 7]], hidden.lengths)
    assert float(pair_loss(swapped, range(8))[:4].min()) > 1


def test_every_head_has_a_gate() -> None:
    settings = STUDY.settings("test")
    task = TASKS["language"](settings, "cpu", 0)
    order = order_by_gates(task.model, task.learned, settings, 0)
    assert sorted(order) == ["L0H0", "L0H1"]


def test_sentences_to_choose_and_to_score_by_have_an_entity() -> None:
    task = TASKS["entities"](STUDY.settings("test"), "cpu", 0)
    for sample in (task.chosen, task.scored):
        assert sample.texts
        assert len(sample.texts) == len(sample.targets)
    assert any(0 in answers.values() for answers in task.learned.targets)
