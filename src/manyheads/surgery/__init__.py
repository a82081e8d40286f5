"""Change a model: cut, gate and adapt its heads."""

from manyheads.surgery.adapters import active, adapt, adapters, detach, merge, unmerge, use
from manyheads.surgery.gates import add_gates
from manyheads.surgery.lowrank import LowRank
from manyheads.surgery.peft_files import load_adapter, save_adapter
from manyheads.surgery.quantised import dequantise, quantise
from manyheads.surgery.trainable import learn_all, learn_all_but, learn_gates, learn_only

__all__ = [
    "LowRank",
    "active",
    "adapt",
    "adapters",
    "add_gates",
    "dequantise",
    "detach",
    "learn_all",
    "learn_all_but",
    "learn_gates",
    "learn_only",
    "load_adapter",
    "merge",
    "quantise",
    "save_adapter",
    "unmerge",
    "use",
]
