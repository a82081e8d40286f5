"""The names that files of earlier versions have for keys and classes, and today's names.

Files are written with today's names alone; whatever reads one of ours takes both.
"""

from collections.abc import Container, Mapping
from typing import Any

# Keys of run files, native config.json, training states and results of the lens.
KEYS = {
    "initialisation": "initialization",
    "normalise": "normalize",
    "normalised": "normalized",
    "optimiser": "optimizer",
    "regulariser": "regularizer",
    "renormalise": "renormalize",
}

CLASSES = {"Initialisation": "Initialization"}


def with_new_keys(table: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """The table with today's keys, where an earlier one is not `known` itself.

    >>> with_new_keys({"optimiser": 1, "seed": 2}, known=("optimizer", "seed"))
    {'optimizer': 1, 'seed': 2}
    """
    return {_new_key(key, known): value for key, value in table.items()}


def _new_key(key: str, known: Container[str]) -> str:
    new = KEYS.get(key, key)
    return new if key not in known and new in known else key
