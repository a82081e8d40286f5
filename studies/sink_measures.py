"""How much a model looks at the first token of a text, and how large its activations become."""

import math
from statistics import mean
from typing import Any

import numpy as np
from torch import Tensor

from manyheads import lens

# The length of texts at which Gu and others count sinks (arXiv 2410.10781).
SINK_LENGTH = 64


def measure_sinks(model: Any, passages: Tensor, sink_length: int = SINK_LENGTH) -> dict[str, float]:
    """Means over heads on passages [b t], and the largest activations.

    - first_token: the share of attention on the first token
    - sink_share: the share of heads and texts in which it is above 0.3, in the first tokens alone
    - largest: the largest activation after any layer; mean_largest: the mean of each layer's
    - gate: the mean value of a gate; gate_closed: the share of values below 0.1
    - on_no_key: the share of attention on learned sinks
    """
    statistics = lens.statistics(model, passages.tolist(), progress=False)
    short = lens.statistics(model, passages[:, :sink_length].tolist(), progress=False)
    by_layer = [activation.largest for activation in statistics.activations]
    values = {
        "first_token": float(np.nanmean(statistics["first_token"].means)),
        "sink_share": float(np.nanmean(short["sink"].means)),
        "largest": max(by_layer),
        "mean_largest": mean(by_layer),
    }
    for name in statistics.names:
        if name.startswith("gate_"):
            measure = "gate_closed" if name.endswith("_closed") else "gate"
            values[measure] = float(np.nanmean(statistics[name].means))
        elif name == "on_no_key":
            values[name] = float(np.nanmean(statistics[name].means))
    return {name: value for name, value in values.items() if math.isfinite(value)}


def mean_stable_rank(model: Any) -> float:
    """Of W_V W_O, over all heads."""
    circuits = lens.circuits(model)
    return mean(circuits.ov(head).stable_rank() for head in circuits.scope.heads)
