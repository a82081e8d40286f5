"""Calibrated probabilities: of the texts with a probability of 0.8, eight in ten should be right.

Temperature scaling divides all logits by one number, fitted on texts that the model was not trained
on (arXiv 1706.04599). It changes probabilities, and with one label per text no label.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.argument_checks import checked
from manyheads.checkpoints.classification_head import set_classifier
from manyheads.encoding import classify, encode, text_reader
from manyheads.errors import InputError
from manyheads.models import build, readout
from manyheads.tasks.extraction.labels import label_matrix

# The temperatures that a fit may find; labels that are all right would want none at all.
LOWEST, HIGHEST = 0.05, 20.0
HALVINGS = 60
BINS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted temperature, and what it changes on the texts that it was fitted on.

    Errors are expected calibration errors, losses the mean cross-entropy.
    """

    temperature: float
    texts: int
    error_before: float
    error_after: float
    loss_before: float
    loss_after: float
    thresholds: tuple[float, ...] = (0.5,)

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:.4f} from {self.texts:,} texts: expected calibration "
            f"error {self.error_before:.4f} before, {self.error_after:.4f} after; loss "
            f"{self.loss_before:.4f} before, {self.loss_after:.4f} after"
        )


@checked
def calibrate(
    model: build.Model,
    texts: text_reader.Texts,
    labels: Sequence[Any],
    *,
    thresholds: bool = False,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Calibration:
    """Fit the temperature of a classifier of texts, and set it in the model.

    `classify` applies it from now on, and `save` stores it in config.json as
    `classifier_temperature`; other libraries ignore it. The texts should be ones that the model was
    not trained on. With `thresholds` a model for several labels per text also gets the threshold
    per class that gives the best F1 on these texts.
    """
    options = encode.Options(batch_tokens=batch_tokens, progress=progress, doing="calibrating")
    logits = classify.read_logits(model, texts, options)[0].double().cpu().numpy()
    head, before = model.config.readout, readout.classifier_of(model)
    assert isinstance(head, readout.ClassHead)
    right = label_matrix(labels, classify.class_names_of(model, head))
    if len(right) != len(logits):
        raise InputError(
            f"there are {len(logits)} texts and {len(right)} labels", "give one label per text"
        )
    if thresholds and not before.multi_label:
        raise InputError("thresholds are for models with several labels per text", "leave it out")
    if not before.multi_label and (right.sum(1) != 1).any():
        raise InputError("a text has no label or several, and the model gives one", "give one")
    targets = right if before.multi_label else right.argmax(1)
    after = replace(before, temperature=fit_temperature(logits, targets))
    results = []
    for settings in (before, after):
        shares = settings.probabilities(torch.from_numpy(logits)).double().numpy()
        chosen = np.where(right, shares, 1 - shares) if before.multi_label else shares[right]
        loss = abs(float(np.log(np.clip(chosen, 1e-300, 1)).mean()))
        results.append((calibration_error(shares, targets), loss))
    if thresholds:
        after = replace(after, thresholds=fit_thresholds(shares, right))
    set_classifier(model, after)
    return Calibration(
        temperature=after.temperature,
        texts=len(logits),
        error_before=results[0][0],
        error_after=results[1][0],
        loss_before=results[0][1],
        loss_after=results[1][1],
        thresholds=after.thresholds,
    )


@checked
def calibration_error(
    probabilities: NDArray[Any] | Sequence[Any],
    labels: NDArray[Any] | Sequence[Any],
    *,
    bins: int = BINS,
) -> float:
    """The expected calibration error: how far confidence and accuracy are apart, in `bins` bins.

    `labels` are class numbers, and the confidence is the largest probability of a text; or they are
    zeros and ones per class, and every probability counts.

    >>> calibration_error([[0.9, 0.1], [0.9, 0.1]], [0, 1])
    0.4
    """
    shares, right = _arrays(probabilities, labels)
    if bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}")
    if right.ndim == 1:
        confidence, correct = shares.max(1), shares.argmax(1) == right
    else:
        confidence, correct = shares.reshape(-1), right.reshape(-1).astype(bool)
    # A bin includes its upper end, as in the paper.
    numbers = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sums = np.bincount(numbers, confidence - correct, minlength=bins)
    return float(np.abs(sums).sum() / len(confidence))


@checked
def fit_temperature(
    logits: NDArray[Any] | Sequence[Any], labels: NDArray[Any] | Sequence[Any]
) -> float:
    """The temperature of 0.05 to 20 with the least cross-entropy.

    `labels` are class numbers, or zeros and ones per class. The loss is convex in the inverse of
    the temperature, so that its slope has one zero, found by bisection.

    >>> round(fit_temperature([[2.0, 0.0]] * 4, [0, 0, 0, 1]), 3)
    1.82
    """
    values, right = _arrays(logits, labels)
    expected = right if right.ndim == 2 else np.eye(values.shape[1])[right]
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if right.ndim == 2:
            shares = 1 / (1 + np.exp(-np.clip(middle * values, -700, 700)))
        else:
            scaled = np.exp(middle * (values - values.max(1, keepdims=True)))
            shares = scaled / scaled.sum(1, keepdims=True)
        slope = ((shares - expected) * values).sum()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 2 / (low + high)


@checked
def fit_thresholds(
    probabilities: NDArray[Any] | Sequence[Any], labels: NDArray[Any] | Sequence[Any]
) -> tuple[float, ...]:
    """For each class the threshold with the best F1; 0.5 for a class that no text has.

    It is halfway between two probabilities; of several the nearest to 0.5.

    >>> fit_thresholds([[0.25], [0.5], [0.125]], [[0], [1], [0]])
    (0.375,)
    """
    shares, right = _arrays(probabilities, labels)
    if right.ndim != 2:
        raise InputError("labels must be zeros and ones per class", "give one column per class")
    thresholds = []
    for share, own in zip(shares.T, right.T.astype(bool), strict=True):
        values = np.unique(share)
        cuts = (values + np.concatenate([[0.0], values[:-1]])) / 2
        # The texts from each cut on, which are those after it in order.
        order = np.argsort(share)
        first = np.searchsorted(share[order], cuts)
        positives = np.concatenate([np.cumsum(own[order][::-1])[::-1], [0]])
        f1 = 2 * positives[first] / (len(share) - first + own.sum())
        best = cuts[f1 == f1.max()]
        thresholds.append(float(best[np.abs(best - 0.5).argmin()]) if own.any() else 0.5)
    return tuple(thresholds)


def _arrays(values: Any, labels: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    table, right = np.asarray(values, dtype=np.float64), np.asarray(labels).astype(np.int64)
    fits = right.shape in (table.shape, table.shape[:1])
    if table.ndim != 2 or not table.size or not fits:
        raise InputError(
            f"values of shape {table.shape} and labels of shape {right.shape} do not fit",
            "give a row per text with a value per class, and a class number or a row per text",
        )
    if right.ndim == 1 and not 0 <= right.min() <= right.max() < table.shape[1]:
        raise InputError(
            f"labels must be 0 to {table.shape[1] - 1}, got {right.min()} to {right.max()}"
        )
    return table, right
