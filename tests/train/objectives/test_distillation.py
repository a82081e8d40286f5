"""A model learns the scores of a teacher."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.train.objectives import Contrastive, Distillation
from tests.models.zoo import ENCODERS, ids

NOBODY = torch.Generator()
BATCH = Batch(
    texts=ids((5, 2, 7)),
    others=ids((3, 3, 9), seed=1),
    negatives=ids((4, 2, 6, 1), seed=2),
    negative_counts=(2, 1, 1),
    scores=torch.tensor([3.0, 1.0, 0.5, 2.0, -1.0, 0.0, 4.0]),
)
# The candidates of each text, the scores of the teacher.
GROUPS = ([0, 3, 4], [3.0, 1.0, 0.5]), ([1, 5], [2.0, -1.0]), ([2, 6], [0.0, 4.0])


@pytest.fixture
def model() -> Any:
    return build(ENCODERS["modernbert"], seed=0)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_the_loss_is_that_of_one_text_after_another(model: Any, kind: Any) -> None:
    objective = Distillation(loss_kind=kind, teacher_temperature=0.5, temperature=0.1)
    prepared = Contrastive(temperature=0.1).prepare(model, BATCH, NOBODY)
    with torch.no_grad():
        scores = Contrastive(temperature=0.1).scores(model, prepared, None)[0]
        expected = torch.zeros(())
        for text, (candidates, teacher) in enumerate(GROUPS):
            ours, peer = scores[text, candidates], torch.tensor(teacher)
            if kind == "kl":
                p, q = (peer / 0.5).softmax(0), ours.softmax(0)
                expected += (p * (p / q).log()).sum()
            else:
                margins = (ours[0] - ours[1:]) - (peer[0] - peer[1:])
                expected += margins.square().mean()
    loss = objective.loss(model, BATCH, NOBODY)
    assert loss.targets == 3
    torch.testing.assert_close(loss.total.detach(), expected, rtol=1e-5, atol=1e-5)
    cached = replace(objective, cache_tokens=8).loss(model, BATCH, NOBODY)
    torch.testing.assert_close(cached.total, loss.total, rtol=1e-5, atol=1e-5)
    loss.combined.backward()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def test_scores_that_cannot_be_learned_are_refused(model: Any) -> None:
    assert BATCH.scores is not None
    with pytest.raises(InputError, match=r"set data\.scores"):
        Distillation().loss(model, replace(BATCH, scores=None), NOBODY)
    scores = BATCH.scores.clone().index_fill(0, torch.tensor([2]), torch.nan)
    with pytest.raises(InputError, match="6 of them finite"):
        Distillation().loss(model, replace(BATCH, scores=scores), NOBODY)
    with pytest.raises(InputError, match="5 scores for 7 candidates"):
        Distillation().loss(model, replace(BATCH, scores=BATCH.scores[:5]), NOBODY)
    few = replace(BATCH, negative_counts=(2, 2, 0))
    with pytest.raises(InputError, match="at least one negative"):
        Distillation().loss(model, few, NOBODY)
    with pytest.raises(ConfigError, match="teacher_temperature must be above 0, got 0"):
        Distillation(teacher_temperature=0.0)
