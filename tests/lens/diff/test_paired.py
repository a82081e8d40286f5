"""Texts that are kept apart add up to what statistics measures of them together."""

import numpy as np
import pytest

from manyheads.lens.diff.compare import measure_by_text
from manyheads.lens.inputs.batches import gather
from manyheads.lens.inputs.texts import Given
from manyheads.lens.measure.statistics import statistics
from manyheads.models.recipes import ModelConfig
from tests.lens.measure.test_statistics import texts_for
from tests.models.zoo import DECODERS, SEQ2SEQS, VISIONS, small


@pytest.mark.parametrize("config", [DECODERS["gates"], SEQ2SEQS["t5"], VISIONS["vit"]])
def test_means_and_errors_are_those_of_statistics(config: ModelConfig) -> None:
    model = small(config)
    given = texts_for(model)
    found = measure_by_text(model, given, batch_tokens=9, progress=False)
    expected = statistics(model, given, progress=False)
    assert found.names == expected.names
    for name in found.names:
        np.testing.assert_allclose(found.means(name), expected.means[name], atol=1e-5)
        np.testing.assert_allclose(found.errors(name), expected.errors[name], atol=1e-4)


def test_residuals_add_up_to_the_variance() -> None:
    model = small(DECODERS["llama"])
    given: Given = gather(model, iter([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [1, 1, 2, 3, 5]]))
    found = measure_by_text(model, given, batch_tokens=1, progress=False)
    for name in ("entropy", "previous_token", "duplicate_token"):
        residuals = found.residuals(name)
        np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-9)
        texts = (residuals != 0).any(1).sum()
        variance = np.square(residuals).sum(0) * texts / (texts - 1)
        np.testing.assert_allclose(np.sqrt(variance), found.errors(name), atol=1e-9)
