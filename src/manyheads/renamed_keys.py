"""The names that files of earlier versions have for keys, classes and tensors, and today's names.

Files are written with today's names alone; whatever reads one of ours takes both.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

# Keys of run files, native config.json, training states and results of the lens.
KEYS = {
    "centred": "centered",
    "field": "text_column",
    "initialisation": "initialization",
    "length": "max_length",
    "longest": "max_length",
    "normalise": "normalize",
    "normalised": "normalized",
    "optimiser": "optimizer",
    "pace_rank": "dt_rank",
    "rate": "lr",
    "regulariser": "regularizer",
    "renormalise": "renormalize",
}

CLASSES = {"Initialisation": "Initialization", "Labelled": "Labeled"}

# Parameters of the mixers: in native weights, and in training states for model and optimizer.
TENSORS = {
    "frequency": "A_imag",
    "log_rate": "A_log",
    "pace_bias": "dt_bias",
    "pace_weight": "dt_weight",
    "read": "C",
    "select": "x_proj",
    "skip": "D",
    "widen_pace": "widen_dt",
}
_OLD_TENSOR = re.compile(rf"(?<=\bmixer\.)({'|'.join(TENSORS)})(?=\.|$)")


def with_new_keys(table: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """The table with today's keys, where an earlier one is not `known` itself.

    >>> with_new_keys({"optimiser": 1, "seed": 2}, known=("optimizer", "seed"))
    {'optimizer': 1, 'seed': 2}
    """
    old = [key for key in table if key not in known and KEYS.get(key) in known]
    return {KEYS[key] if key in old else key: value for key, value in table.items()}


def new_tensor_name(name: str) -> str:
    """Today's name of a tensor.

    >>> new_tensor_name("stack.layers.0.mixer.select.weight")
    'stack.layers.0.mixer.x_proj.weight'
    """
    return _OLD_TENSOR.sub(lambda match: TENSORS[match[0]], name)
