"""Calibration: the temperature with the least loss, kept with the model."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyheads import classify, load, save, tasks, with_classes
from manyheads.errors import InputError
from manyheads.models.readout import ClassifierSettings, classifier_of
from tests.encoding.tiny import small
from tests.messages import refuses

TEXTS = ["the cat sat", "on the mat", "by the door", "a cat", "the door", "a mat"]


def drawn(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are too large by a factor, and labels drawn from the probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=generator, dtype=torch.double)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_has_the_least_loss(temperature: float) -> None:
    logits, labels = drawn(temperature)
    result = tasks.fit_temperature(logits.numpy(), labels.numpy())
    assert result == pytest.approx(temperature, rel=0.05)
    losses = [
        float(F.cross_entropy(logits / (result * step), labels)) for step in (0.999, 1, 1.001)
    ]
    assert losses[1] == min(losses)
    before = tasks.calibration_error(logits.softmax(1).numpy(), labels.numpy())
    after = tasks.calibration_error((logits / result).softmax(1).numpy(), labels.numpy())
    assert after < 0.02
    assert temperature == 1 or before > 0.1


def test_several_labels_share_one_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3000, 3, generator=generator, dtype=torch.double)
    labels = torch.bernoulli(logits.sigmoid(), generator=generator).long()
    result = tasks.fit_temperature((2 * logits).numpy(), labels.numpy())
    assert result == pytest.approx(2, rel=0.05)
    shares = logits.sigmoid().numpy()
    assert tasks.calibration_error(shares, labels.numpy()) < 0.02
    thresholds = tasks.fit_thresholds(shares, labels.numpy())
    for index, threshold in enumerate(thresholds):
        grid = np.linspace(0, 1, 41)
        best = max(_f1(shares[:, index] >= cut, labels[:, index].numpy() > 0) for cut in grid)
        assert _f1(shares[:, index] >= threshold, labels[:, index].numpy() > 0) >= best


def _f1(inputs: np.ndarray, right: np.ndarray) -> float:
    return float(2 * (inputs & right).sum() / max(inputs.sum() + right.sum(), 1))


def test_the_error_is_that_of_the_paper() -> None:
    """By hand: bins (0.5, 0.75] and (0.75, 1] of four."""
    shares = [[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.1, 0.9]]
    expected = abs((0.7 + 0.6) / 2 - 0.5) / 2 + abs((0.8 + 0.9) / 2 - 1.0) / 2
    assert tasks.calibration_error(shares, [0, 1, 1, 1], bins=4) == pytest.approx(expected)
    with refuses(InputError, "shape (4, 2)", "(3,)"):
        tasks.calibration_error(shares, [0, 1, 1])
    with refuses(InputError, "0 to 1", "2"):
        tasks.calibration_error(shares, [0, 1, 1, 2])


def test_classify_applies_the_temperature_that_is_saved(tmp_path: Path) -> None:
    model = with_classes(small(), ("a", "b"), seed=1)
    model.readout.weight.data *= 50
    before = classify(model, TEXTS)
    wrong = [("b", "a")[name == "b"] for name in before.labels[:2]]
    result = tasks.calibrate(model, TEXTS, [*wrong, *before.labels[2:]])
    assert result.temperature == pytest.approx(classifier_of(model).temperature)
    assert result.temperature != 1
    assert result.loss_after < result.loss_before
    save(model, tmp_path / "model")
    after = classify(load(tmp_path / "model"), TEXTS)
    assert after.labels == before.labels
    scaled = (before.probabilities.double().log() / result.temperature).softmax(1)
    torch.testing.assert_close(after.probabilities.double(), scaled, atol=1e-4, rtol=1e-3)
    # Fitted again on top of itself, it stays.
    again = tasks.calibrate(load(tmp_path / "model"), TEXTS, [*wrong, *before.labels[2:]])
    assert again.temperature == pytest.approx(result.temperature, rel=1e-4)
    # A new head is not calibrated.
    assert classifier_of(with_classes(model, 3)) == ClassifierSettings()
    with refuses(InputError, "6 texts and 1 labels"):
        tasks.calibrate(model, TEXTS, ["a"])
    with refuses(InputError, "thresholds", "several labels"):
        tasks.calibrate(model, TEXTS, before.labels, thresholds=True)
