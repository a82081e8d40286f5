"""A whole operation tells of the models it makes what they are."""

import pytest

from manyheads.lens import ablate
from manyheads.models.build import Model, build
from manyheads.surgery.operation import Wish, operate

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5], [1, 3, 5, 7, 9, 11]]


def loss(model: Model) -> float:
    return float(ablate(model, TEXTS, ["L0H0"], shown=False).baseline)


def test_the_mended_model_is_judged_by_its_own_readout() -> None:
    """Its words have moved too, so the whole model's would not fit what it says."""
    model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, dropout=0.0, seed=0)
    done = operate(model, TEXTS, Wish(share=0.25, mend_steps=60), shown=False)
    assert done.model is not None
    assert done.mended == pytest.approx(loss(done.model), abs=1e-5)
    assert done.cut is not None
    assert done.mended is not None
    assert done.mended < done.cut - 0.01
