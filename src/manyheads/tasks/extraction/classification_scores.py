"""Precision, recall and F1 of classes, and which class is taken for which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.argument_checks import checked
from manyheads.encoding.classify import Classification
from manyheads.errors import InputError
from manyheads.tasks.extraction.calibration import calibration_error
from manyheads.tasks.extraction.labels import is_set, label_matrix, label_names
from manyheads.tasks.extraction.span_scores import SCORES, score_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScore:
    """How often a class was expected, predicted, and both."""

    expected: int
    predicted: int
    correct: int

    @property
    def precision(self) -> float:
        """The fraction of the texts predicted to be of the class that are; 0 if there are none."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The fraction of the texts of the class that were found; 0 if there are none."""
        return self.correct / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.expected + self.predicted
        return 2 * self.correct / both if both else 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in SCORES}


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationScores:
    """The scores of each class and of all together.

    `confusion` counts texts by their expected class (row) and the predicted one (column); there is
    none for texts with several labels. `accuracy` is the fraction of texts whose labels are all
    right, `calibration_error` that of their probabilities, if they are known.
    """

    by_class: dict[str, ClassScore]
    accuracy: float
    confusion: NDArray[np.int64] | None = None
    calibration_error: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_class)

    @property
    def micro(self) -> ClassScore:
        """All classes counted together, so that every label weighs the same."""
        scores = self.by_class.values()
        return ClassScore(
            expected=sum(score.expected for score in scores),
            predicted=sum(score.predicted for score in scores),
            correct=sum(score.correct for score in scores),
        )

    @property
    def micro_f1(self) -> float:
        return self.micro.f1

    @property
    def macro_precision(self) -> float:
        return float(np.mean([score.precision for score in self.by_class.values()]))

    @property
    def macro_recall(self) -> float:
        return float(np.mean([score.recall for score in self.by_class.values()]))

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes, so that every class weighs the same."""
        return float(np.mean([score.f1 for score in self.by_class.values()]))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "classes": {name: score.as_dict() for name, score in self.by_class.items()},
            "micro": self.micro.as_dict(),
            "macro": {name: getattr(self, f"macro_{name}") for name in SCORES[:3]},
            "accuracy": self.accuracy,
            "calibration_error": self.calibration_error,
            "confusion": None if self.confusion is None else self.confusion.tolist(),
        }

    def __str__(self) -> str:
        width = max(map(len, (*self.names, "micro")))
        lines = score_lines({**self.by_class, "micro": self.micro})
        lines.append(
            f"{'macro':{width}}  {self.macro_precision:9.4f}  {self.macro_recall:6.4f}  "
            f"{self.macro_f1:6.4f}"
        )
        lines.append(f"accuracy {self.accuracy:.4f}")
        if self.calibration_error is not None:
            lines[-1] += f", expected calibration error {self.calibration_error:.4f}"
        return "\n".join(lines)


@checked
def score_classes(
    expected: Sequence[Any], predicted: Sequence[Any] | Classification, *, names: Sequence[str] = ()
) -> ClassificationScores:
    """Compare expected labels with predicted ones, or with what `classify` returned.

    A label is the name or the number of a class; a list or set of them is for texts with any number
    of labels. `names` are all classes, by default those that occur.

    >>> scores = score_classes(["a", "b", "b"], ["a", "a", "b"])
    >>> scores.accuracy, scores.by_class["a"].precision, scores.confusion.tolist()
    (0.6666666666666666, 0.5, [[1, 0], [1, 1]])
    """
    error = None
    if isinstance(predicted, Classification):
        names = names or predicted.names
        several = predicted.multi_label
        predicted_labels: Sequence[Any] = predicted.label_sets if several else predicted.labels
        right = label_matrix(expected, names)
        probabilities = predicted.probabilities.double().cpu().numpy()
        if len(right) == len(predicted_labels):
            error = calibration_error(probabilities, right if several else right.argmax(1))
    else:
        predicted_labels, several = predicted, any(map(is_set, [*expected, *predicted]))
    if len(expected) != len(predicted_labels) or not len(expected):
        raise InputError(
            f"there are {len(expected)} expected labels and {len(predicted_labels)} predicted ones",
            "give one of each per text",
        )
    names = tuple(names) or label_names(expected, predicted_labels)
    right, predictions = label_matrix(expected, names), label_matrix(predicted_labels, names)
    if not several and (right.sum(1) != 1).any():
        raise InputError("a text has several labels, and the model gives one", "give one per text")
    by_class = {
        name: ClassScore(
            expected=int(right[:, index].sum()),
            predicted=int(predictions[:, index].sum()),
            correct=int((right[:, index] & predictions[:, index]).sum()),
        )
        for index, name in enumerate(names)
    }
    accuracy = float((right == predictions).all(1).mean())
    confusion = None if several else right.astype(np.int64).T @ predictions.astype(np.int64)
    return ClassificationScores(by_class, accuracy, confusion, error)
