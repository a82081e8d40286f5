from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.report.examine import Worth, examine
from tests.report.small import WORDS, decoder, findings


def test_every_head_has_everything() -> None:
    found = findings()
    assert found.heads == 4
    assert len(found.largest) == 4
    assert found.worth is not None
    assert found.worth.by == "ablation"
    assert not np.isnan(found.worth.loses).any()
    assert len(found.reading.ids) == 64


def test_gradients_stand_in_where_they_are_asked_for() -> None:
    found = examine(decoder(), WORDS * 4, name="it", by="gradient", progress=False)
    assert found.worth is not None
    assert found.worth.by == "gradient"
    # An estimate is no ground to call a head dead.
    assert "loss_change" not in found.dead


def test_a_model_of_vectors_is_asked_to_stay_like_itself() -> None:
    bert = build("bert-base", layers=1, width=32, heads=2, hidden=64, vocabulary=320, seed=2)
    model: Any = build(replace(bert.config, readout=NoReadout()), seed=2)
    model.tokenizer = decoder().tokenizer
    found = examine(model, WORDS * 4, name="it", progress=False)
    assert found.worth is not None
    assert found.worth.metric == "likeness"
    with pytest.raises(InputError, match="all gradients are 0"):
        examine(model, WORDS * 4, name="it", by="gradient", progress=False)


def test_harm_must_exceed_two_errors() -> None:
    worth = Worth(
        loses=np.array([0.5, -0.1, -0.3]),
        errors=np.array([0.1, 0.1, 0.1]),
        metric="loss",
        by="ablation",
        baseline=1.0,
        texts=4,
    )
    assert worth.harmful == [2]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="shown=1"):
        examine(decoder(), WORDS, name="it", shown=1, progress=False)
