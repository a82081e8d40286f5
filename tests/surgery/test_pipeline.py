"""The pruning pipeline reports what the models it makes are worth."""

import pytest

from manyheads.lens import ablate
from manyheads.models.build import Model, build
from manyheads.surgery.pipeline import PruningConfig, run_pruning

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5], [1, 3, 5, 7, 9, 11]]


def loss(model: Model) -> float:
    return float(ablate(model, TEXTS, ["L0H0"], progress=False).baseline)


def test_the_recovered_model_is_judged_by_its_own_readout() -> None:
    """Its words have moved too, so the whole model's would not fit what it says."""
    model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, dropout=0.0, seed=0)
    done = run_pruning(
        model, TEXTS, PruningConfig(fraction=0.25, recovery_steps=60), progress=False
    )
    assert done.model is not None
    assert done.recovered == pytest.approx(loss(done.model), abs=1e-5)
    assert done.pruned is not None
    assert done.recovered is not None
    assert done.recovered < done.pruned - 0.01
