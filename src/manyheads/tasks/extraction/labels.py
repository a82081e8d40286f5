"""Labels of texts: names or numbers of classes, one or any number per text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import InputError


def label_matrix(labels: Sequence[Any], names: Sequence[str]) -> NDArray[np.bool_]:
    """A row per text and a column per class: whether the text has the label."""
    index_of = {name: index for index, name in enumerate(names)}
    matrix = np.zeros((len(labels), len(names)), dtype=bool)
    for row, value in enumerate(labels):
        for label in value if is_set(value) else (value,):
            # A number is the name of a class, or else its place.
            index = index_of.get(str(label), int(label) if _is_number(label) else -1)
            if not 0 <= index < len(names):
                raise InputError(
                    f"text {row}: the label {label!r} is unknown", f"use one of: {', '.join(names)}"
                )
            matrix[row, index] = True
    return matrix


def label_names(expected: Sequence[Any], predicted: Sequence[Any]) -> tuple[str, ...]:
    """The classes that occur, sorted."""
    values = [
        label
        for value in (*expected, *predicted)
        for label in (value if is_set(value) else (value,))
    ]
    if values and all(map(_is_number, values)):
        return tuple(str(number) for number in sorted({int(value) for value in values}))
    return tuple(sorted({str(value) for value in values}))


def is_set(value: Any) -> bool:
    """Whether this is any number of labels."""
    return isinstance(value, list | tuple | set | frozenset)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
